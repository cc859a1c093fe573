"""Checks the arguments of the cell loop, because the kernel reads memory by the program's numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchq_compat.custom_modules.recurrent.native.instruction_set import (
    INSTRUCTION_COLUMNS,
    QPARAMS_COLUMNS,
    SLOT_COLUMNS,
)
from torchq_compat.errors import InputError

__all__ = ["check_call"]


def check_call(
    x: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor | None],
    table: Tensor,
    constants: Tensor,
    input_qparams: Sequence[float],
    _backward: bool = False,
) -> None:
    """Check that the arguments of ``op.cell_loop`` fit the program.

    Raises:
        InputError: if one does not fit; names the argument.
    """
    numbers: list[int] = table.tolist()
    instructions, slots, state_count = numbers[:3]
    first_slot = 3 + INSTRUCTION_COLUMNS * instructions
    end = first_slot + SLOT_COLUMNS * slots
    if len(numbers) != end + state_count or constants.shape != (instructions, 2 * QPARAMS_COLUMNS + 2):
        raise _refused("table", "a program and its constants", f"{len(numbers)} numbers")
    widths = numbers[first_slot:end:SLOT_COLUMNS][: 1 + state_count]
    device, batch = x.device, x.shape[1] if x.dim() == 3 else None
    _check_floats("x", x, (None, None, widths[0]), x.dim() == 3 and x.shape[2] == widths[0])
    if len(states) != state_count:
        raise _refused("states", f"{state_count} tensors", str(len(states)))
    for index, (state, width) in enumerate(zip(states, widths[1:], strict=True)):
        _check_floats(f"states[{index}]", state, (batch, width), state.shape == (batch, width))
        if state.device != device:
            raise _refused(f"states[{index}]", f"a tensor on {device}, where x is", str(state.device))
    for index in range(0, len(weights), 4):
        _check_weight(f"weights[{index}]", weights[index], device)
    columns = sum(input_qparams[:: QPARAMS_COLUMNS + 1])
    if len(input_qparams) % (QPARAMS_COLUMNS + 1) or columns not in (0, widths[0]):
        raise _refused("input_qparams", f"qparams of {widths[0]} columns", f"qparams of {columns:.0f}")


def _check_floats(name: str, value: Tensor, shape: tuple[int | None, ...], fits: bool) -> None:
    if value.dtype is not torch.float32 or not fits:
        wanted = ", ".join("*" if size is None else str(size) for size in shape)
        raise _refused(name, f"torch.float32 of shape ({wanted})", f"{value.dtype} {tuple(value.shape)}")


def _check_weight(name: str, value: Tensor | None, device: torch.device) -> None:
    if value is None or value.dtype is not torch.int8 or value.dim() != 2 or value.device != device:
        found = "None" if value is None else f"{value.dtype} {tuple(value.shape)} on {value.device}"
        raise _refused(name, f"an int8 matrix on {device}", found)


def _refused(name: str, wanted: str, found: str) -> InputError:
    return InputError(
        f"the cell loop's argument {name} must be {wanted}; got {found}.",
        hint="call the lowered module, which makes these arguments, or build them with CellProgram.",
    )
