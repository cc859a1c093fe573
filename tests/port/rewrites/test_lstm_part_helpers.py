from __future__ import annotations

from functools import partial

import pytest

from tests.port.checks import check_noop, check_transformed
from torchq_compat.port.rewrites.moved import LSTM_PART_HELPERS as REWRITE
from torchq_compat.port.source.parsed import ParsedSource

OLD, NEW = "_get_lstm_with_individually_observed_parts", "get_lstm_with_individually_observed_parts"
LEGACY = "torch.ao.quantization.fx.lstm_utils"


@pytest.mark.parametrize(
    "code",
    [
        f"from torchq_compat.lstm_utils import {NEW}\n",
        f"def {OLD}():\n    pass\n\n{OLD}()\n",
        f"helper.{OLD}(1)\n",
    ],
)
def test_noop(code: str) -> None:
    check_noop(REWRITE, code)


def test_import_and_uses_get_the_public_name() -> None:
    check_transformed(
        REWRITE,
        f"""
        from {LEGACY} import {OLD}
        from {LEGACY} import _get_reference_quantized_lstm_module as reference

        def f(lstm):
            return reference({OLD}(lstm))
        """,
        f"""
        from torchq_compat.lstm_utils import {NEW}
        from torchq_compat.lstm_utils import get_reference_quantized_lstm_module as reference

        def f(lstm):
            return reference({NEW}(lstm))
        """,
    )


def test_a_local_variable_of_the_same_name_is_another_thing() -> None:
    check_transformed(
        REWRITE,
        f"from {LEGACY} import {OLD}\n\ndef f({OLD}):\n    return {OLD}\n\n{OLD}(1)\n",
        f"from torchq_compat.lstm_utils import {NEW}\n\ndef f({OLD}):\n    return {OLD}\n\n{NEW}(1)\n",
    )


@pytest.mark.parametrize("reason", [f"__all__ = ['{OLD}']", f"{NEW} = None"])
def test_the_old_name_stays_where_something_needs_it(reason: str) -> None:
    check_transformed(
        REWRITE,
        f"from {LEGACY} import {OLD}\n{reason}\n{OLD}(1)\n",
        f"from torchq_compat.lstm_utils import {NEW} as {OLD}\n{reason}\n{OLD}(1)\n",
    )


def test_the_old_name_stays_where_another_file_imports_it() -> None:
    check_transformed(
        REWRITE,
        f"from {LEGACY} import {OLD}\n",
        f"from torchq_compat.lstm_utils import {NEW} as {OLD}\n",
        partial(ParsedSource, taken_by_others=frozenset({OLD})),
    )


def test_the_module_under_a_name() -> None:
    check_transformed(
        REWRITE,
        f"from torch.ao.quantization.fx import lstm_utils as u\nu.{OLD}(1)\n",
        f"from torchq_compat import lstm_utils as u\nu.{NEW}(1)\n",
    )


def test_dotted_use() -> None:
    check_transformed(
        REWRITE,
        f"import torch\ntorch.ao.quantization.fx.lstm_utils.{OLD}(1)\n",
        f"import torch\nimport torchq_compat.lstm_utils\ntorchq_compat.lstm_utils.{NEW}(1)\n",
    )
