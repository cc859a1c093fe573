"""The cell loop as a torch operator, so that a compiled or exported program has one call for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchq_compat.custom_modules.recurrent.native.build import kernel_build
from torchq_compat.custom_modules.recurrent.native.call_check import check_call
from torchq_compat.custom_modules.recurrent.native.interpreter import run_interpreted
from torchq_compat.custom_modules.recurrent.native.kernel import run_kernel

__all__ = ["cell_loop"]

NAME = "torchq_compat_native::cell_loop"
SCHEMA = (
    "(Tensor x, Tensor[] states, Tensor?[] weights, Tensor table, Tensor constants, float[] input_qparams, "
    "bool backward) -> (Tensor, Tensor[])"
)


def _on_cpu(*call: Any) -> tuple[Tensor, list[Tensor]]:
    check_call(*call)
    library = kernel_build().library if call[0].numel() else None
    return _by_operators(*call) if library is None else run_kernel(library, *call)


def _by_operators(*call: Any) -> tuple[Tensor, list[Tensor]]:
    check_call(*call)
    x, states, *_ = call
    if not x.shape[0] or not x.shape[1]:
        return _shapes(x, states)[0], [state.clone() for state in states]
    return run_interpreted(*call)


def _shapes(x: Tensor, states: Sequence[Tensor], *_: object) -> tuple[Tensor, list[Tensor]]:
    output = x.new_empty((*x.shape[:2], states[0].shape[-1]))
    return output, [torch.empty_like(state) for state in states]


# After an import that failed on the way torch still has the operator; the implementations can be new.
if not hasattr(torch.ops.torchq_compat_native, "cell_loop"):
    torch.library.define(NAME, SCHEMA)
torch.library.impl(NAME, "cpu")(_on_cpu)
torch.library.impl(NAME, "default")(_by_operators)
torch.library.register_fake(NAME)(_shapes)


def cell_loop(
    x: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor | None],
    table: Tensor,
    constants: Tensor,
    input_qparams: Sequence[float],
    *,
    backward: bool,
) -> tuple[Tensor, list[Tensor]]:
    """One direction of one layer of a converted recurrent module.

    Args:
        x: (T, B, I) float32.
        states: (B, width) float32 each, the hidden state first.
        weights: of each linear int8 values (N, K), scales (N,) and zero points (N,) or None if per tensor,
            and bias (N,) or None.
        table: the instructions, ``CellProgram.table``.
        constants: their qparams, ``CellProgram.constants``.
        input_qparams: (columns, scale, zero point, quant_min, quant_max, integer of NaN) of each group of
            columns of ``x``, one after the other; a scale of 0: x has no 8-bit qparams.
        backward: from the last step to the first.

    Returns:
        The hidden states of all steps (T, B, width) and the last states. Without steps these are ``states``.

    Raises:
        InputError: arguments that do not fit the program.
    """
    result: tuple[Tensor, list[Tensor]] = torch.ops.torchq_compat_native.cell_loop(
        x, states, weights, table, constants, input_qparams, backward
    )
    return result
