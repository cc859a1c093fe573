"""torch's quantized tensors, and everything that uses them, go through a single module."""

from __future__ import annotations

import ast
from collections.abc import Iterable

import pytest
import torch

from tests.helpers.oracle import sqnr
from tests.helpers.package_trees import PACKAGE, package_nodes, spelled
from tests.helpers.warm_python import warm_python
from torchq_compat.support import quantized_tensors as qt

DOOR = "support/quantized_tensors.py"
METHODS = {
    "dequantize",
    "int_repr",
    "is_quantized",
    "q_per_channel_axis",
    "q_per_channel_scales",
    "q_per_channel_zero_points",
    "q_scale",
    "q_zero_point",
    "qscheme",
}
FUNCTIONS = {
    "torch.quantize_per_tensor",
    "torch.quantize_per_channel",
    "torch.quantize_per_tensor_dynamic",
    "torch.dequantize",
    "torch.ops.quantized",
    "torch.ops.aten.dequantize",
    "ATEN.dequantize",
    "ATEN.int_repr",
    "ATEN.quantize_per_tensor",
    "ATEN._make_per_tensor_quantized_tensor",
    "upstream.make_per_tensor_quantized_tensor",
}


def uses(nodes: Iterable[ast.AST]) -> list[str]:
    """Names that only quantized tensors have, or that make them."""
    found = []
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.args:
            found += [node.func.attr] if node.func.attr in METHODS else []
        elif isinstance(node, ast.Attribute):
            name = spelled(node)
            is_attribute = node.attr == "is_quantized" and name != "quantized_tensors.is_quantized"
            found += [name] if name in FUNCTIONS or is_attribute else []
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            found += [alias.name for alias in node.names if f"torch.{alias.name}" in FUNCTIONS]
        elif isinstance(node, ast.ImportFrom) and node.module == "torchq_compat.support.upstream":
            found += [alias.name for alias in node.names if alias.name.endswith("_quantized_tensor")]
    return found


def test_one_module_uses_them() -> None:
    found = {
        path.relative_to(PACKAGE).as_posix(): names
        for path, nodes in package_nodes().items()
        if (names := uses(nodes))
    }
    assert set(found) == {DOOR}
    assert {"value.is_quantized", "int_repr", "torch.ops.quantized"} <= set(found[DOOR])


@pytest.mark.parametrize(
    "code",
    [
        "x.is_quantized",
        "x.int_repr()",
        "x.dequantize()",
        "torch.quantize_per_tensor(x)",
        "torch.dequantize",
        "from torch import dequantize",
        "torch.ops.quantized.linear",
    ],
)
def test_other_uses_are_found(code: str) -> None:
    assert uses(ast.walk(ast.parse(code)))


@pytest.fixture
def values() -> torch.Tensor:
    return torch.tensor([[-1.0, 0.26], [0.5, 20.0]])


def test_per_tensor(values: torch.Tensor) -> None:
    quantized = qt.quantize(values, 0.5, 10, torch.quint8)
    assert qt.is_quantized(quantized)
    assert not qt.is_quantized(values)
    assert not qt.is_quantized(0.5)
    assert qt.integers_of(quantized).tolist() == [[8, 11], [11, 50]]
    assert qt.as_float(quantized).tolist() == [[-1.0, 0.5], [0.5, 20.0]]
    assert qt.as_float(values) is values
    assert qt.qparams_of(quantized) == (0.5, 10)
    assert not qt.is_per_channel(quantized)
    again = qt.of_integers(qt.integers_of(quantized), 0.5, 10)
    assert torch.equal(again.dequantize(), quantized.dequantize())


@pytest.mark.parametrize("zero_points", [torch.tensor([10, 0]), torch.tensor([10.0, 0.0])])
def test_per_channel(values: torch.Tensor, zero_points: torch.Tensor) -> None:
    scales = torch.tensor([0.5, 0.25], dtype=torch.float64)
    quantized = qt.quantize_per_channel(values, scales, zero_points, 0, torch.quint8)
    found = qt.channel_qparams(quantized)
    assert torch.equal(found[0].double(), scales)
    assert torch.equal(found[1], zero_points)
    assert qt.is_per_channel(quantized) != qt.has_float_qparams(quantized)
    assert qt.has_float_qparams(quantized) is zero_points.is_floating_point()
    assert qt.integers_of(quantized)[1].tolist() == [2, 80]


def test_every_use_has_a_replacement() -> None:
    assert len(qt.REPLACEMENTS) == 4
    assert all(use and replacement for use, replacement in qt.REPLACEMENTS.items())


#: torch.ao and torchao import operators on quantized tensors: they are removed after that.
WITHOUT = """
import sys
import types
import torch
import torchao.quantization.pt2e.quantize_pt2e

def gone(*args):
    raise AttributeError("gone")

for name in ("quantize_per_tensor", "quantize_per_channel", "dequantize"):
    delattr(torch, name)
for name in ("_make_per_tensor_quantized_tensor", "_make_per_channel_quantized_tensor"):
    delattr(torch, name)
for name in ("int_repr", "q_scale", "q_zero_point", "q_per_channel_scales", "q_per_channel_zero_points"):
    setattr(torch.Tensor, name, gone)
torch.ops.quantized = types.SimpleNamespace()
assert "torchq_compat.support.quantized_tensors" not in sys.modules

from torch import nn
from torch.ao.quantization import get_default_qconfig_mapping
import torchq_compat as tc

class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.lstm, self.out = nn.Conv1d(4, 6, 3), nn.LSTM(6, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        return self.out(self.lstm(self.conv(x).relu().transpose(1, 2))[0])

torch.manual_seed(0)
model, x = Tagger().eval(), torch.randn(2, 4, 8)
prepared = tc.prepare_fx(
    model, get_default_qconfig_mapping("x86"), (x,), tc.get_default_prepare_custom_config()
)
prepared(x)
quantized = tc.convert_fx(prepared)
print(*model(x).flatten().tolist())
print(*quantized(x).flatten().tolist())
for decision in tc.explain(quantized):
    if decision.action in ("lowered", "reference"):
        print(decision.kind, decision.action, decision.reason, sep=": ")
"""


def test_a_torch_without_quantized_tensors_runs_everything() -> None:
    result = warm_python("-c", f"import warnings\nwarnings.simplefilter('ignore')\n{WITHOUT}", bare=True)
    assert result.returncode == 0, result.stderr
    float_line, quantized_line, *decisions = result.stdout.splitlines()
    floats, quantized = (
        torch.tensor([float(value) for value in line.split()]) for line in (float_line, quantized_line)
    )
    assert 30 < sqnr(floats, quantized) < 60
    actions = {kind: action for kind, action, _ in (line.split(": ", 2) for line in decisions)}
    assert {"aten.conv1d.default", "aten.linear.default", "ConvertedLSTM"} <= actions.keys()
    assert set(actions.values()) == {"lowered"}


def test_what_is_absent_is_told_by_name_and_equals_nothing() -> None:
    absent = qt._of_torch("there_is_none")
    assert absent != torch.relu
    with pytest.raises(RuntimeError, match=r"it lacks torch\.there_is_none"):
        absent(torch.ones(1))
    with pytest.raises(RuntimeError, match=r"it lacks torch\.ops\.quantized\.there_is_none\.default"):
        qt.KERNELS.there_is_none.default(torch.ones(1))
    assert qt.AVAILABLE
