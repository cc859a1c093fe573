"""Calling the compiled cell loop, through ctypes."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from torchq_compat.custom_modules.recurrent.native.forks import threads_of_loop
from torchq_compat.custom_modules.recurrent.native.instruction_set import (
    INSTRUCTION_COLUMNS,
    QPARAMS_COLUMNS,
    SLOT_COLUMNS,
)

__all__ = ["run_kernel"]

#: Of a linear's values, scales, zero points and bias.
WEIGHT_DTYPES = (torch.int8, torch.float32, torch.int64, torch.float32)
#: Multiply-adds of a step from which another thread pays for meeting at a barrier.
WORK_PER_THREAD = 1 << 18


def run_kernel(
    library: ctypes.CDLL,
    x: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor | None],
    table: Tensor,
    constants: Tensor,
    input_qparams: Sequence[float],
    backward: bool,
) -> tuple[Tensor, list[Tensor]]:
    """One direction of a layer; arguments and results as the operator has them, contiguous."""
    steps, batch, _ = x.shape
    states = [state.contiguous() for state in states]
    x, output = x.contiguous(), x.new_empty(steps, batch, states[0].shape[-1])
    last = [torch.empty_like(state) for state in states]
    instruction_count, slot_count, state_count = table[:3].tolist()
    table = table.contiguous()
    instructions = table.data_ptr() + 3 * table.itemsize
    slots = instructions + INSTRUCTION_COLUMNS * instruction_count * table.itemsize
    results = slots + SLOT_COLUMNS * slot_count * table.itemsize
    held = [
        None if each is None else each.to(dtype).contiguous()
        for each, dtype in zip(weights, itertools.cycle(WEIGHT_DTYPES), strict=False)
    ]
    sizes, work = [], 0
    for values in held[0::4]:
        assert values is not None
        sizes.append(values.shape[1])
        work += values.numel() * batch
    problem = library.torchq_compat_run_cell(
        _address(instructions),
        _address(constants.data_ptr()),
        _count(instruction_count),
        _address(slots),
        _count(slot_count),
        _address(results),
        _count(state_count),
        _pointers(held),
        (ctypes.c_int64 * len(sizes))(*sizes),
        _count(len(held) // 4),
        (ctypes.c_double * len(input_qparams))(*input_qparams),
        _count(len(input_qparams) // (QPARAMS_COLUMNS + 1)),
        _count(steps),
        _count(batch),
        _count(int(backward)),
        _address(x.data_ptr()),
        _pointers(states),
        _address(output.data_ptr()),
        _pointers(last),
        _count(threads_of_loop(work // WORK_PER_THREAD)),
    )
    if problem:
        raise torch.OutOfMemoryError(f"no memory for {steps} steps of {batch} rows in the cell loop")
    return output, last


def _pointers(tensors: Sequence[Tensor | None]) -> ctypes.Array[ctypes.c_void_p]:
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    return (ctypes.c_void_p * len(addresses))(*addresses)


_address = ctypes.c_void_p
_count = ctypes.c_int64
