"""Reads a converted cell's q-dq graph as a program for the cell loop.

A q-dq pair is not an instruction but part of the instruction before it. Values that do not depend on a state
are computed once for all steps.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from torchq_compat.ops import those
from torchq_compat.read import qdq
from torchq_compat.read.qparams import PerTensorQParams
from torchq_compat.recurrent.kernel.program import (
    CellProgram,
    DynamicQParams,
    Instruction,
    Op,
    SlotRow,
    WeightNames,
)
from torchq_compat.support.dtypes import KERNEL_DTYPES
from torchq_compat.support.graph_nodes import attribute_of

ATEN = torch.ops.aten
#: Operator -> instruction, and the number of its arguments.
ELEMENTWISE = {
    ATEN.sigmoid.default: (Op.SIGMOID, 1),
    ATEN.tanh.default: (Op.TANH, 1),
    ATEN.relu.default: (Op.RELU, 1),
    ATEN.add.Tensor: (Op.ADD, 2),
    ATEN.mul.Tensor: (Op.MUL, 2),
}


class UnsupportedCellError(Exception):
    """Raised if the cell loop has no instructions for a graph; says why. It never reaches the user."""


def cell_program(*graphs: tuple[str, GraphModule]) -> CellProgram:
    """Return the program of a converted cell ``(x, *states) -> (*new states,)``.

    Args:
        graphs: (path in the module that has the weights, graph) of the cell; before it, of the graph whose
            results the cell accepts in place of ``x``, if there is one.

    Raises:
        UnsupportedCellError: if a graph has an operator or a quantization that the loop does not support.
    """
    reader = _CellReader()
    (x, *_), (_, *states) = (_placeholder_widths(graphs[index][1]) for index in (0, -1))
    values: tuple[_Value, ...] = (reader.new_slot(x, once=True),)
    carried = tuple(reader.new_slot(width, once=False) for width in states)
    for index, (path, graph_module) in enumerate(graphs, start=1):
        given = (*values, *carried) if index == len(graphs) else values
        values = reader.read(graph_module, f"{path}." if path else "", given)
    return reader.program(carried, values)


def program_or_problem(*graphs: tuple[str, GraphModule]) -> CellProgram | str:
    """Return ``cell_program``, or the reason why there is no program."""
    try:
        return cell_program(*graphs)
    except UnsupportedCellError as problem:
        return str(problem)


@dataclass(frozen=True)
class _Value:
    """Columns of a slot, with their qparams."""

    slot: int
    offset: int
    width: int
    qparams: PerTensorQParams | DynamicQParams | None = None


@dataclass(frozen=True)
class _Weight:
    names: WeightNames
    shape: torch.Size
    qparams: tuple[float, int]


class _CellReader:
    """Reads graphs node by node; ``values`` maps each node to the value it computes."""

    def __init__(self) -> None:
        self.graph_module = GraphModule({}, Graph())
        self.prefix = ""
        self.values: dict[Node, Any] = {}
        self.instructions: list[Instruction] = []
        self.widths: list[int] = []
        self.once: list[bool] = []
        self.weights: list[WeightNames] = []

    def read(self, graph_module: GraphModule, prefix: str, given: tuple[_Value, ...]) -> tuple[_Value, ...]:
        """Read ``graph_module`` with the inputs ``given``, and return its results."""
        self.graph_module, self.prefix = graph_module, prefix
        graph = graph_module.graph
        self.values.update(zip(graph.find_nodes(op="placeholder"), given, strict=True))
        for node in graph.nodes:
            if node.op == "call_function":
                self.values[node] = self._call(node)
            elif node.op not in ("placeholder", "get_attr", "output"):
                raise UnsupportedCellError(f"it has a node {node.op}")
        (results,) = _arguments(graph.output_node())
        return tuple(self._whole(self.values[result]) for result in results)

    def program(self, states: tuple[_Value, ...], results: tuple[_Value, ...]) -> CellProgram:
        pairs = [(state.slot, value) for state, value in zip(states, results, strict=True)]
        # Threads share a state's slot and the slot of its new value in the same way.
        aliases = [(slot, value.slot) for slot, value in pairs]
        units = _units(self.instructions, self.widths, aliases)
        carried = {slot: value.qparams for slot, value in pairs}
        return CellProgram(
            tuple(_finished(instruction, units, carried) for instruction in self.instructions),
            tuple(SlotRow(*slot) for slot in zip(self.widths, units, self.once, strict=True)),
            tuple(value.slot for value in results),
            tuple(self.weights),
        )

    def _call(self, node: Node) -> Any:
        target: Any = node.target
        args = _arguments(node)
        if target is ATEN.linear.default:
            return self._linear(node)
        if target in ELEMENTWISE and node.kwargs.get("alpha", 1) == 1:
            instruction, count = ELEMENTWISE[target]
            return self._emit(instruction, args[:count])
        if target is ATEN.rsub.Scalar and args[1:] == (1,):
            return self._emit(Op.COMPLEMENT, args[:1])
        if target in those("slices") and args[2] in (1, -1):
            return self._slices(node)
        if target is operator.getitem:
            return self.values[args[0]][args[1]]
        if target is qdq.QUANTIZE:
            return self._quantized(node)
        if target is qdq.DEQUANTIZE and args[0] in self.values:
            return self.values[args[0]]
        if target in qdq.DEQUANTIZES:
            return self._weight(node)
        if target is qdq.CHOOSE_QPARAMS:
            return args, args
        if target is qdq.QUANTIZE_DYNAMIC:
            return self._quantized_dynamically(node)
        if target is qdq.DEQUANTIZE_DYNAMIC:
            return self.values[args[0]]
        raise UnsupportedCellError(f"there is no instruction for {target}")

    def _linear(self, node: Node) -> _Value:
        args = _arguments(node)
        source, weight = self.values[args[0]], self.values.get(args[1])
        if not isinstance(weight, _Weight):
            raise UnsupportedCellError("a linear has no int8 weight")
        source = self._whole(source)
        if isinstance(source.qparams, DynamicQParams) and self.once[source.slot] and source.slot != 0:
            raise UnsupportedCellError("dynamic qparams are chosen from values computed from the input alone")
        bias = args[2] if len(args) > 2 else None
        self.weights.append(weight.names._replace(bias=self._name(bias)))
        return self._instruct(
            Op.LINEAR,
            (source,),
            weight.shape[0],
            weight=len(self.weights) - 1,
            input=_eight_bits(source.qparams),
            weight_qparams=weight.qparams,
        )

    def _weight(self, node: Node) -> _Weight:
        values, *qparams = _arguments(node)[:3]
        if not isinstance(values, Node) or values.op != "get_attr":
            raise UnsupportedCellError(f"{node.name} dequantizes a value that is no constant")
        tensor = attribute_of(self.graph_module, values)
        if tensor.dtype is not torch.int8 or tensor.dim() != 2:
            raise UnsupportedCellError(f"a weight is {tensor.dtype}")
        names = WeightNames(f"{self.prefix}{values.target}", None, None, None)
        if node.target is qdq.DEQUANTIZE:
            scale, zero_point = qparams
            return _Weight(names, tensor.shape, (float(scale), int(zero_point)))
        if node.args[3] != 0:
            raise UnsupportedCellError("a weight is quantized along its inputs")
        scales, zero_points = map(self._name, qparams)
        return _Weight(names._replace(scales=scales, zero_points=zero_points), tensor.shape, (1.0, 0))

    def _name(self, node: Any) -> str | None:
        return f"{self.prefix}{node.target}" if isinstance(node, Node) else None

    def _slices(self, node: Node) -> tuple[_Value, ...]:
        source, sizes, _ = _arguments(node)
        value = self.values[source]
        if isinstance(sizes, int):
            item = math.ceil(value.width / sizes)
            sizes = [min(item, value.width - first) for first in range(0, value.width, item)]
        offsets = [value.offset + sum(sizes[:index]) for index in range(len(sizes))]
        return tuple(
            _Value(value.slot, offset, size, value.qparams)
            for offset, size in zip(offsets, sizes, strict=True)
        )

    def _quantized(self, node: Node) -> _Value:
        """Return the input of ``node``, quantized: by the instruction that computes it if nothing else reads
        the input, else by a copy."""
        source, qparams = _arguments(node)[0], PerTensorQParams.of_node(node)
        value = self.values[source]
        last = self.instructions[-1] if self.instructions else None
        if last and last.target == value.slot and last.output is None and len(source.users) == 1:
            self.instructions[-1] = replace(last, output=qparams)
            return _Value(value.slot, value.offset, value.width, qparams)
        return self._instruct(Op.COPY, (value,), value.width, output=qparams)

    def _quantized_dynamically(self, node: Node) -> _Value:
        source, scale, _, quant_min, quant_max, dtype = _arguments(node)
        chosen: Any = self.values.get(scale)
        if chosen is None or chosen[:2] != (source, quant_min):
            raise UnsupportedCellError("dynamic qparams are not chosen from the values quantized with them")
        if any(user.target is not qdq.DEQUANTIZE_DYNAMIC for user in node.users) or any(
            reader.target is not ATEN.linear.default for user in node.users for reader in user.users
        ):
            raise UnsupportedCellError("an op other than a linear reads values with dynamic qparams")
        _, _, chosen_max, eps, _ = chosen
        qparams = DynamicQParams(eps, chosen_max, quant_min, quant_max, dtype)
        return replace(self._whole(self.values[source]), qparams=qparams)

    def _emit(self, op: Op, args: Any) -> _Value:
        operands = tuple(self.values.get(arg) for arg in args)
        if not all(isinstance(operand, _Value) for operand in operands):
            raise UnsupportedCellError(f"an operand of {op.name.lower()} is no activation")
        if len({operand.width for operand in operands}) > 1:  # type: ignore[union-attr]
            raise UnsupportedCellError(f"the operands of {op.name.lower()} are broadcast")
        return self._instruct(op, operands, operands[0].width)  # type: ignore[arg-type,union-attr]

    def _instruct(self, op: Op, sources: tuple[_Value, ...], width: int, **more: Any) -> _Value:
        once = all(self.once[source.slot] for source in sources)
        target = self.new_slot(width, once=once)
        where = tuple((source.slot, source.offset) for source in sources)
        self.instructions.append(Instruction(op, target.slot, where, width, width, once, **more))
        return _Value(target.slot, 0, width, more.get("output"))

    def new_slot(self, width: int, *, once: bool) -> _Value:
        self.widths.append(width)
        self.once.append(once)
        return _Value(len(self.widths) - 1, 0, width)

    def _whole(self, value: _Value) -> _Value:
        """Return ``value``, copied to its own slot unless it is a whole slot."""
        if value.offset == 0 and value.width == self.widths[value.slot]:
            return value
        return replace(self._instruct(Op.COPY, (value,), value.width), qparams=value.qparams)


def _finished(
    instruction: Instruction, units: list[int], carried: dict[int, PerTensorQParams | DynamicQParams | None]
) -> Instruction:
    """Return ``instruction`` with its units, and with a state's qparams from the second step on."""
    finished = replace(instruction, units=units[instruction.target])
    slot = instruction.sources[0][0]
    if instruction.op is Op.LINEAR and instruction.input is None and slot in carried:
        return replace(finished, input=_eight_bits(carried[slot]))
    return finished


def _placeholder_widths(graph_module: GraphModule) -> list[int]:
    return [int(n.meta["val"].shape[-1]) for n in graph_module.graph.find_nodes(op="placeholder")]


def _arguments(node: Node) -> tuple[Any, ...]:
    return node.args


def _units(instructions: list[Instruction], widths: list[int], aliases: list[tuple[int, int]]) -> list[int]:
    """Return, for each slot, the number of columns that belong to one gate.

    Threads divide the columns of a gate among them; each thread has the same columns in all slots that
    elementwise instructions connect. The number is the greatest common divisor of the widths and offsets of
    these slots.
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


def _eight_bits(
    qparams: PerTensorQParams | DynamicQParams | None,
) -> PerTensorQParams | DynamicQParams | None:
    """Return ``qparams`` if its dtype has eight bits, else None."""
    return qparams if qparams is not None and qparams.dtype in KERNEL_DTYPES else None
