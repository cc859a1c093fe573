"""The cell loop written with torch's own operators: used if the kernel cannot be built."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from torchq_compat.custom_modules.recurrent.native.instruction_set import (
    INSTRUCTION_COLUMNS,
    QPARAMS_COLUMNS,
    SLOT_COLUMNS,
    InstructionRow,
    Op,
)
from torchq_compat.qspecs.qdq import CHOOSE_QPARAMS, DEQUANTIZE_DYNAMIC, QUANTIZE_DYNAMIC

__all__ = ["run_interpreted"]


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
    _input_qparams: Sequence[float],
    backward: bool,
) -> tuple[Tensor, list[Tensor]]:
    """Run one direction of a layer; arguments and results as in ``op.cell_loop``.

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
                slots[row.target] = _requantized(value, qparams) if row.quantized else value
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


def _requantized(value: Tensor, constants: Sequence[float]) -> Tensor:
    scale, zero_point, quant_min, quant_max, nan = constants[:QPARAMS_COLUMNS]
    integers = (torch.round(value * (1.0 / scale)) + zero_point).clamp_(quant_min, quant_max)
    return (integers.nan_to_num_(nan) - zero_point) * scale


def _with_chosen_qparams(value: Tensor, row: Sequence[float]) -> Tensor:
    eps, chosen_max, quant_min, quant_max = -row[0], *map(int, row[1:4])
    dtype = torch.uint8 if quant_min == 0 else torch.int8
    qparams = CHOOSE_QPARAMS(value, quant_min, chosen_max, eps, dtype)
    integers = QUANTIZE_DYNAMIC(value, *qparams, quant_min, quant_max, dtype)
    chosen: Tensor = DEQUANTIZE_DYNAMIC(integers, *qparams, quant_min, quant_max, dtype)
    return chosen
