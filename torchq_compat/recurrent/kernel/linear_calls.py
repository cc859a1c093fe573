"""A linear layer as a program of the native operator: the package's own product, on every engine and CPU.

The program is a cell whose new state is a copy of its one linear, and whose old state is never read.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchq_compat.read.qparams import PerTensorQParams
from torchq_compat.recurrent.kernel.bound_module import OWNERS
from torchq_compat.recurrent.kernel.module_numbers import Boundary, CellNumbers, ModuleNumbers, weight_mask
from torchq_compat.recurrent.kernel.op import NO_SIZES, drop_forgotten, forget
from torchq_compat.recurrent.kernel.program import (
    CellProgram,
    ColumnQParams,
    DynamicQParams,
    Instruction,
    Op,
    Slot,
    WeightNames,
    as_numbers,
    qparams_row,
)

LINEAR_OPERATOR: Any = torch.ops.torchq_compat_native.recurrent.default
INPUT, STATE, PRODUCT, RESULT = range(4)


@dataclass(frozen=True)
class LinearWeight:
    """The weight of a linear layer.

    Attributes:
        values: int8, of shape (N, K).
        scales: float, of shape (N,); None: per tensor.
        zero_points: integers, of shape (N,); None: per tensor.
        bias: float32, of shape (N,), or None.
        per_tensor: scale and zero point of a weight quantized per tensor.
    """

    values: Tensor
    scales: Tensor | None
    zero_points: Tensor | None
    bias: Tensor | None
    per_tensor: tuple[float, int] = (1.0, 0)


@dataclass(frozen=True)
class LinearCall:
    """The arguments of the operator after x, (rows, K); the one result has the shape (rows, N)."""

    weights: tuple[Tensor, ...]
    program: Tensor
    boundary: list[float]
    owner: int

    def behind_x(self) -> tuple[Any, ...]:
        """Return the arguments after x. The operator does not check whether weights were written in place: a
        changed weight needs another ``LinearCall``."""
        version, directions = 1, 1
        sizes = list(NO_SIZES)
        return (
            *([], list(self.weights), self.program, self.boundary, sizes),
            *(directions, False, self.owner, version),
        )


def linear_call(
    weight: LinearWeight,
    columns: ColumnQParams,
    *,
    dynamic: DynamicQParams | None = None,
    relu: bool = False,
    output: PerTensorQParams | None = None,
) -> LinearCall:
    """Return the call that computes a linear layer.

    Args:
        weight: the weight of the layer; its tensors must not change.
        columns: the qparams of the columns of x, which may be integers or floats.
        dynamic: how to choose the qparams of x, in place of ``columns``.
        relu: whether a ReLU follows.
        output: the 8-bit qparams of the result's integers; None: the result is floats.
    """
    outputs, inputs = weight.values.shape
    # Two instructions: the linear reads only x and is computed for all steps at once, a state at every step.
    instructions = (
        Instruction(
            Op.LINEAR,
            PRODUCT,
            ((INPUT, 0),),
            outputs,
            outputs,
            True,
            weight=0,
            input=dynamic,
            weight_qparams=weight.per_tensor,
        ),
        Instruction(Op.RELU if relu else Op.COPY, RESULT, ((PRODUCT, 0),), outputs, outputs, False),
    )
    of_a_step = Slot(outputs, outputs, False)
    slots = (Slot(inputs, inputs, True), of_a_step, Slot(outputs, outputs, True), of_a_step)
    names = WeightNames("values", "scales", "zero_points", "bias")
    program = CellProgram(instructions, slots, (RESULT,), (names,))
    parts = (weight.scales, weight.zero_points, weight.bias)
    mask = weight_mask(parts)
    numbers = CellNumbers(program.table, program.constants, (mask,), backward=False)
    result = None if output is None else qparams_row(output)
    boundary = Boundary(tuple(as_numbers(columns)), ((),), (None, result)).numbers()
    given = tuple(each for each in (weight.values, *parts) if each is not None)
    call = LinearCall(given, ModuleNumbers(((numbers,),)).tensor(), boundary, next(OWNERS))
    weakref.finalize(call.program, forget, call.owner).atexit = False
    drop_forgotten()
    return call
