"""Calls of the cell loop, by random programs and by converted modules, written to a file for ``replay``."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.helpers.cell_loop_shared import attribute, inputs_of
from tests.helpers.converted_cells import KINDS, cells_of, converted
from torchq_compat.read.qparams import PerTensorQParams
from torchq_compat.recurrent.kernel.cell_reader import _CellReader, _Value
from torchq_compat.recurrent.kernel.op import recurrent
from torchq_compat.recurrent.kernel.program import (
    INSTRUCTION_COLUMNS,
    SLOT_COLUMNS,
    CellNumbers,
    CellProgram,
    DynamicQParams,
    ModuleNumbers,
    Op,
    WeightNames,
    as_numbers,
    floats_around,
    weight_mask,
)

__all__ = [
    "KINDS_OF_TORCH",
    "Call",
    "any_calls",
    "calls_of_modules",
    "random_call",
    "results_of",
    "write_calls",
]

KINDS_OF_TORCH = ("lstm", "gru", "rnn")
ELEMENTWISE = (Op.ADD, Op.MUL, Op.COMPLEMENT, Op.SIGMOID, Op.TANH, Op.RELU, Op.COPY)
DTYPES = {8: (torch.uint8, torch.int8), 16: (torch.int16, torch.int32), 32: (torch.int32,)}


@dataclass(frozen=True)
class Call:
    """The arguments of ``cell_loop``; x is (rows, I) with ``batch_sizes``. ``features``: cases covered."""

    x: Tensor
    states: list[Tensor]
    weights: list[Tensor | None]
    table: Tensor
    constants: Tensor
    input_qparams: list[float]
    backward: bool
    batch_sizes: tuple[int, ...] = ()
    features: frozenset[str] = frozenset()

    def packed(self, dice: random.Random) -> Call:
        """Return the call on packed rows, with sequences that end one after the other."""
        steps, batch, width = self.x.shape
        if 0 in (steps, batch):
            return self
        sizes = sorted((dice.randint(1, batch) for _ in range(steps - 1)), reverse=True)
        rows = self.x.reshape(-1, width)[: batch + sum(sizes)].clone()
        features = self.features | {"packed sequences"}
        return replace(self, x=rows, batch_sizes=(batch, *sizes), features=features)

    def arguments(self) -> tuple[Any, ...]:
        return (
            self.x,
            self.states,
            self.weights,
            self.table,
            self.constants,
            self.input_qparams,
            self.backward,
        )


class _Cell:
    """A random cell of one of ``kinds``, whose parts all have random qparams."""

    def __init__(
        self, dice: random.Random, hidden: int, inputs: int, kinds: Sequence[str] = KINDS_OF_TORCH
    ) -> None:
        self.dice, self.hidden, self.inputs = dice, hidden, inputs
        self.bits = dice.choice([8, 16, 32])
        self.split = dice.random() < 0.3
        self.dynamic = dice.random() < 0.2
        self.reader = _CellReader()
        self.weights: list[Tensor | None] = []
        self.state_qparams: list[PerTensorQParams | None] = []
        self.features = {f"parts of {self.bits} bits"}
        self.features |= {"split gates"} if self.split else set()
        self.features |= {"dynamic qparams"} if self.dynamic else set()
        kind = dice.choice(kinds)
        self.features.add(f"{kind} cells")
        getattr(self, f"_{kind}")()

    def qparams(self, reach: float, bits: int | None = None) -> PerTensorQParams | None:
        if self.dynamic:
            return None
        bits = self.dice.choice([8, self.bits]) if bits is None else bits
        dtype = self.dice.choice(DTYPES[bits])
        low = 0 if dtype is torch.uint8 else -(2 ** (bits - 1))
        high = low + 2**bits - 1
        zero_point = self.dice.randint(low // 4, high // 4) if self.dice.random() < 0.5 else 0
        scale = 2 * reach / 2 ** min(bits, 20)
        return PerTensorQParams(scale, zero_point, low, high, dtype)

    def linear(self, source: _Value, width: int) -> _Value:
        dice, count = self.dice, source.width
        values = torch.randint(-128, 128, (width, count), dtype=torch.int8)
        scale, qparams = 1 / (60 * math.sqrt(count)), (1.0, 0)
        scales = zero_points = None
        if dice.random() < 0.5:
            scales = scale * (0.5 + torch.rand(width))
            zero_points = (
                torch.randint(-9, 10, (width,)) if dice.random() < 0.5 else torch.zeros(width).long()
            )
        else:
            qparams = (scale, dice.choice([0, 0, -7, 100]))
        if qparams[1] or (zero_points is not None and zero_points.any()):
            self.features.add("weight zero points")
        bias = torch.randn(width) if dice.random() < 0.7 else None
        self.weights += [values, scales, zero_points, bias]
        self.reader.weights.append(WeightNames("w", None, None, None))
        read_on = source.qparams if source.qparams and source.qparams.dtype in DTYPES[8] else None
        if self.dynamic:
            read_on = DynamicQParams(1e-7, dice.choice([127, 255]), 0, 255, torch.uint8)
        return self.reader._instruct(
            Op.LINEAR,
            (source,),
            width,
            weight=len(self.weights) // 4 - 1,
            input=read_on,
            weight_qparams=qparams,
            output=self.qparams(4.0),
        )

    def gates(self, source: _Value, count: int) -> list[_Value]:
        if self.split:
            return [self.linear(source, self.hidden) for _ in range(count)]
        whole, width = self.linear(source, count * self.hidden), self.hidden
        return [replace(whole, offset=gate * width, width=width) for gate in range(count)]

    def op(self, op: Op, *sources: _Value, reach: float = 2.0) -> _Value:
        qparams = self.qparams(reach) if self.dice.random() < 0.9 else None
        return self.reader._instruct(op, sources, sources[0].width, output=qparams)

    def state(self, width: int) -> _Value:
        # The program does not have a state's integers before its new value is known.
        value = self.reader.new_slot(width, once=False)
        return value

    def new_state(self, value: _Value, bits: int | None = None) -> _Value:
        qparams = self.qparams(1.5, bits)
        self.state_qparams.append(qparams)
        return self.reader._instruct(Op.COPY, (value,), value.width, output=qparams)

    def _lstm(self) -> None:
        x = self.reader.new_slot(self.inputs, once=True)
        projected = self.dice.choice([0, 0, max(1, self.hidden // 2)])
        self.features |= {"projections"} if projected else set()
        h, c = self.state(projected or self.hidden), self.state(self.hidden)
        pairs = zip(self.gates(x, 4), self.gates(h, 4), strict=True)
        i, f, g, o = [self.op(Op.ADD, *pair, reach=6.0) for pair in pairs]
        i, f, o = (self.op(Op.SIGMOID, gate, reach=1.0) for gate in (i, f, o))
        kept = self.op(Op.MUL, f, c)
        cell = self.new_state(self.op(Op.ADD, kept, self.op(Op.MUL, i, self.op(Op.TANH, g, reach=1.0))))
        hidden = self.op(Op.MUL, o, self.op(Op.TANH, cell, reach=1.0), reach=1.0)
        hidden = self.new_state(self.linear(hidden, projected) if projected else hidden)
        self.state_qparams.reverse()
        self.program = self.reader.program((h, c), (hidden, cell))

    def _gru(self) -> None:
        x = self.reader.new_slot(self.inputs, once=True)
        h = self.state(self.hidden)
        (ri, zi, ni), (rh, zh, nh) = self.gates(x, 3), self.gates(h, 3)
        r = self.op(Op.SIGMOID, self.op(Op.ADD, ri, rh, reach=6.0), reach=1.0)
        z = self.op(Op.SIGMOID, self.op(Op.ADD, zi, zh, reach=6.0), reach=1.0)
        n = self.op(Op.TANH, self.op(Op.ADD, ni, self.op(Op.MUL, r, nh)), reach=1.0)
        fresh = self.op(Op.MUL, self.op(Op.COMPLEMENT, z, reach=1.0), n)
        hidden = self.new_state(self.op(Op.ADD, fresh, self.op(Op.MUL, z, h)))
        self.program = self.reader.program((h,), (hidden,))

    def _rnn(self) -> None:
        x = self.reader.new_slot(self.inputs, once=True)
        h = self.state(self.hidden)
        (a,), (b,) = self.gates(x, 1), self.gates(h, 1)
        hidden = self.new_state(self.op(self.dice.choice([Op.RELU, Op.TANH]), self.op(Op.ADD, a, b)))
        self.program = self.reader.program((h,), (hidden,))

    def _any(self) -> None:
        """Add instructions in any order, on any operands, as only a user's module might have."""
        dice = self.dice
        x = self.reader.new_slot(self.inputs, once=True)
        widths = [
            dice.choice([self.hidden, self.hidden, self.hidden // 2 + 1]) for _ in range(dice.randint(1, 3))
        ]
        states = [self.state(width) for width in widths]
        values = [x, *states]
        for _ in range(dice.randint(2, 16)):
            values += self._any_values(values)
        results = []
        for state in states:
            fitting = [value for value in values if value.width == state.width and value.slot]
            value = self.reader._whole(dice.choice(fitting))
            results.append(value if dice.random() < 0.5 else self._quantized(value))
        self.state_qparams = [
            value.qparams if isinstance(value.qparams, PerTensorQParams) else None for value in results
        ]
        self.program = self.reader.program(tuple(states), tuple(results))

    def _quantized(self, value: _Value) -> _Value:
        return self.reader._instruct(Op.COPY, (value,), value.width, output=self.qparams(1.5))

    def _any_values(self, values: list[_Value]) -> list[_Value]:
        dice, source = self.dice, self.dice.choice(values)
        made = dice.random()
        if made < 0.4:
            if self.dynamic and source.slot and self.reader.once[source.slot]:
                return []  # the reader refuses these
            gates, width = dice.choice([1, 1, 2, 3]), dice.choice([self.hidden, self.hidden // 2 + 1])
            whole = self.linear(self.reader._whole(source), gates * width)
            return [replace(whole, offset=gate * width, width=width) for gate in range(gates)]
        if made < 0.45:
            first = dice.randrange(source.width)
            return [replace(source, offset=source.offset + first, width=source.width - first)]
        op = dice.choice(ELEMENTWISE)
        sources = [source]
        if op in (Op.ADD, Op.MUL):
            sources.append(dice.choice([value for value in values if value.width == source.width]))
        return [self.op(op, *sources)]


def random_call(
    seed: int,
    *,
    largest_hidden: int = 65,
    largest_batch: int = 130,
    hidden: int | None = None,
    batch: int | None = None,
    kinds: Sequence[str] = KINDS_OF_TORCH,
) -> Call:
    """Return a random cell with random inputs; states and an input may lack qparams, values may be NaN."""
    dice = random.Random(seed)
    torch.manual_seed(seed)
    width = dice.randint(1, largest_hidden)
    cell = _Cell(dice, width if hidden is None else hidden, dice.randint(1, 80), kinds)
    program = cell.program
    any_batch = dice.choice([0, 1, 2, 3, 8, dice.randint(0, largest_batch)])
    batch = any_batch if batch is None else batch
    steps = dice.choice([0, 1, 2, 3, dice.randint(1, 80)]) if batch < 20 else dice.randint(1, 4)
    x, columns = torch.randn(steps, batch, cell.inputs), []
    if dice.random() < 0.7:
        first = dice.randint(1, cell.inputs)
        all_qparams = [
            cell.qparams(2.5, 8) or PerTensorQParams(0.02, 0, -128, 127, torch.int8) for _ in range(2)
        ]
        columns = [(first, all_qparams[0]), (cell.inputs - first, all_qparams[1])][
            : 1 + (first < cell.inputs)
        ]
        pieces = torch.split(x, [width for width, _ in columns], -1)
        quantized = [g.dequantize(g.quantize(p)) for p, (_, g) in zip(pieces, columns, strict=True)]
        x = torch.cat(quantized, -1)
    else:
        columns = [(cell.inputs, None)]
    states = []
    for slot, qparams in zip(program.slots[1:], cell.state_qparams, strict=False):
        state = torch.rand(batch, slot.width) * 2 - 1
        if qparams is not None and dice.random() >= 0.3:
            state = qparams.dequantize(qparams.quantize(state))
        elif qparams is not None:
            cell.features.add("states off their qparams")
        states.append(state)
    if x.numel() and dice.random() < 0.1:
        x.view(-1)[dice.randrange(x.numel())] = dice.choice([math.nan, math.inf, -math.inf])
        cell.features.add("NaN or infinity")
    return Call(
        x,
        states,
        cell.weights,
        program.table,
        program.constants,
        as_numbers(columns),
        dice.random() < 0.5,
        features=frozenset(
            {*cell.features, f"hidden size {cell.hidden}", f"batch {batch}", f"{len(states)} states"}
        ),
    )


def any_calls(
    count: int, seed: int = 0, *, largest_hidden: int = 65, largest_batch: int = 130
) -> Iterator[Call]:
    """Yield calls of all hidden sizes and batches in turn, of torch's cells and of random programs; every
    third is packed."""
    for index in range(count):
        call = random_call(
            seed + index,
            largest_batch=largest_batch,
            hidden=1 + (seed + index) % largest_hidden,
            batch=(seed + index) * 37 % (largest_batch + 1) if index % 2 else None,
            kinds=(*KINDS_OF_TORCH, "any", "any"),
        )
        yield call.packed(random.Random(seed + index)) if index % 3 == 2 else call


def results_of(call: Call) -> bytes:
    """Return what ``replay`` writes for ``call``, computed by the operator of this process."""
    masks = tuple(weight_mask(call.weights[at + 1 : at + 4]) for at in range(0, len(call.weights), 4))
    cells = tuple(
        CellNumbers(call.table, call.constants, masks, backward=backward)
        for backward in (call.backward, not call.backward)
    )
    weights = [weight for weight in call.weights if weight is not None]
    columns = list(call.input_qparams) or [call.x.shape[-1], *[0.0] * 5]
    output, *last = recurrent(
        call.x,
        [state.expand(2, -1, -1) for state in call.states],
        [*weights, *weights],
        ModuleNumbers((cells,)).tensor(),
        floats_around(columns, len(call.states)),
        batch_sizes=call.batch_sizes,
        directions=2,
    )
    found = [output, *(state[direction] for direction in (0, 1) for state in last)]
    return b"".join(_bytes(values.where(~values.isnan(), math.nan)) for values in found)


def calls_of_modules() -> Iterator[Call]:
    """Yield calls of every kind of converted cell."""
    for name in KINDS:
        for cell in cells_of(converted.itself(name)):
            program: CellProgram | None = cell.program()
            assert program is not None
            names = [name for of_linear in program.weights for name in of_linear]
            weights = [None if name is None else attribute(cell, name).detach() for name in names]
            for steps, batch in ((1, 1), (70, 3), (3, 19)):
                x, states = inputs_of(cell, steps, batch)
                all_qparams = as_numbers(((x.shape[-1], None),))
                yield Call(x, list(states), weights, program.table, program.constants, all_qparams, False)


def write_calls(calls: list[Call], path: Path) -> None:
    """Write ``calls`` in the format that ``replay`` reads."""
    with path.open("wb") as file:
        file.write(struct.pack("<q", len(calls)))
        for call in calls:
            for block in _blocks(call):
                file.write(struct.pack("<q", -1 if block is None else len(block)) + (block or b""))


def _blocks(call: Call) -> Iterator[bytes | None]:
    instructions, slots, states = call.table[:3].tolist()
    rows, end = call.table[3:], INSTRUCTION_COLUMNS * instructions
    steps, batch = (len(call.batch_sizes), call.batch_sizes[0]) if call.batch_sizes else call.x.shape[:2]
    inputs = [values.shape[1] for values in call.weights[::4] if values is not None]
    sizes = [
        instructions,
        slots,
        states,
        len(inputs),
        len(call.input_qparams) // 6,
        steps,
        batch,
        call.backward,
    ]
    yield struct.pack("<8q", *sizes)
    yield _bytes(rows[:end])
    yield _bytes(call.constants)
    yield _bytes(rows[end : end + SLOT_COLUMNS * slots])
    yield _bytes(rows[end + SLOT_COLUMNS * slots :])
    yield struct.pack(f"<{len(inputs)}q", *inputs)
    yield struct.pack(f"<{len(call.input_qparams)}d", *call.input_qparams)
    yield struct.pack(f"<{steps}q", *call.batch_sizes) if call.batch_sizes else None
    yield _bytes(call.x)
    for index, weight in enumerate(call.weights):
        dtype = (torch.int8, torch.float32, torch.int64, torch.float32)[index % 4]
        yield None if weight is None else _bytes(weight.to(dtype))
    yield from map(_bytes, call.states)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()
