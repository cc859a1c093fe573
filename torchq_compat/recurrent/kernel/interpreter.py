"""The native operator written with torch's own operators, used if the kernel cannot be built."""

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from torchq_compat.read.qdq import CHOOSE_QPARAMS, DEQUANTIZE_DYNAMIC, QUANTIZE_DYNAMIC
from torchq_compat.recurrent.kernel.program import (
    INSTRUCTION_COLUMNS,
    QPARAMS_COLUMNS,
    SLOT_COLUMNS,
    Boundary,
    CellNumbers,
    InstructionRow,
    ModuleNumbers,
    Op,
    QParamsRow,
)

ELEMENTWISE: dict[int, Callable[[Tensor, Tensor], Tensor]] = {
    Op.ADD: lambda a, b: a + b,
    Op.MUL: lambda a, b: a * b,
    Op.COMPLEMENT: lambda a, _: 1 - a,
    Op.SIGMOID: lambda a, _: a.sigmoid(),
    Op.TANH: lambda a, _: a.tanh(),
    Op.RELU: lambda a, _: a.relu(),
    Op.COPY: lambda a, _: a,
}


def run_interpreted(
    x: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor | None],
    table: Tensor,
    constants: Tensor,
    *,
    backward: bool,
) -> tuple[Tensor, list[Tensor]]:
    """Run one direction of a layer over time.

    Args:
        x: (T, B, I) float32.
        states: (B, width) float32 each, the hidden state first.
        weights: for each linear int8 values (N, K), scales (N,) and zero points (N,) or None if per tensor,
            and bias (N,) or None.
        table, constants: the instructions and their qparams, see ``CellProgram``.
        backward: whether to run from the last step to the first.

    Returns:
        The hidden states of all steps (T, B, width) and the last states, which are ``states`` if there are no
        steps.

    Integers are exact in float32 as long as a sum has no more than 24 bits. So linears run on dequantized
    weights, which need no prepacking and no qparams of the input.
    """
    instruction_count, slot_count = table[:2].tolist()
    end = 3 + INSTRUCTION_COLUMNS * instruction_count
    rows = [InstructionRow(*row) for row in table[3:end].view(-1, INSTRUCTION_COLUMNS).tolist()]
    results = table[end + SLOT_COLUMNS * slot_count :].tolist()
    all_qparams = constants.tolist()
    dense = {row.weight: _dequantized(weights, row.weight, all_qparams[i]) for i, row in enumerate(rows)}

    def execute(slots: dict[int, Tensor], once: bool) -> dict[int, Tensor]:
        for row, qparams in zip(rows, all_qparams, strict=True):
            if row.once == once:
                value = _compute(row, qparams[QPARAMS_COLUMNS : 2 * QPARAMS_COLUMNS], slots, dense)
                output = QParamsRow(*qparams[:QPARAMS_COLUMNS]) if row.quantized else None
                slots[row.target] = _on_steps(value, output)
        return slots

    before = execute({0: x}, once=True)
    current, outputs = list(states), []
    for step in reversed(range(x.shape[0])) if backward else range(x.shape[0]):
        here = {slot: value[step] for slot, value in before.items()}
        here.update(enumerate(current, start=1))
        after = execute(here, once=False)
        current = [after[slot] for slot in results]
        outputs.append(current[0])
    stacked = (
        torch.stack(outputs[::-1] if backward else outputs) if outputs else x.new_empty(0, *states[0].shape)
    )
    return stacked, [state.clone() for state in current]


def _compute(
    row: InstructionRow,
    qparams: Sequence[float],
    slots: dict[int, Tensor],
    dense: dict[int, tuple[Tensor, Tensor | None]],
) -> Tensor:
    """Return the result of an instruction whose input has ``qparams``."""
    a = slots[row.a]
    if row.op == Op.LINEAR:
        return F.linear(_with_chosen_qparams(a, qparams) if qparams[0] < 0 else a, *dense[row.weight])
    width = row.segments * row.units
    b = slots[row.b][..., row.b_offset : row.b_offset + width] if row.b >= 0 else a
    return ELEMENTWISE[row.op](a[..., row.a_offset : row.a_offset + width], b)


