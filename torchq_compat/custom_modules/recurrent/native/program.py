"""A converted cell's q-dq graph as a program for the cell loop: instructions over slots of float rows.

Slot 0 is the input, slots 1 to S are the states, every other slot is what an instruction writes. Slicing is
no instruction but an offset into a slot. A q-dq pair is no instruction either but belongs to the instruction
before it. What does not depend on a state is computed once for all steps.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torchq_compat.specs.grids import PerTensorGrid

__all__ = [
    "INSTRUCTION_COLUMNS",
    "SLOT_COLUMNS",
    "CellProgram",
    "Instruction",
    "Op",
    "Slot",
    "UnsupportedCellError",
    "WeightNames",
    "cell_program",
    "grid_row",
]

ATEN = torch.ops.aten
QDQ = torch.ops.quantized_decomposed
QUANTIZE = QDQ.quantize_per_tensor.default
DEQUANTIZE = QDQ.dequantize_per_tensor.default
DEQUANTIZE_CHANNELS = QDQ.dequantize_per_channel.default
#: Numbers of an instruction and of a slot in ``CellProgram.table``.
INSTRUCTION_COLUMNS, SLOT_COLUMNS = 11, 3


class Op(IntEnum):
    """What an instruction computes; the kernel has the same order."""

    LINEAR = 0
    ADD = 1
    MUL = 2
    COMPLEMENT = 3
    SIGMOID = 4
    TANH = 5
    RELU = 6
    COPY = 7


UNARY = {
    ATEN.sigmoid.default: Op.SIGMOID,
    ATEN.tanh.default: Op.TANH,
    ATEN.relu.default: Op.RELU,
}
BINARY = {ATEN.add.Tensor: Op.ADD, ATEN.mul.Tensor: Op.MUL}
SLICES = (ATEN.chunk.default, ATEN.split_with_sizes.default)


class UnsupportedCellError(Exception):
    """A graph the cell loop has no instructions for; the message says what of it. Never reaches the user."""


class WeightNames(NamedTuple):
    """A linear's int8 weight (N, K): attribute names in the cell. Without ``scales`` it is per tensor."""

    values: str
    scales: str | None
    zero_points: str | None
    bias: str | None


@dataclass(frozen=True)
class Slot:
    """Rows of ``width`` floats, in segments of ``units``; ``once``: of all steps."""

    width: int
    units: int
    once: bool


@dataclass(frozen=True)
class Instruction:
    """One operation on whole rows.

    Attributes:
        target: the slot it writes, of the operation's width.
        sources: (slot, first column) of each operand.
        units: how many columns belong to one gate.
        weight: index of a linear's weight.
        output: the grid its result is put on; None: floats.
        input: the grid of what a linear reads; None: on none, or the input of the cell, whose grids the
            caller knows.
        weight_qparams: scale and zero point of a weight quantized per tensor.
    """

    op: Op
    target: int
    sources: tuple[tuple[int, int], ...]
    width: int
    units: int
    once: bool
    weight: int = -1
    output: PerTensorGrid | None = None
    input: PerTensorGrid | None = None
    weight_qparams: tuple[float, int] = (1.0, 0)


@dataclass(frozen=True)
class CellProgram:
    """A cell as instructions. ``results``: the slot of every new state."""

    instructions: tuple[Instruction, ...]
    slots: tuple[Slot, ...]
    results: tuple[int, ...]
    weights: tuple[WeightNames, ...]
    table: Tensor = field(init=False, compare=False)
    constants: Tensor = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", _table(self))
        object.__setattr__(self, "constants", _constants(self.instructions))


def cell_program(cell: GraphModule) -> CellProgram:
    """The program of a converted cell ``(x, *states) -> (*new states,)``.

    Raises:
        UnsupportedCellError: a graph with an operator, or a quantization, that the loop has not.
    """
    reader = _Reader(cell)
    for node in cell.graph.nodes:
        reader.read(node)
    return reader.program()


@dataclass(frozen=True)
class _Value:
    """Columns of a slot, with the grid they lie on."""

    slot: int
    offset: int
    width: int
    grid: PerTensorGrid | None = None


@dataclass(frozen=True)
class _Weight:
    names: WeightNames
    shape: torch.Size
    qparams: tuple[float, int]


