"""The native operator written with torch's own operators: used if the kernel cannot be built."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from torchq_compat.custom_modules.recurrent.native.instruction_set import QParamsRow
from torchq_compat.custom_modules.recurrent.native.interpreter import run_interpreted
from torchq_compat.custom_modules.recurrent.native.module_numbers import Boundary, CellNumbers, ModuleNumbers

__all__ = ["run_by_operators"]

State = tuple[Tensor, ...]


def run_by_operators(
    x: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    program: Tensor,
    boundary: Sequence[float],
    batch_sizes: Sequence[int],
    *,
    batch_first: bool,
) -> list[Tensor]:
    """Run a module with torch's operators; arguments and results as in ``op.recurrent``."""
    module = ModuleNumbers.of(program)
    around = Boundary.of(boundary, module.states)
    is_cell = x.dim() == 2 and not batch_sizes
    x = x[None] if is_cell else x.transpose(0, 1) if batch_first and x.dim() == 3 else x
    x = _columns_as_floats(x, around.columns)
    first = _first_states(module, x, states, around, batch_sizes)
    own = iter(weights)
    last: list[State] = []
    for layer in module.layers:
        outputs = []
        for cell in layer:
            output, end = _run(cell, _weights(cell, own), x, first[len(last)], batch_sizes)
            outputs.append(output)
            last.append(end)
        x = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
    stacked = [torch.stack(rows) for rows in zip(*last, strict=True)]
    if is_cell:
        return [
            _handed_out(*each) for each in zip((row[0] for row in stacked), around.results[1:], strict=True)
        ]
    results = [_handed_out(*each) for each in zip((x, *stacked), around.results, strict=True)]
    if batch_first and not batch_sizes:
        results[0] = results[0].transpose(0, 1)
    return results


def _run(
    cell: CellNumbers,
    weights: list[Tensor | None],
    x: Tensor,
    state: State,
    batch_sizes: Sequence[int],
) -> tuple[Tensor, State]:
    def run(part: Tensor, state: State) -> tuple[Tensor, State]:
        if not part.shape[0] or not part.shape[1]:
            return part.new_empty(*part.shape[:2], state[0].shape[-1]), state
        output, last = run_interpreted(
            part, state, weights, cell.table, cell.constants, cell.segments, cell.backward
        )
        return output, tuple(last)

    if not batch_sizes:
        return run(x, state)
    sizes = [(size, len(list(steps))) for size, steps in itertools.groupby(batch_sizes)]
    parts = list(zip(sizes, torch.split(x, [size * steps for size, steps in sizes]), strict=True))
    outputs = []
    for (size, steps), rows in reversed(parts) if cell.backward else parts:
        shaped = rows.view(steps, size, x.shape[-1])
        output, new = run(shaped, tuple(each[:size] for each in state))
        state = tuple(torch.cat([now, each[size:]]) for now, each in zip(new, state, strict=True))
        outputs.append(output.flatten(0, 1))
    return torch.cat(outputs[::-1] if cell.backward else outputs), state


def _weights(cell: CellNumbers, own: Iterator[Tensor]) -> list[Tensor | None]:
    """Return values, scales, zero points and bias of each linear, as ``run_interpreted`` accepts them."""
    found: list[Tensor | None] = []
    for mask in cell.masks:
        found.append(next(own))
        found += [next(own) if mask >> part & 1 else None for part in range(3)]
    return found


def _first_states(
    module: ModuleNumbers, x: Tensor, states: Sequence[Tensor], around: Boundary, batch_sizes: Sequence[int]
) -> list[State]:
    """Return the initial states of every layer and direction."""
    cells = [cell for layer in module.layers for cell in layer]
    if not states:
        batch = batch_sizes[0] if batch_sizes else x.shape[1]
        return [tuple(x.new_zeros(batch, width) for width in _widths(cell, module.states)) for cell in cells]
    given = []
    for state, rows in zip(states, around.states, strict=True):
        by_row = state[None] if state.dim() == 2 else state
        count = len(cells) if len(rows) <= 1 else len(rows)
        each = rows * count if len(rows) == 1 else rows or (None,) * count
        given.append([_requantized(*pair) for pair in zip(by_row.unbind(0), each, strict=True)])
    return list(zip(*given, strict=True))


def _widths(cell: CellNumbers, states: int) -> list[int]:
    instructions = int(cell.table[0])
    first_slot = cell.table.numel() - states - 3 * int(cell.table[1])
    assert first_slot > instructions
    return [int(cell.table[first_slot + 3 * (1 + state)]) for state in range(states)]


def _columns_as_floats(x: Tensor, columns: Sequence[float]) -> Tensor:
    """Return ``x`` as the floats that linears read: integers are dequantized, floats quantized and
    dequantized with the qparams of their columns."""
    widths = [int(width) for width in columns[::6]]
    rows = [QParamsRow(*columns[at + 1 : at + 6]) for at in range(0, len(columns), 6)]
    if x.is_floating_point() and not any(row.scale for row in rows):
        return x
    pieces = zip(torch.split(x, widths, -1), rows, strict=True)
    return torch.cat([_requantized(piece, row if row.scale else None) for piece, row in pieces], -1)


def _requantized(value: Tensor, row: QParamsRow | None) -> Tensor:
    if row is None:
        return value.float()
    if not value.is_floating_point():
        return (value.float() - row.zero_point) * row.scale
    return (_integers(value, row) - row.zero_point) * row.scale


def _handed_out(result: Tensor, row: QParamsRow | None) -> Tensor:
    if row is None:
        return result
    return _integers(result, row).to(torch.int8 if row.quant_min < 0 else torch.uint8)


def _integers(value: Tensor, row: QParamsRow) -> Tensor:
    scaled = torch.round(value * (1.0 / row.scale)) + row.zero_point
    return scaled.clamp(row.quant_min, row.quant_max).nan_to_num(row.nan)
