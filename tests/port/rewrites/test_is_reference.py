from __future__ import annotations

import pytest

from tests.port.checks import IMPORTS, check_left, check_noop, check_transformed
from torchq_compat.port.rewrites.fx_arguments import IS_REFERENCE as REWRITE


@pytest.mark.parametrize(
    "code", ["convert_fx(m)\n", "other(m, is_reference=True)\n", "prepare_fx(m, c, x)\n"]
)
def test_noop(code: str) -> None:
    check_noop(REWRITE, IMPORTS + code)


def test_true_is_another_function() -> None:
    check_transformed(
        REWRITE,
        IMPORTS + "q = convert_fx(m, is_reference=True, convert_custom_config=c)\n",
        IMPORTS.replace("prepare_qat_fx", "prepare_qat_fx, convert_to_reference_fx")
        + "q = convert_to_reference_fx(m, convert_custom_config=c)\n",
    )


def test_false_goes() -> None:
    check_transformed(REWRITE, IMPORTS + "convert_fx(m, is_reference=False)\n", IMPORTS + "convert_fx(m)\n")


def test_parentheses() -> None:
    check_transformed(
        REWRITE, IMPORTS + "convert_fx((m), is_reference=(False))\n", IMPORTS + "convert_fx((m))\n"
    )


def test_of_a_module() -> None:
    check_transformed(
        REWRITE,
        "from torchq_compat import quantize_fx\nquantize_fx.convert_fx(m, is_reference=True)\n",
        "from torchq_compat import quantize_fx\nquantize_fx.convert_to_reference_fx(m)\n",
    )


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("convert_fx(m, is_reference=flag)\n", "depends on a value"),
        ("convert_fx(\n    m,  # all\n    is_reference=True,\n)\n", "a comment"),
        ("convert_to_reference_fx = 1\nconvert_fx(m, is_reference=True)\n", "means something else"),
    ],
)
def test_left_for_manual_review(code: str, reason: str) -> None:
    check_left(REWRITE, IMPORTS + code, reason)
