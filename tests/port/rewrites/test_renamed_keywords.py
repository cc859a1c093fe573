from __future__ import annotations

import pytest

from tests.port.checks import IMPORTS, check_left, check_noop, check_transformed
from torchq_compat.port.rewrites.fx_arguments import RENAMED_KEYWORDS as REWRITE


@pytest.mark.parametrize(
    "code",
    [
        "prepare_fx(m, qconfig_mapping=c, example_inputs=x)\n",
        "other(qconfig_dict=1)\n",
        "qconfig_dict = 1\n",
        "prepare_fx(m, c, x, equalization_qconfig_dict=e)\n",
        "convert_fx(m, prepare_custom_config_dict=1)\n",
    ],
)
def test_noop(code: str) -> None:
    check_noop(REWRITE, IMPORTS + code)


def test_every_keyword() -> None:
    check_transformed(
        REWRITE,
        IMPORTS
        + """\
prepare_fx(m, qconfig_dict = c, prepare_custom_config_dict=p, backend_config_dict=b)
convert_fx(m, convert_custom_config_dict=d)
fuse_fx(m, fuse_custom_config_dict=f)
""",
        IMPORTS
        + """\
prepare_fx(m, qconfig_mapping = c, prepare_custom_config=p, backend_config=b)
convert_fx(m, convert_custom_config=d)
fuse_fx(m, fuse_custom_config=f)
""",
    )


def test_left_for_manual_review() -> None:
    check_left(REWRITE, IMPORTS + "prepare_fx(m, qconfig_dict=c, qconfig_mapping=d)\n", "given too")
