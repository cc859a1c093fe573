"""A cell as a graph: exported once, its nodes named after the parts, annotated and prepared by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.quantizer import SharedQuantizationSpec

from torchq_compat.annotate.annotation import NodeSpecs
from torchq_compat.capture.export import capture_flat
from torchq_compat.custom_modules.recurrent.constructors import CellSpecs
from torchq_compat.custom_modules.recurrent.parts import Part, PartKind
from torchq_compat.observed_graph import convert_graph, prepare_graph
from torchq_compat.qparams_state import PerTensorQParamsState
from torchq_compat.specs.grids import PerTensorGrid
from torchq_compat.specs.saturation import saturated_share

__all__ = [
    "CellDtypes",
    "CellGraphModule",
    "converted_grids",
    "part_nodes",
    "part_of",
    "prepare_cell",
    "reference_cell",
    "saturated_parts",
]

LINEAR = torch.ops.aten.linear.default
DEQUANTIZE = torch.ops.quantized_decomposed.dequantize_per_tensor.default
#: meta key under which a node of a cell carries its part.
PART_KEY = "torchq_compat_part"
SATURATION_KEY = "torchq_compat_saturation"
INITIAL_KEY = "torchq_compat_initial_state_qparams"
DEFAULT_INITIAL = (1.0, 0)


class CellGraphModule(GraphModule):
    """A prepared or converted cell. Keeps the initial-state qparams of ``torch.ao.nn.quantizable.LSTMCell``.

    An omitted state is zeros, quantized with these (scale, zero point) when the cell is converted. FX has the
    attributes and never reads them.
    """

    @classmethod
    def wrap(cls, graph_module: GraphModule) -> Self:
        wrapped = cls(graph_module, graph_module.graph)
        wrapped.meta.update(graph_module.meta)
        return wrapped

    @property
    def initial_hidden_state_qparams(self) -> tuple[float, int]:
        return self._initial_qparams(0)

    @initial_hidden_state_qparams.setter
    def initial_hidden_state_qparams(self, qparams: tuple[float, int]) -> None:
        self._set_initial_qparams(0, qparams)

    @property
    def initial_cell_state_qparams(self) -> tuple[float, int]:
        return self._initial_qparams(1)

    @initial_cell_state_qparams.setter
    def initial_cell_state_qparams(self, qparams: tuple[float, int]) -> None:
        self._set_initial_qparams(1, qparams)

    # In meta, because GraphModule.__deepcopy__ drops other attributes.
    def _initial_qparams(self, index: int) -> tuple[float, int]:
        qparams: tuple[float, int] = self.meta.get(INITIAL_KEY, {}).get(index, DEFAULT_INITIAL)
        return qparams

    def _set_initial_qparams(self, index: int, qparams: tuple[float, int]) -> None:
        self.meta[INITIAL_KEY] = {**self.meta.get(INITIAL_KEY, {}), index: qparams}

    def initial_state(self, widths: Sequence[int], x: Tensor) -> tuple[Tensor, ...]:
        """Zeros (B, width) for every state that is left out, on its own grid in a converted cell."""
        return tuple(
            _on_initial_grid(x.new_zeros(x.shape[0], width), grid, self._initial_qparams(index))
            for index, (width, grid) in enumerate(zip(widths, converted_grids(self), strict=True))
        )


def _on_initial_grid(zeros: Tensor, grid: PerTensorGrid | None, qparams: tuple[float, int]) -> Tensor:
    if grid is None or qparams == DEFAULT_INITIAL:
        return zeros
    initial = replace(grid, scale=qparams[0], zero_point=qparams[1])
    return initial.dequantize(initial.quantize(zeros))


@dataclass(frozen=True)
class CellDtypes:
    """The quantized dtypes in which a cell's input and hidden state arrive."""

    x: torch.dtype
    hidden: torch.dtype


def prepare_cell(
    cell: nn.Module,
    example_inputs: tuple[Tensor, ...],
    parts: Sequence[Part],
    specs: CellSpecs,
    arriving: CellDtypes,
) -> CellGraphModule:
    """Export ``cell`` with a dynamic batch and put the observers of ``parts`` in."""
    graph_module = capture_flat(cell, example_inputs)
    _name_nodes_after_parts(graph_module, parts)

    def decide(captured: GraphModule) -> dict[Node, NodeSpecs]:
        return _decide(captured, specs, arriving)

    return CellGraphModule.wrap(prepare_graph(graph_module, decide, is_qat=False))