class _Reader:
    """Reads the graph node by node; ``values`` has what each node gives."""

    def __init__(self, cell: GraphModule) -> None:
        self.cell = cell
        self.values: dict[Node, Any] = {}
        self.instructions: list[Instruction] = []
        self.widths: list[int] = []
        self.once: list[bool] = []
        self.weights: list[WeightNames] = []
        self.results: tuple[_Value, ...] = ()
        self.state_count = 0

    def read(self, node: Node) -> None:
        if node.op == "placeholder":
            self.values[node] = self._placeholder(node)
        elif node.op == "output":
            self._output(node)
        elif node.op == "call_function":
            self.values[node] = self._call(node)
        elif node.op != "get_attr":
            raise UnsupportedCellError(f"it has a node {node.op}")

    def program(self) -> CellProgram:
        units = _units(self.instructions, self.widths, self._aliases())
        return CellProgram(
            tuple(self._finished(instruction, units) for instruction in self.instructions),
            tuple(Slot(*slot) for slot in zip(self.widths, units, self.once, strict=True)),
            tuple(value.slot for value in self.results),
            tuple(self.weights),
        )

    def _placeholder(self, node: Node) -> _Value:
        is_input = not self.widths
        value = self._new_slot(int(node.meta["val"].shape[-1]), once=is_input)
        if not is_input:
            self.state_count += 1
        return value

    def _output(self, node: Node) -> None:
        (results,) = _arguments(node)
        self.results = tuple(self._whole(self.values[result]) for result in results)

    def _call(self, node: Node) -> Any:
        target: Any = node.target
        args = _arguments(node)
        if target is ATEN.linear.default:
            return self._linear(node)
        if target in UNARY:
            return self._emit(UNARY[target], args[:1])
        if target in BINARY and node.kwargs.get("alpha", 1) == 1:
            return self._emit(BINARY[target], args)
        if target is ATEN.rsub.Scalar and args[1:] == (1,):
            return self._emit(Op.COMPLEMENT, args[:1])
        if target in SLICES and args[2] in (1, -1):
            return self._slices(node)
        if target is operator.getitem:
            return self.values[args[0]][args[1]]
        if target is QUANTIZE:
            return self._quantized(node)
        if target is DEQUANTIZE and args[0] in self.values:
            return self.values[args[0]]
        if target in (DEQUANTIZE, DEQUANTIZE_CHANNELS):
            return self._weight(node)
        raise UnsupportedCellError(f"there is no instruction for {target}")

    def _linear(self, node: Node) -> _Value:
        args = _arguments(node)
        source, weight = self.values[args[0]], self.values.get(args[1])
        if not isinstance(weight, _Weight):
            raise UnsupportedCellError("a linear has no int8 weight")
        source = self._whole(source)
        bias = args[2] if len(args) > 2 else None
        self.weights.append(
            WeightNames(weight.names.values, weight.names.scales, weight.names.zero_points, _name(bias))
        )
        return self._instruct(
            Op.LINEAR,
            (source,),
            weight.shape[0],
            weight=len(self.weights) - 1,
            input=_eight_bits(source.grid),
            weight_qparams=weight.qparams,
        )

    def _weight(self, node: Node) -> _Weight:
        values, *qparams = _arguments(node)[:3]
        if not isinstance(values, Node) or values.op != "get_attr":
            raise UnsupportedCellError(f"{node.name} dequantizes no constant")
        tensor = _attribute(self.cell, str(values.target))
        if tensor.dtype is not torch.int8 or tensor.dim() != 2:
            raise UnsupportedCellError(f"a weight is {tensor.dtype}")
        if node.target is DEQUANTIZE:
            scale, zero_point = qparams
            return _Weight(
                WeightNames(str(values.target), None, None, None), tensor.shape, (scale, zero_point)
            )
        if node.args[3] != 0:
            raise UnsupportedCellError("a weight is quantized along its inputs")
        scales, zero_points = map(_name, qparams)
        return _Weight(WeightNames(str(values.target), scales, zero_points, None), tensor.shape, (1.0, 0))

    def _slices(self, node: Node) -> tuple[_Value, ...]:
        source, sizes, _ = _arguments(node)
        value = self.values[source]
        if isinstance(sizes, int):
            each = math.ceil(value.width / sizes)
            sizes = [min(each, value.width - first) for first in range(0, value.width, each)]
        offsets = [value.offset + sum(sizes[:index]) for index in range(len(sizes))]
        return tuple(
            _Value(value.slot, offset, size, value.grid) for offset, size in zip(offsets, sizes, strict=True)
        )

    def _quantized(self, node: Node) -> _Value:
        """``node``'s input on its grid: by the instruction that computes it, if nothing else reads it."""
        source, grid = _arguments(node)[0], PerTensorGrid.of_node(node)
        value = self.values[source]
        last = self.instructions[-1] if self.instructions else None
        if last and last.target == value.slot and last.output is None and len(source.users) == 1:
            self.instructions[-1] = replace(last, output=grid)
            return _Value(value.slot, value.offset, value.width, grid)
        return self._instruct(Op.COPY, (value,), value.width, output=grid)

    def _emit(self, op: Op, args: Any) -> _Value:
        operands = tuple(self.values.get(arg) for arg in args)
        if not all(isinstance(operand, _Value) for operand in operands):
            raise UnsupportedCellError(f"an operand of {op.name.lower()} is no activation")
        if len({operand.width for operand in operands}) > 1:  # type: ignore[union-attr]
            raise UnsupportedCellError(f"the operands of {op.name.lower()} are broadcast")
        return self._instruct(op, operands, operands[0].width)  # type: ignore[arg-type,union-attr]

    def _instruct(self, op: Op, sources: tuple[_Value, ...], width: int, **more: Any) -> _Value:
        once = all(self.once[source.slot] for source in sources)
        target = self._new_slot(width, once=once)
        where = tuple((source.slot, source.offset) for source in sources)
        self.instructions.append(Instruction(op, target.slot, where, width, width, once, **more))
        grid = more.get("output")
        return _Value(target.slot, 0, width, grid)

    def _new_slot(self, width: int, *, once: bool) -> _Value:
        self.widths.append(width)
        self.once.append(once)
        return _Value(len(self.widths) - 1, 0, width)

    def _whole(self, value: _Value) -> _Value:
        """``value`` as a slot of its own."""
        if value.offset == 0 and value.width == self.widths[value.slot]:
            return value
        return replace(self._instruct(Op.COPY, (value,), value.width), grid=value.grid)

    def _aliases(self) -> list[tuple[int, int]]:
        """A state and the slot of its new value are shared out alike."""
        return [(1 + index, value.slot) for index, value in enumerate(self.results)]

    def _finished(self, instruction: Instruction, units: list[int]) -> Instruction:
        """With its units, and with the grid that a state lies on from the second step on."""
        finished = replace(instruction, units=units[instruction.target])
        slot = instruction.sources[0][0]
        if instruction.op is Op.LINEAR and 1 <= slot <= self.state_count:
            return replace(finished, input=_eight_bits(self.results[slot - 1].grid))
        return finished


