"""The shapes of a decomposed recurrent operator: unrolled, rolled into a ``scan``, or one opaque call."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, SharedQuantizationSpec
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from torchq_compat.annotate.annotation import WrappingQuantizer
from torchq_compat.annotate.sharing import with_points
from torchq_compat.errors import AnnotationError
from torchq_compat.modules.parts import converted_qparams
from torchq_compat.read.qdq import DEQUANTIZE, QUANTIZE, constants_in, insert_q_dq
from torchq_compat.read.qparams import PerTensorQParams, QParams, combined
from torchq_compat.recurrent.cell_graph import CellGraphModule
from torchq_compat.recurrent.exported_lstm.aten_recurrent import (
    ATEN,
    AtenRecurrent,
    CellPlan,
    Direction,
    EdgeOrNodeName,
    NodeWriter,
    flipped,
    plan_cell,
    write_layers,
)
from torchq_compat.recurrent.over_time import (
    SCAN,
    PythonRunner,
    RecurrentDirection,
    RecurrentLayer,
    Sequences,
    State,
)
from torchq_compat.support import metadata
from torchq_compat.support.graph_nodes import free_name, replace_node
from torchq_compat.support.user_warnings import warn_user

# The opaque shape: one ``call_module`` that runs each cell's own graph in a Python loop over time.


class OpaqueRecurrent(nn.Module):
    """A module that replaces the operator, for any length: (x, *states) -> (output, *last states).

    Its cells are at ``layers.<i>.layer_fw.cell`` and ``layers.<i>.layer_bw.cell``.
    """

    def __init__(self, recurrent: AtenRecurrent, cells: dict[str, GraphModule]) -> None:
        super().__init__()
        self.batch_first = recurrent.batch_first
        self.dropout = recurrent.dropout
        self.output_size = int(recurrent.states[0].meta["val"].shape[-1])
        self.layers = nn.ModuleList(
            RecurrentLayer(
                [RecurrentDirection(CellGraphModule.wrap(cells[direction.path])) for direction in directions]
            )
            for directions in recurrent.layers()
        )

    def by_layer(self) -> list[RecurrentLayer]:
        return [layer for layer in self.layers if isinstance(layer, RecurrentLayer)]

    def directions(self) -> list[RecurrentDirection]:
        """Return the directions of all layers, in the order of the rows of the states."""
        return [direction for layer in self.by_layer() for direction in layer.directions()]

    def forward(self, x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        rows: list[State] = list(zip(*(state.unbind(0) for state in states), strict=True))
        x = x.transpose(0, 1) if self.batch_first else x
        x, last = PythonRunner().run_layers(self.by_layer(), Sequences(x), rows, self.dropout)
        ends = (torch.stack(rows) for rows in zip(*last, strict=True))
        return (x.transpose(0, 1) if self.batch_first else x), *ends


def write_opaque(
    writer: NodeWriter, recurrent: AtenRecurrent, cells: dict[str, GraphModule]
) -> tuple[Node, ...]:
    """Write nodes for the results of ``recurrent``, and return them."""
    name = free_name(writer.graph_module, f"{recurrent.node.name}_decomposed")
    call = writer.module(name, OpaqueRecurrent(recurrent, cells), recurrent.x, *recurrent.states)
    return tuple(writer.getitem(call, index) for index in range(1 + len(recurrent.states)))


# The quantized boundary of an opaque recurrent module: q-dq around its calls, with the cells' qparams.
#
# The cells already quantize their inputs and results with the same qparams, so the q-dq here changes no
# value: it shows a backend what it may pass as integers.


INPUTS, RESULTS = ("x", "h0", "c0"), ("output", "h_n", "c_n")


def quantize_boundary(graph_module: GraphModule, path: str, module: OpaqueRecurrent) -> None:
    """Insert q-dq around every call of ``module``, whose path is ``path``; warn about edges left float."""
    inputs = _input_qparams(module)
    output = [converted_qparams(direction.cell)[0] for direction in module.by_layer()[-1].directions()]
    states = zip(*(converted_qparams(direction.cell) for direction in module.directions()), strict=True)
    results = combined(2, output, module.output_size), *(combined(0, state, 1) for state in states)
    for call in [node for node in graph_module.graph.nodes if node.op == "call_module"]:
        if call.target == path:
            # By position: one tensor may be both states, each with its own qparams.
            call.args = tuple(
                argument
                if qparams is None or PerTensorQParams.of_call(argument, DEQUANTIZE) == qparams
                else _insert(graph_module, argument, qparams, before=call)
                for argument, qparams in zip(call.args, inputs, strict=True)
            )
            for getitem in list(call.users):
                position: Any = getitem.args[1]
                if results[position] is not None:
                    _insert_after(graph_module, getitem, results[position])
    graph_module.graph.eliminate_dead_code()
    graph_module.graph.lint()
    graph_module.recompile()
    count = len(inputs)
    names = INPUTS[:count] + RESULTS[:count]
    if left := [name for name, qparams in zip(names, inputs + results, strict=True) if qparams is None]:
        warn_user("TQ410", path=path, edges=", ".join(left))


def _input_qparams(module: OpaqueRecurrent) -> tuple[QParams | None, ...]:
    first_layer = {_argument_qparams(item.cell)[0] for item in module.by_layer()[0].directions()}
    x = first_layer.pop() if len(first_layer) == 1 else None
    _, *states = zip(*(_argument_qparams(direction.cell) for direction in module.directions()), strict=True)
    return x, *(combined(0, state, 1) for state in states)


def _argument_qparams(cell: GraphModule) -> tuple[PerTensorQParams | None, ...]:
    """Return the qparams with which a converted cell quantizes x and each state; None if it does not."""
    result = []
    for placeholder in cell.graph.find_nodes(op="placeholder"):
        all_qparams = {PerTensorQParams.of_call(user, QUANTIZE) for user in placeholder.users}
        result.append(all_qparams.pop() if len(all_qparams) == 1 else None)
    return tuple(result)


def _insert_after(graph_module: GraphModule, node: Node, qparams: QParams) -> None:
    """Insert q-dq between ``node`` and its readers; bypass readers that quantize ``node`` with the same
    qparams."""
    readers = list(node.users)
    q_dq = _insert(graph_module, node, qparams, before=node.next)
    for reader in readers:
        reader.replace_input_with(node, q_dq)
        if PerTensorQParams.of_call(reader, QUANTIZE) == qparams:
            for dequantize in list(reader.users):
                dequantize.replace_all_uses_with(q_dq)


def _insert(graph_module: GraphModule, node: Any, qparams: QParams, *, before: Node) -> Node:
    """Insert q-dq of ``node`` and return the dequantize node."""
    with graph_module.graph.inserting_before(before):
        return insert_q_dq(graph_module.graph, node, qparams, constants_in(graph_module))


# The rolled shape: one ``scan`` over time for each direction, whose body is the cell.
#
# torchao prepares and converts the body of a scan along with the graph. The body owns its weights, so that
# they are folded to integers; weights passed as the scan's additional inputs would stay float.


def write_rolled(
    writer: NodeWriter, recurrent: AtenRecurrent, cells: dict[str, GraphModule]
) -> tuple[Node, ...]:
    """Write nodes for the results of ``recurrent``, and return them."""

    def write_direction(direction: Direction, x: Node, states: Sequence[Node]) -> tuple[Node, Sequence[Node]]:
        # torchao sets the prepared body with setattr, which fails for a path with dots.
        name = f"{recurrent.node.name}_{direction.path.replace('.', '_')}"
        body = writer.body(free_name(writer.graph_module, name), scan_body(cells[direction.path]))
        steps = flipped(writer, x) if direction.backward else x
        values = [state.meta["val"] for state in states]
        sizes = (x.meta["val"].shape[0], *values[0].shape)
        scan = writer.glue(SCAN, body, list(states), [steps], (), value=[*values, values[0].new_empty(sizes)])
        *last, outputs = (writer.getitem(scan, index) for index in range(len(states) + 1))
        return (flipped(writer, outputs) if direction.backward else outputs), last

    return write_layers(writer, recurrent, write_direction)


def scan_body(cell: GraphModule) -> GraphModule:
    """Return ``cell``, (x, *states) -> new states, as a scan calls it: (*states, x) -> (*new states, y).

    y is a copy of the hidden state, the first state, because a carried value must not also be an output.
    """
    graph, owned = Graph(), nn.Module()
    x, *states = cell.graph.find_nodes(op="placeholder")
    new: Any = graph.graph_copy(cell.graph, {item: graph.node_copy(item) for item in (*states, x)})
    for node in graph.find_nodes(op="get_attr"):
        # torchao's convert of the outer graph deletes the submodules of a body, not its own parameters.
        path = str(node.target)
        node.target = path.replace(".", "_")
        owned.register_parameter(node.target, cell.get_parameter(path))
    y = graph.call_function(ATEN.clone.default, (new[0],))
    y.meta = dict(new[0].meta)
    graph.output((*new, y))
    return GraphModule(owned, graph)


# Moves the weights of a converted scan body into the graph that contains the scan.
#
# The body owned its weights so that torchao could fold them; torch.export saves a scan only if they are
# additional inputs of the scan.


def hoist_weights(graph_module: GraphModule) -> None:
    """Turn all tensors owned by the scan bodies of ``graph_module`` into buffers of ``graph_module``."""
    for scan in [node for node in graph_module.graph.nodes if node.target is SCAN]:
        arguments: Any = scan.args
        body_node, init, xs, additional = arguments
        values = _take_out(graph_module, str(body_node.target))
        inputs = []
        for name, value in values.items():
            nn.Module.register_buffer(graph_module, f"{body_node.target}_{name}", value)
            with graph_module.graph.inserting_before(scan):
                inputs.append(graph_module.graph.get_attr(f"{body_node.target}_{name}"))
        scan.args = (body_node, init, xs, (*additional, *inputs))
    graph_module.graph.lint()
    graph_module.recompile()


def _take_out(graph_module: GraphModule, path: str) -> dict[str, Tensor]:
    """Turn the tensors owned by the body at ``path`` into its last inputs; return them by name, in order."""
    body = graph_module.get_submodule(path)
    assert isinstance(body, GraphModule)
    owned: list[Node] = [node for node in body.graph.nodes if node.op == "get_attr"]
    names = dict.fromkeys(str(node.target) for node in owned)
    values = {name: getattr(body, name).detach() for name in names}
    last = [node for node in body.graph.nodes if node.op == "placeholder"][-1]
    arguments: dict[str, Node] = {}
    for name in names:
        with body.graph.inserting_after(last):
            last = arguments[name] = body.graph.placeholder(name)
    for node in owned:
        argument = arguments[str(node.target)]
        argument.meta = dict(node.meta)
        replace_node(node, argument)
    setattr(graph_module, path, GraphModule(nn.Module(), body.graph))
    return values


# The unrolled shape: the cell's nodes once for every time step, with one set of weights.
#
# Each node of a step records the node of the cell that it copies, so that all steps can share the observers
# of the first step.


def unrolled_cells(graph_module: GraphModule) -> dict[str, GraphModule]:
    """Return the cells that are unrolled in ``graph_module``, by path."""
    return metadata.UNROLLED_CELLS.of(graph_module) or {}


def write_unrolled(
    writer: NodeWriter, recurrent: AtenRecurrent, cells: dict[str, GraphModule]
) -> tuple[Node, ...]:
    """Write nodes for the results of ``recurrent``, and return them.

    Raises:
        AnnotationError: if the sequence length is dynamic.
    """
    base = free_name(writer.graph_module, f"{recurrent.node.name}_decomposed")
    length = recurrent.x.meta["val"].shape[1 if recurrent.batch_first else 0]
    if isinstance(length, torch.SymInt):
        raise AnnotationError.of("TQ944.dynamic_length", node=recurrent.node.name)
    # Without a check of the length, the first steps of a longer sequence would run silently.
    size = writer.glue(ATEN.sym_size.int, recurrent.x, 1 if recurrent.batch_first else 0, value=length)
    same = writer.glue(operator.eq, size, length, value=True)
    message = f"{recurrent.node.name} was unrolled for sequences of {length} steps"
    writer.glue(ATEN._assert_scalar.default, same, message, value=())

    def write_direction(direction: Direction, x: Node, states: Sequence[Node]) -> tuple[Node, Sequence[Node]]:
        path, cell = f"{base}.{direction.path}", cells[direction.path]
        writer.graph_module.add_submodule(path, cell)
        others = unrolled_cells(writer.graph_module)
        metadata.UNROLLED_CELLS.write(writer.graph_module, {**others, path: cell})
        inputs, results = cell.graph.find_nodes(op="placeholder"), cell.graph.output_node().args[0]
        written = {
            node: writer.attribute(f"{path}.{node.target}", cell.get_parameter(str(node.target)))
            for node in cell.graph.find_nodes(op="get_attr")
        }
        outputs = []
        for time in reversed(range(length)) if direction.backward else range(length):
            at_time = writer.glue(ATEN.select.int, x, 0, time)
            written.update(zip(inputs, (at_time, *states), strict=True))
            for node in cell.graph.nodes:
                if node.op == "call_function":
                    args: Any = map_arg(node.args, written.__getitem__)
                    origin = {metadata.COPY.name: (path, node.name)}
                    written[node] = writer.call(node.target, *args, **origin)
            states = [written[result] for result in results]  # type: ignore[union-attr]
            outputs.append(states[0])
        if direction.backward:
            outputs.reverse()
        return writer.glue(ATEN.stack.default, outputs), states

    return write_layers(writer, recurrent, write_direction)


# Wraps any quantizer so that all steps of an unrolled LSTM share the observers of the first step.
#
# In a cell with its own graph, an observer sees the values of all steps, and the incoming state is observed
# separately from the outgoing state. The same holds here: each cell is annotated once, alone, and every step
# follows the resulting plan.


#: The copies of a cell's nodes in the first step, by the names of the cell's nodes.
FirstStep = dict[str, Node]


class SharedStepsQuantizer(WrappingQuantizer):
    """Annotates with ``quantizer``, which plans each unrolled cell once; glue nodes are not quantized."""

    def annotate(self, model: GraphModule) -> GraphModule:
        model = super().annotate(model)
        plans = {path: plan_cell(cell, self.quantizer) for path, cell in unrolled_cells(model).items()}
        first_steps: dict[str, FirstStep] = {path: {} for path in plans}
        for node in model.graph.nodes:
            copy = metadata.COPY.of(node)
            if copy is not None or metadata.GLUE.of(node):
                node.meta.pop(Q_ANNOTATION_KEY, None)
            if copy is not None:
                path, name = copy
                first_steps[path].setdefault(name, node)
                _follow(node, name, plans[path], first_steps[path])
        return model


def _follow(node: Node, name: str, plan: CellPlan, first_step: FirstStep) -> None:
    """Annotate ``node``, a copy of the cell's node ``name``, according to ``plan``."""

    def point(place: EdgeOrNodeName) -> Any:
        copied = first_step[place.node]
        return copied if place.position is None else (copied.all_input_nodes[place.position], copied)

    places = {place: planned for place, planned in plan.items() if place.node == name}
    if not places:
        return
    annotation = QuantizationAnnotation(allow_implicit_sharing=False, _annotated=True)
    for place, (leader, spec) in places.items():
        if first_step[name] is node and leader == place:
            spec = with_points(spec, point)
        else:
            spec = SharedQuantizationSpec(point(leader))
        if place.position is None:
            annotation.output_qspec = spec
        else:
            annotation.input_qspec_map[node.all_input_nodes[place.position]] = spec
    node.meta[Q_ANNOTATION_KEY] = annotation
