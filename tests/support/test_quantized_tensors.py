"""torch's quantized tensors, and everything that uses them, go through a single module."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import torchq_compat
from torchq_compat.support import quantized_tensors as qt

PACKAGE = Path(torchq_compat.__file__).parent
DOOR = "support/quantized_tensors.py"
METHODS = {"is_quantized", "int_repr", "q_scale", "q_zero_point", "qscheme", "q_per_channel_scales"}
FUNCTIONS = {
    "torch.quantize_per_tensor",
    "torch.quantize_per_channel",
    "torch.ops.quantized",
    "ATEN.int_repr",
    "ATEN.quantize_per_tensor",
    "ATEN._make_per_tensor_quantized_tensor",
    "upstream.make_per_tensor_quantized_tensor",
}


def uses(tree: ast.AST) -> list[str]:
    """Names that only quantized tensors have, or that make them."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.args:
            found += [node.func.attr] if node.func.attr in METHODS else []
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            found += [name] if name in FUNCTIONS or node.attr == "is_quantized" else []
        elif isinstance(node, ast.ImportFrom) and node.module == "torchq_compat.support.upstream":
            found += [alias.name for alias in node.names if alias.name.endswith("_quantized_tensor")]
    return found


def test_one_module_uses_them() -> None:
    found = {
        path.relative_to(PACKAGE).as_posix(): names
        for path in PACKAGE.rglob("*.py")
        if (names := uses(ast.parse(path.read_text())))
    }
    assert set(found) == {DOOR}
    assert {"value.is_quantized", "int_repr", "torch.ops.quantized"} <= set(found[DOOR])


@pytest.mark.parametrize("code", ["x.is_quantized", "x.int_repr()", "torch.quantize_per_tensor(x)"])
def test_other_uses_are_found(code: str) -> None:
    assert uses(ast.parse(code))


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


def test_operators_of_lowered_graphs(values: torch.Tensor) -> None:
    quantized = qt.QUANTIZE_OP(values, 0.5, 10, torch.quint8)
    assert torch.equal(quantized.dequantize(), qt.quantize(values, 0.5, 10, torch.quint8).dequantize())
    again = qt.OF_INTEGERS_OP(qt.INTEGERS_OP(quantized), 0.5, 10)
    assert torch.equal(qt.DEQUANTIZE_OP(again), quantized.dequantize())
    assert qt.KERNELS.add(quantized, again, 1.0, 0).q_scale() == 1.0


def test_every_use_has_a_replacement() -> None:
    assert len(qt.REPLACEMENTS) == 4
    assert all(use and replacement for use, replacement in qt.REPLACEMENTS.items())