def _arguments(node: Node) -> tuple[Any, ...]:
    return node.args


def _units(instructions: list[Instruction], widths: list[int], aliases: list[tuple[int, int]]) -> list[int]:
    """How many columns of each slot belong to one gate.

    Threads share the columns of a gate, each the same columns in all slots that an elementwise instruction
    ties together; so it is the greatest common divisor of their widths and offsets.
    """
    group = list(range(len(widths)))
    edges = [(slot, i.target) for i in instructions if i.op is not Op.LINEAR for slot, _ in i.sources]
    for a, b in (*edges, *aliases):
        group = [group[a] if of == group[b] else of for of in group]
    sizes: dict[int, list[int]] = {}
    for slot, width in enumerate(widths):
        sizes.setdefault(group[slot], []).append(width)
    for instruction in instructions:
        for slot, offset in instruction.sources:
            sizes[group[slot]].append(offset)
    return [math.gcd(*sizes[of]) for of in group]


def _eight_bits(grid: PerTensorGrid | None) -> PerTensorGrid | None:
    """``grid`` if its integers fit eight bits."""
    if grid is None or grid.dtype not in (torch.uint8, torch.int8):
        return None
    return grid


def _table(program: CellProgram) -> Tensor:
    """int64: the counts of instructions, slots and states, then a row for each; the layout of the kernel."""
    rows = [len(program.instructions), len(program.slots), len(program.results)]
    for i in program.instructions:
        (a, b) = (*i.sources, (-1, 0))[:2]
        rows += [i.op, i.target, *a, *b, i.width // i.units, i.units, i.weight, i.once, i.output is not None]
    for slot in program.slots:
        rows += [slot.width, slot.units, slot.once]
    return torch.tensor([*rows, *program.results], dtype=torch.int64, device="cpu")


def _constants(instructions: tuple[Instruction, ...]) -> Tensor:
    """float64 (instructions, 10): the output's and the input's grid, the weight's scale and zero point."""
    rows = [[*grid_row(i.output), *grid_row(i.input), *i.weight_qparams] for i in instructions]
    return torch.tensor(rows, dtype=torch.float64, device="cpu")


def grid_row(grid: PerTensorGrid | None) -> tuple[float, float, float, float]:
    """Scale, zero point and range; a scale of zero stands for no grid."""
    if grid is None:
        return 0.0, 0.0, 0.0, 0.0
    return grid.scale, float(grid.zero_point), float(grid.quant_min), float(grid.quant_max)


def _name(node: Any) -> str | None:
    return str(node.target) if isinstance(node, Node) else None


def _attribute(cell: GraphModule, path: str) -> Tensor:
    *owner, name = path.split(".")
    value: Tensor = getattr(cell.get_submodule(".".join(owner)), name)
    return value
