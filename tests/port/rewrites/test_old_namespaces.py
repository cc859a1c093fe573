from __future__ import annotations

import importlib
from types import ModuleType

import pytest

from tests.port.checks import IMPORTS, check_left, check_noop, check_transformed
from torchq_compat.port.names import NAMESPACES
from torchq_compat.port.rewrites.moved import NAMESPACE as REWRITE
from torchq_compat.port.rewrites.moved import new_namespace


@pytest.mark.parametrize(
    "code",
    [
        IMPORTS + "from torch.ao.quantization import default_qconfig\n",
        IMPORTS + "torch.quantization.default_eval_fn\n",
        IMPORTS + "torch.quantization.quantize_fx.prepare_fx\n",
        IMPORTS + "torch.quantization._numeric_suite\n",
        "from torch.quantization import quantize_dynamic\nimport torch.nn.quantized as nnq\n",
    ],
)
def test_noop(code: str) -> None:
    check_noop(REWRITE, code)


def test_imports_and_dotted_uses() -> None:
    check_transformed(
        REWRITE,
        IMPORTS
        + """\
import torch.quantization
import torch.nn.quantized as nnq
from torch import quantization as tq
from torch.nn.intrinsic.qat import freeze_bn_stats
from torch.quantization.observer import MinMaxObserver
a = torch.quantization.default_qconfig, nnq.LSTM, tq.default_qconfig
b = torch.nn.quantizable.LSTM, nn.quantized.Linear
""",
        IMPORTS
        + """\
import torch.ao.quantization
import torch.ao.nn.quantized as nnq
from torch.ao import quantization as tq
from torch.ao.nn.intrinsic.qat import freeze_bn_stats
from torch.ao.quantization.observer import MinMaxObserver
a = torch.ao.quantization.default_qconfig, nnq.LSTM, tq.default_qconfig
b = torch.ao.nn.quantizable.LSTM, torch.ao.nn.quantized.Linear
""",
    )


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (
            "from torch.quantization import (\n    default_qconfig,  # one\n    default_eval_fn,\n)\n",
            "comments between its names",
        ),
        ("import torch.quantization as tq\ntq.default_eval_fn\n", "not everything used"),
    ],
)
def test_left_for_manual_review(code: str, reason: str) -> None:
    check_left(REWRITE, IMPORTS + code, reason)


def test_names_that_stay_are_imported_as_before() -> None:
    check_transformed(
        REWRITE,
        IMPORTS
        + """\
from torch.quantization import default_qconfig, default_eval_fn, QConfig as Q
from torch import quantization, fx
quantization.quantize_fx.prepare_fx, quantization.QConfig
""",
        IMPORTS
        + """\
from torch.quantization import default_eval_fn
from torch.ao.quantization import default_qconfig, QConfig as Q
from torch import fx
from torch.ao import quantization
quantization.quantize_fx.prepare_fx, quantization.QConfig
""",
    )


@pytest.mark.parametrize("old", [*NAMESPACES, "torch.nn.intrinsic.qat", "torch.nn.quantized.dynamic"])
def test_the_table_against_torch(old: str) -> None:
    """Every public name there is the same object under torch.ao."""
    module = importlib.import_module(old)
    checked = 0
    for name in dir(module):
        value, new = getattr(module, name), new_namespace(f"{old}.{name}")
        if name.startswith("_") or new is None or isinstance(value, ModuleType) or name == "ABC":
            continue
        home, _, last = new.rpartition(".")
        assert getattr(importlib.import_module(home), last) is value, new
        checked += 1
    assert checked
