"""Measure the error of a float result, in quantization steps of the quantized operand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from torchq_compat.lower.x86.qdq_operands import arguments_of
from torchq_compat.qspecs.qdq import DEQUANTIZE_DYNAMIC, is_dequantize

__all__ = ["steps_of_floats"]

ATEN = torch.ops.aten
#: The distance between two float16 numbers, relative to the larger.
HALF = 2.0**-10
#: The relative error of float sums in another order.
EPSILON = 1e-5
Evaluate = Callable[[Node], Any]


def steps_of_floats(op: Node, evaluate: Evaluate, expected: Tensor, found: Tensor) -> float:
    """Return the largest difference, relative to the change that one input quantization step makes."""
    step = _step(op, evaluate) + EPSILON * (expected.abs() + expected.abs().mean()) + 1e-12
    steps = (found.double() - expected.double()).abs() / step.double()
    return float("inf") if bool(steps.isnan().any()) else float(steps.max())


def _step(op: Node, evaluate: Evaluate) -> Tensor:
    arguments = arguments_of(op)
    if op.target is not ATEN.linear.default:
        # A row of a table, or a sum of rows: both are exact, so only EPSILON is allowed.
        return torch.zeros(())
    source, weight = arguments["input"], evaluate(arguments["weight"])
    if isinstance(source, Node) and source.target is DEQUANTIZE_DYNAMIC:
        scale = evaluate(source.args[1])  # type: ignore[arg-type]
        # One step of error in every input, with signs that add up like those of noise.
        noise: Tensor = float(scale) * weight.norm(dim=1)
        return noise
    if is_dequantize(arguments["weight"]):
        return torch.zeros(())
    size: Tensor = evaluate(source).abs() @ weight.abs().t()
    return HALF * size
