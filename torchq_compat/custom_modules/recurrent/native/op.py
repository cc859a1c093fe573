"""A converted recurrent module as one torch operator, ``torchq_compat_native::recurrent``.

On the CPU it is C++ (``recurrent_operator.cpp``) from the first call on; where that cannot be built, and on
other devices, torch's operators run the same program.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchq_compat.custom_modules.recurrent.native.build import kernel_build
from torchq_compat.custom_modules.recurrent.native.by_operators import run_by_operators
from torchq_compat.custom_modules.recurrent.native.call_check import check_call
from torchq_compat.custom_modules.recurrent.native.module_numbers import (
    CellNumbers,
    ModuleNumbers,
    floats_around,
    weight_mask,
)

__all__ = [
    "NO_SIZES",
    "WORK_PER_THREAD",
    "bind_call",
    "bound_operator",
    "cell_loop",
    "drop_forgotten",
    "forget",
    "recurrent",
]

NAME = "torchq_compat_native::recurrent"
SCHEMA = (
    "(Tensor x, Tensor[] states, Tensor[] weights, Tensor program, float[] boundary, int[] batch_sizes, "
    "int directions, bool batch_first, int owner=0, int version=-1, int work_per_thread=262144) -> Tensor[]"
)
#: Multiply-adds of a step from which another thread pays for meeting at a barrier.
WORK_PER_THREAD = 1 << 18
OPS = torch.ops.torchq_compat_native
#: Owners whose packed weights nobody needs any more.
FORGOTTEN: deque[int] = deque()
#: The ``batch_sizes`` of a call without any, where AOTInductor reads it: it hands over no empty list.
NO_SIZES = (0,)


def _before_the_kernel(*call: Any) -> list[Tensor]:
    """What runs until the kernel is there, which on the CPU takes its place."""
    if call[0].device.type == "cpu" and kernel_build().is_loaded:
        results: list[Tensor] = OPS.recurrent.default(*call)
        return results
    x, states, weights, program, boundary, batch_sizes, _, batch_first = call[:8]
    sizes = _sizes(batch_sizes)
    return run_by_operators(x, states, weights, program, boundary, sizes, batch_first=batch_first)


def _sizes(batch_sizes: Sequence[int]) -> Sequence[int]:
    return () if tuple(batch_sizes) == NO_SIZES else batch_sizes


def _shapes(
    x: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    program: Tensor,
    boundary: Sequence[float],
    batch_sizes: Sequence[int],
    directions: int,
    batch_first: bool,
    owner: int = 0,
    version: int = -1,
    work_per_thread: int = 0,
) -> list[Tensor]:
    """Of calls with states, which is how programs are captured."""
    last = [torch.empty_like(state) for state in states]
    if x.dim() == 2 and not _sizes(batch_sizes):
        return last
    width = directions * states[0].shape[-1]
    if not batch_first or x.dim() == 2:
        return [x.new_empty(*x.shape[:-1], width), *last]
    batch, steps, _ = x.shape
    return [x.new_empty(steps, batch, width).transpose(0, 1), *last]  # the steps of the kernel, turned


# After an import that failed on the way, or where a program without Python loaded the library before, torch
# has the operator.
if not hasattr(OPS, "recurrent"):
    torch.library.define(NAME, SCHEMA)
torch.library.impl(NAME, "default")(_before_the_kernel)
torch.library.register_fake(NAME)(_shapes)
# Integers have no gradients; else every result would ask for some, because biases are parameters.
WITHOUT_GRADIENTS = torch.library.Library("torchq_compat_native", "IMPL")  # type: ignore[no-untyped-call]
WITHOUT_GRADIENTS.impl(  # type: ignore[no-untyped-call]
    "recurrent", torch.library.fallthrough_kernel, "Autograd"
)


def recurrent(
    x: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    program: Tensor,
    boundary: Sequence[float],
    *,
    batch_sizes: Sequence[int] = (),
    directions: int = 1,
    batch_first: bool = False,
    owner: int = 0,
    version: int = -1,
) -> list[Tensor]:
    """All layers and directions of a converted recurrent module, or one step of a cell.

    Args:
        x: (T, B, I), or (B, T, I) with ``batch_first``; (B, I) for one step of a cell; with ``batch_sizes``
            packed rows. float32, or 8-bit integers on the qparams in ``boundary``.
        states: (layers * directions, B, width) each, the hidden state first; (B, width) for a cell. float32,
            or integers as ``x``. Empty: zeros.
        weights: of each linear int8 values (N, K), and those of scales (N,), zero points (N,) and bias (N,)
            that ``program`` says it has.
        program: ``ModuleNumbers.tensor()``.
        boundary: ``Boundary.numbers()``.
        batch_sizes: rows of each step of packed sequences, none larger than the one before; none, or
            ``NO_SIZES``: x is not packed.
        directions: of each layer.
        owner: whose packed weights these are; 0: nobody's, of whom only the last few are kept.
        version: a number that grows whenever a weight is written in place; -1: look at the weights.

    Returns:
        The output (T, B, directions * width), in the order of ``x``, and the last states; of a cell the last
        states alone. float32, or integers where ``boundary`` says so.

    Raises:
        RuntimeError: arguments that do not fit the program.
    """
    around = (batch_sizes, directions, batch_first, owner, version, WORK_PER_THREAD)
    results: list[Tensor] = OPS.recurrent.default(x, states, weights, program, boundary, *around)
    return results


@functools.cache
def bound_operator() -> Callable[..., list[Tensor]]:
    """``recurrent`` for calls that come again and again: x, the states, what ``bind_call`` gave, batch_first
    and work_per_thread. There where the kernel is loaded.

    It is what the operator's overload calls: torch looks at every argument in Python before that.
    """
    overload = OPS.recurrent_bound.default
    WITHOUT_GRADIENTS.impl(  # type: ignore[no-untyped-call]
        "recurrent_bound", torch.library.fallthrough_kernel, "Autograd"
    )
    operator: Callable[..., list[Tensor]] = overload._op
    return operator


def bind_call(
    weights: Sequence[Tensor], program: Tensor, boundary: Sequence[float], owner: int, version: int
) -> int:
    """Bind what ``recurrent`` takes beside x and the states, for ``bound_operator``.

    Returns:
        A number for it. It holds until the owner binds other weights, or another version of them, or is
        forgotten.

    Raises:
        RuntimeError: weights or a boundary that do not fit the program.
    """
    ticket: int = OPS.bind_call.default(weights, program, boundary, owner, version)
    return ticket


def forget(owner: int) -> None:
    """Have what is packed for ``owner`` dropped when the next module is bound.

    Not at once: garbage may be collected while a graph is traced, which would record the call.
    """
    FORGOTTEN.append(owner)


def drop_forgotten() -> None:
    """Drop what is packed for owners that are gone."""
    if FORGOTTEN and not torch.compiler.is_compiling() and kernel_build().is_loaded:
        while FORGOTTEN:
            OPS.forget.default(FORGOTTEN.popleft())


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
    check_call(x, states, weights, table, constants, input_qparams)
    masks = tuple(weight_mask(weights[at + 1 : at + 4]) for at in range(0, len(weights), 4))
    numbers = ModuleNumbers(((CellNumbers(table, constants, masks, backward=backward),),))
    output, *last = recurrent(
        x,
        [state[None] for state in states],
        [weight for weight in weights if weight is not None],
        numbers.tensor(),
        floats_around(list(input_qparams) or [x.shape[-1], *[0.0] * 5], len(states)),
    )
    return output, [state[0] for state in last]