def _dequantized(
    weights: Sequence[Tensor | None], index: int, constants: Sequence[float]
) -> tuple[Tensor, Tensor | None]:
    """Return the float weight and the bias of a linear; an empty tensor and None for other instructions."""
    if index < 0:
        return torch.empty(0), None
    values, scales, zero_points, bias = weights[4 * index : 4 * index + 4]
    assert values is not None
    if scales is None or zero_points is None:
        scale, zero_point = constants[-2:]
        return (values.float() - zero_point) * scale, bias
    return (values.float() - zero_points[:, None]) * scales[:, None], bias


def _with_chosen_qparams(value: Tensor, row: Sequence[float]) -> Tensor:
    eps, chosen_max, quant_min, quant_max = -row[0], *map(int, row[1:4])
    dtype = torch.uint8 if quant_min == 0 else torch.int8
    qparams = CHOOSE_QPARAMS(value, quant_min, chosen_max, eps, dtype)
    integers = QUANTIZE_DYNAMIC(value, *qparams, quant_min, quant_max, dtype)
    chosen: Tensor = DEQUANTIZE_DYNAMIC(integers, *qparams, quant_min, quant_max, dtype)
    return chosen


# The native operator written with torch's own operators: used if the kernel cannot be built.


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
        return [_handed_out(rows[0], given) for rows, given in zip(stacked, around.results[1:], strict=True)]
    results = [_handed_out(*item) for item in zip((x, *stacked), around.results, strict=True)]
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
        tables = (cell.table, cell.constants)
        output, last = run_interpreted(part, state, weights, *tables, backward=cell.backward)
        return output, tuple(last)

    if not batch_sizes:
        return run(x, state)
    sizes = [(size, len(list(steps))) for size, steps in itertools.groupby(batch_sizes)]
    parts = list(zip(sizes, torch.split(x, [size * steps for size, steps in sizes]), strict=True))
    outputs = []
    for (size, steps), rows in reversed(parts) if cell.backward else parts:
        shaped = rows.view(steps, size, x.shape[-1])
        output, new = run(shaped, tuple(entry[:size] for entry in state))
        state = tuple(torch.cat([now, item[size:]]) for now, item in zip(new, state, strict=True))
        outputs.append(output.flatten(0, 1))
    return torch.cat(outputs[::-1] if cell.backward else outputs), state


def _weights(cell: CellNumbers, own: Iterator[Tensor]) -> list[Tensor | None]:
    """Return values, scales, zero points and bias of each linear, as ``run_interpreted`` accepts them."""
    matches: list[Tensor | None] = []
    for mask in cell.masks:
        matches.append(next(own))
        matches += [next(own) if mask >> part & 1 else None for part in range(3)]
    return matches


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
        item = rows * count if len(rows) == 1 else rows or (None,) * count
        given.append([_on_steps(*pair) for pair in zip(by_row.unbind(0), item, strict=True)])
    return list(zip(*given, strict=True))


def _widths(cell: CellNumbers, states: int) -> list[int]:
    first = 3 + INSTRUCTION_COLUMNS * int(cell.table[0]) + SLOT_COLUMNS  # Slot 0 is the input.
    widths: list[int] = cell.table[first : first + SLOT_COLUMNS * states : SLOT_COLUMNS].tolist()
    return widths


def _columns_as_floats(x: Tensor, columns: Sequence[float]) -> Tensor:
    """Return ``x`` as the floats that linears read: integers are dequantized, floats quantized and
    dequantized with the qparams of their columns."""
    widths = [int(width) for width in columns[::6]]
    rows = [QParamsRow(*columns[at + 1 : at + 6]) for at in range(0, len(columns), 6)]
    if x.is_floating_point() and not any(row.scale for row in rows):
        return x
    pieces = zip(torch.split(x, widths, -1), rows, strict=True)
    return torch.cat([_on_steps(piece, row if row.scale else None) for piece, row in pieces], -1)


def _on_steps(value: Tensor, row: QParamsRow | None) -> Tensor:
    """Return the floats of a ``value`` with qparams: floats are quantized and dequantized."""
    if row is None:
        return value.float()
    integers = _integers(value, row) if value.is_floating_point() else value.float()
    return (integers - row.zero_point) * row.scale


def _handed_out(result: Tensor, row: QParamsRow | None) -> Tensor:
    if row is None:
        return result
    return _integers(result, row).to(torch.int8 if row.quant_min < 0 else torch.uint8)


def _integers(value: Tensor, row: QParamsRow) -> Tensor:
    scaled = torch.round(value * (1.0 / row.scale)) + row.zero_point
    return scaled.clamp(row.quant_min, row.quant_max).nan_to_num(row.nan)
