"""Shapes without values are those with values, also where an operator was asked before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from torchq_compat.capture.sizes.shape_program import ShapeProgram
from torchq_compat.capture.torch_export import capture

PROGRAMS: tuple[tuple[Callable[..., Tensor], int], ...] = (
    (lambda x: x + 1, 1),
    (lambda x: x + 1.0, 1),
    (lambda x: x + True, 1),
    (lambda x: x.clone().unsqueeze_(0) * x, 2),
    (lambda x: (x + 1).t_() @ (x + 1), 2),
    (lambda x: x.mean(1, keepdim=True) + x.mean(1, keepdim=False)[:, None], 2),
    (lambda x: x[:, 1:], 3),
    (lambda x: x.roll((1, -1), (0, 1)).relu().flatten(1), 3),
    (lambda x: x.transpose(0, 1).relu().add_(1).sigmoid().flatten(0), 2),
    (lambda x: F.linear(x, x[0:4] * 2), 2),
    (lambda x: F.linear(x, x), 2),
    (lambda x: F.layer_norm(x, x.shape[1:]), 3),
    (lambda x: F.batch_norm(x, torch.zeros(4), torch.ones(4), torch.ones(4)), 3),
    (lambda x: torch.cat([x.relu(), x.sigmoid()], 1).flatten(1), 3),
)


class Program(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_shapes_and_dtypes_are_those_of_values(dtype: torch.dtype) -> None:
    for function, rank in PROGRAMS if dtype is torch.float32 else PROGRAMS[:3]:
        example = torch.ones((4,) * rank, dtype=dtype)
        captured, _ = capture(Program(function), (example,))
        for shape in 2 * ((4,) * rank, (5, 4, 4)[:rank], (4, 5, 4)[:rank]):
            expected = values_of(captured, torch.ones(shape, dtype=dtype))
            assert shapes_of(captured, example, shape) == expected, (rank, shape)


def values_of(captured: GraphModule, x: Tensor) -> object:
    try:
        result = captured(x)
    except Exception:
        return None
    return result.shape, result.dtype


def shapes_of(captured: GraphModule, example: Tensor, shape: tuple[int, ...]) -> object:
    program = ShapeProgram.of(captured, {"x": example})
    try:
        values = program.values({("x", dim): size for dim, size in enumerate(shape)})
    except Exception:
        return None
    (node,) = captured.graph.output_node().all_input_nodes
    return values[node].shape, values[node].dtype