class ConvertedCellGraphModule(PerTensorQParamsState, CellGraphModule):
    """A q-dq cell: its state_dict carries all qparams."""


def reference_cell(prepared: CellGraphModule) -> ConvertedCellGraphModule:
    """The q-dq form of a prepared cell, int8 weights folded. Changes ``prepared``: hand in a copy."""
    saturation = dict(saturated_parts(prepared))
    converted = ConvertedCellGraphModule.wrap(convert_graph(prepared))
    converted.meta[SATURATION_KEY] = saturation
    return converted


def saturated_parts(cell: GraphModule) -> Iterator[tuple[str, float]]:
    """(part name, share of its calibration values outside its observer's range), where that is counted."""
    if SATURATION_KEY in cell.meta:
        yield from cell.meta[SATURATION_KEY].items()
        return
    for name, node in part_nodes(cell):
        for user in node.users:
            if user.op == "call_module":
                share = saturated_share(cell.get_submodule(str(user.target)))
                if share is not None:
                    yield name, share


def part_nodes(graph_module: GraphModule) -> Iterator[tuple[str, Node]]:
    """(part name, node) in the order of computation, of a prepared or converted cell."""
    for node in graph_module.graph.nodes:
        if PART_KEY in node.meta and node.op == "call_function":
            yield part_of(node).name, node


def part_of(node: Node) -> Part:
    """The part a node of a cell computes."""
    part: Part = node.meta[PART_KEY]
    return part


def converted_grids(graph_module: GraphModule) -> tuple[PerTensorGrid | None, ...]:
    """The grid of each output of a converted cell: the last dequantize before it."""
    output = graph_module.graph.output_node()
    results = output.args[0]
    assert isinstance(results, (tuple, list))
    return tuple(_grid_of(node) for node in results if isinstance(node, Node))


def _grid_of(node: Node) -> PerTensorGrid | None:
    if node.target is not DEQUANTIZE:
        return None
    _, scale, zero_point, quant_min, quant_max, dtype = node.args[:6]
    return PerTensorGrid(scale, zero_point, quant_min, quant_max, dtype)  # type: ignore[arg-type]


def _name_nodes_after_parts(graph_module: GraphModule, parts: Sequence[Part]) -> None:
    by_name = {part.name: part for part in parts}
    last_of: dict[str, Node] = {}
    for node in graph_module.graph.nodes:
        stack = node.meta.get("nn_module_stack") or {}
        path = str(list(stack.values())[-1][0]) if stack else ""
        if node.op == "call_function" and path in by_name:
            last_of[path] = node
    for path, node in last_of.items():
        node.meta[PART_KEY] = by_name[path]
        node._rename(path.replace(".", "_"))
    graph_module.recompile()


def _decide(graph_module: GraphModule, specs: CellSpecs, arriving: CellDtypes) -> dict[Node, NodeSpecs]:
    first_reader: dict[Node, Node] = {}
    decided: dict[Node, NodeSpecs] = {}
    for _, node in part_nodes(graph_module):
        part = part_of(node)
        node_specs = NodeSpecs(output=specs.output_spec(part))
        source = node.args[0]
        assert isinstance(source, Node)
        if part.kind is PartKind.LINEAR:
            input_spec = specs.linear_input_spec(_dtype_of(source, specs, arriving))
            weight, weight_spec = node.args[1], specs.weight_spec()
            assert isinstance(weight, Node)
            if weight_spec is not None:
                node_specs.inputs[weight] = weight_spec
        else:
            input_spec = specs.input_spec(part)
        if input_spec is not None:
            reader = first_reader.setdefault(source, node)
            node_specs.inputs[source] = (
                input_spec if reader is node else SharedQuantizationSpec((source, reader))
            )
        decided[node] = node_specs
    return decided


def _dtype_of(node: Node, specs: CellSpecs, arriving: CellDtypes) -> torch.dtype:
    """The quantized dtype of what a linear reads: the cell's input, its hidden state, or another part."""
    if node.op == "placeholder":
        return arriving.x if node.target == "x" else arriving.hidden
    return specs.output_constructor(part_of(node)).settings.dtype
