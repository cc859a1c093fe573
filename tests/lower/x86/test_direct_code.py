"""A lowered graph runs as the lines of its code, which call operators without their Python wrappers."""

from __future__ import annotations

import inspect
import linecache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import get_default_qconfig_mapping
from torch.overrides import TorchFunctionMode

import torchq_compat as tc
from torchq_compat.errors import CallError
from torchq_compat.lower.x86.direct_code import BY_FUNCTION


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 5)

    def forward(self, _torchq_compat_operator_0: Tensor) -> Tensor:
        return self.head(torch.relu(self.conv(_torchq_compat_operator_0)).mean((2, 3)))


def lowered() -> Any:
    example = (torch.rand(2, 3, 8, 8),)
    prepared = tc.prepare_fx(Model().eval(), get_default_qconfig_mapping("x86"), example)
    prepared(*example)
    return tc.convert_fx(prepared)


def compiled(model: Any) -> Any:
    """Return the function that runs, which is wrapped by one that redirects torch.export."""
    forward = type(model).forward
    return next(cell.cell_contents for cell in forward.__closure__ if inspect.isfunction(cell.cell_contents))


@torch.no_grad()
def test_graph_and_code_are_as_before_and_every_operator_is_called_directly() -> None:
    model = lowered()
    kernels = {str(node.target) for node in model.graph.nodes if "quantized." in str(node.target)}
    assert len(kernels) == 2
    assert "quantized.linear.default" in kernels
    assert all(f"torch.ops.{name}(" in model.code for name in kernels)
    names = compiled(model).__code__.co_names
    assert "ops" not in names
    assert sum(name.startswith("_torchq_compat_operator_") for name in names) >= 4
    assert "_torchq_compat_operator_0" not in names  # the name of an argument
    x = torch.rand(3, 3, 8, 8)
    assert torch.equal(model(x), torch.fx.Interpreter(model, graph=model.graph).run(x))


@torch.no_grad()
def test_a_failing_call_still_names_its_place() -> None:
    with pytest.raises(CallError, match="'conv'"):
        lowered()(torch.rand(2, 3, 8, 8).double())


@torch.no_grad()
def test_lines_are_found_for_tracebacks() -> None:
    code = compiled(lowered()).__code__
    assert "def forward" in "".join(linecache.getlines(code.co_filename))


@torch.no_grad()
def test_modes_of_torch_function_see_the_kernels() -> None:
    seen: list[str] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    model, x = lowered(), torch.rand(1, 3, 8, 8)
    expected = model(x)
    with Watch():
        assert torch.equal(model(x), expected)
    assert any("linear" in name for name in seen)


def calls_by_function() -> list[tuple[Any, tuple[Any, ...]]]:
    x = torch.randn(2, 3, 4)
    quantized = torch.quantize_per_tensor(x, 0.05, 3, torch.quint8)
    aten = torch.ops.aten
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (aten.dequantize.self, (quantized,)),
        (aten.quantize_per_tensor.default, (x, 0.1, 7, torch.qint8)),
        (aten.softmax.int, (x, -1)),
        (aten.softmax.int, (x, 1, torch.float64)),
        (aten.stack.default, ([x, x + 1], 1)),
    ]
    for given in (x, quantized):
        calls += [
            (aten.transpose.int, (given, 0, 2)),
            (aten.permute.default, (given, [2, 0, 1])),
            (aten.select.int, (given, 1, -1)),
            (aten.reshape.default, (given, [6, -1])),
            (aten.flatten.using_ints, (given, 1, 2)),
            (aten.unsqueeze.default, (given, 1)),
            (aten.squeeze.dim, (given[:, :1], 1)),
            (aten.relu.default, (given,)),
        ]
    return calls


def test_functions_of_torch_are_the_operators_they_stand_for() -> None:
    calls = calls_by_function()
    assert {overload for overload, _ in calls} == set(BY_FUNCTION)
    for overload, args in calls:
        expected, found = overload(*args), BY_FUNCTION[overload](*args)
        assert (found.dtype, found.shape, found.stride()) == (
            expected.dtype,
            expected.shape,
            expected.stride(),
        )
        assert torch.equal(found, expected), overload
