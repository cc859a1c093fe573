"""A cell as a graph of parts, prepared once for each layer and direction."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from torchq_compat.capture.checked import capture_by_structure
from torchq_compat.modules import parts
from torchq_compat.read import qdq
from torchq_compat.read.qparams import PerTensorQParams
from torchq_compat.recurrent.cells import FloatCell, kind_of
from torchq_compat.recurrent.kernel.cell_reader import program_or_problem
from torchq_compat.recurrent.kernel.program import CellProgram
from torchq_compat.support import metadata

# Splits a cell's graph into the input projection, computed for all steps at once, and the step itself.
#
# The split is exact, because static qparams do not depend on the step. Ops that choose their qparams from
# their input stay in the step, and so do ops that depend on the number of dimensions.


Function = Callable[..., tuple[Tensor, ...]]
#: A module, or its attributes by path.
Owner = GraphModule | dict[str, Any]

#: Ops that compute the same for every leading size, and with one more leading dimension.
RANK_AGNOSTIC = (
    torch.ops.aten.linear.default,
    torch.ops.aten.to.dtype,
    qdq.QUANTIZE,
    qdq.DEQUANTIZE,
)


class SplitGraph(NamedTuple):
    """A graph split in two. The inputs of ``outside`` are the results of ``first``, then the inputs that
    ``first`` does not have."""

    first: Graph
    outside: Graph


def split_off_projection(cell: Graph) -> SplitGraph:
    """Return ``cell``, (x, *states) -> new states, as x -> projected and (*projected, *states) -> new states.

    The first graph has the nodes that depend on no input but x, as long as they work for any leading
    dimensions. Weights that both graphs read are in both.
    """
    x = next(node for node in cell.nodes if node.op == "placeholder")
    constants = _constants(cell)
    moved = {x}
    for node in cell.nodes:
        inputs = set(node.all_input_nodes)
        if node.target in RANK_AGNOSTIC and inputs & moved and inputs <= moved | constants:
            moved.add(node)
    return _split(cell, moved, constants)


def call_on(owner: Owner, graph: Graph) -> Function:
    """Return ``graph``, whose attributes are those of ``owner``, as a function of an owner and the graph's
    inputs. The function is not bound to ``owner``, so that a copy of ``owner`` can use it too."""
    called = Graph()
    called.output(called.graph_copy(graph, {}))
    _dequantize_in_blocks(called)
    forward: Function = type(GraphModule(owner, called)).forward
    return forward


def _dequantize_in_blocks(graph: Graph) -> None:
    for node in filter(qdq.dequantizes_constant, graph.nodes):
        node.target, node.args = qdq.called_in_blocks, (node.target, *node.args)


@dataclass(frozen=True)
class CellFunctions:
    """A cell split in two, as functions of the owner of its weights and their inputs.

    Attributes:
        graphs: the projection and the step.
        project: (owner, x) -> projected.
        weights: (owner) -> the weights of the step, as they are stored.
        constants: (owner, *weights) -> the values that the step computes only from weights.
        step: (owner, *constants, *projected, *states) -> the new states.
    """

    graphs: SplitGraph
    project: Function
    weights: Function
    constants: Function
    step: Function

    @classmethod
    def of(cls, owner: Owner, cell: Graph) -> Self:
        """Return the functions of ``cell``, whose attributes are those of ``owner``."""
        graphs = split_off_projection(cell)
        # () -> constants, such as dequantized weights, and (*constants, *inputs) -> results.
        constants, step = _split(graphs.outside, _constants(graphs.outside), set())
        _dequantize_in_blocks(constants)
        of_weights = _split(constants, {node for node in constants.nodes if node.op == "get_attr"}, set())
        return cls(graphs, *(call_on(owner, graph) for graph in (graphs.first, *of_weights, step)))

    def step_of_weights(self, owner: Owner, weights: int, *flat: Tensor) -> tuple[Tensor, ...]:
        """Return the new states of ``flat``: that many ``weights``, what is projected, and the states."""
        return self.step(owner, *self.constants(owner, *flat[:weights]), *flat[weights:])


def _constants(graph: Graph) -> set[Node]:
    """Return the nodes of the weights, and those computed only from weights."""
    constants: set[Node] = set()
    for node in graph.nodes:
        computed = node.op == "call_function" and node.all_input_nodes
        if node.op == "get_attr" or (computed and constants.issuperset(node.all_input_nodes)):
            constants.add(node)
    return constants


def _split(graph: Graph, moved: set[Node], shared: set[Node]) -> SplitGraph:
    """Return a graph of the ``moved`` nodes and one of the rest; each has the ``shared`` nodes it reads."""
    handed_over = [node for node in graph.nodes if node in moved and not moved.issuperset(node.users)]
    first, in_first = Graph(), dict[Node, Node]()
    for node in _with_what_they_read(moved, shared, graph):
        in_first[node] = first.node_copy(node, in_first.__getitem__)
    first.output(tuple(in_first[node] for node in handed_over))
    remaining, in_outside = Graph(), dict[Node, Node]()
    for node in handed_over:
        in_outside[node] = remaining.placeholder(node.name)
        in_outside[node].meta = dict(node.meta)
    others = [node for node in graph.nodes if node not in moved and node not in shared]
    for node in _with_what_they_read(others, shared, graph):
        in_outside[node] = remaining.node_copy(node, in_outside.__getitem__)
    return SplitGraph(first, remaining)


def _with_what_they_read(nodes: Collection[Node], shared: set[Node], graph: Graph) -> Iterator[Node]:
    """Return ``nodes`` and the nodes of ``shared`` that they depend on, in the order of ``graph``."""
    expected = set(nodes)
    for node in reversed(graph.nodes):
        if node in expected:
            expected |= shared.intersection(node.all_input_nodes)
    return (node for node in graph.nodes if node in expected)


# A cell as a graph of parts, with the qparams of its initial states.


DEFAULT_INITIAL = (1.0, 0)


def _initial_qparams(index: int) -> property:
    """Return the property for (scale, zero point) of a state that a call omits."""

    # In meta, because GraphModule.__deepcopy__ drops other attributes.
    def read(cell: GraphModule) -> tuple[float, int]:
        return (metadata.INITIAL_STATES.of(cell) or {}).get(index, DEFAULT_INITIAL)

    def write(cell: GraphModule, qparams: tuple[float, int]) -> None:
        metadata.INITIAL_STATES.write(cell, {**(metadata.INITIAL_STATES.of(cell) or {}), index: qparams})

    return property(read, write)


class CellGraphModule(parts.PartGraphModule):
    """A prepared or converted cell, with the initial-state qparams of ``torch.ao.nn.quantizable.LSTMCell``.

    An omitted state is zeros; a converted cell quantizes the zeros with this (scale, zero point). FX's cell
    has the attributes but never reads them.
    """

    initial_hidden_state_qparams = _initial_qparams(0)
    initial_cell_state_qparams = _initial_qparams(1)

    def state_qparams(self) -> tuple[PerTensorQParams | None, ...]:
        """Return the qparams of every new state in a converted cell."""
        return parts.converted_qparams(self)

    def program(self) -> CellProgram | None:
        """Return this cell as a program for the cell loop; None if the loop cannot run it."""
        return None

    def program_problem(self) -> str | None:
        """Return the reason why the cell loop cannot run this cell; None if it can."""
        return "it is not converted"

    def starts_at_zero(self) -> bool:
        """Return whether an omitted state is exactly zeros, without initial-state qparams."""
        return all(
            qparams == DEFAULT_INITIAL for qparams in (metadata.INITIAL_STATES.of(self) or {}).values()
        )

    def initial_state(self, widths: Sequence[int], x: Tensor) -> tuple[Tensor, ...]:
        """Return the states of a call that passes none: zeros (B, width) each, quantized with the
        initial-state qparams in a converted cell."""
        initial_qparams = self.initial_hidden_state_qparams, self.initial_cell_state_qparams
        states = []
        for width, qparams, given in zip(widths, self.state_qparams(), initial_qparams, strict=False):
            state, (scale, zero_point) = x.new_zeros(x.shape[0], width), given
            if qparams is not None and (scale, zero_point) != DEFAULT_INITIAL:
                initial = replace(qparams, scale=scale, zero_point=zero_point)
                state = initial.dequantize(initial.quantize(state))
            states.append(state)
        return tuple(states)


class ConvertedCellGraphModule(parts.ConvertedPartGraphModule, CellGraphModule):
    """A q-dq cell: its state_dict carries all qparams.

    ``cell(x, *states)`` equals ``cell.repeated_step()(*cell.project(x), *states)``, except that a linear may
    sum in another order when it has more rows.
    """

    _made: CellFunctions | None = None

    def recompile(self) -> Any:
        """Recompile ``forward``, and derive the qparams, functions and program from the graph again."""
        self._state_qparams = parts.converted_qparams(self)
        self._made = None
        self._program = program_or_problem(("", self))
        return super().recompile()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a copy with the functions, which a strict export of it could not make."""
        copied: Any = super().__deepcopy__(memo)
        copied._made = self._made
        return copied

    # Not in recompile, which copies and passes call again and again: four functions are compiled. Not a
    # cached property, whose lock Dynamo does not enter.
    @property
    def _functions(self) -> CellFunctions:
        if self._made is None:
            self._made = CellFunctions.of(self, self.graph)
        return self._made

    def program(self) -> CellProgram | None:
        """Return the program, see ``CellGraphModule``; None also if the cell has hooks."""
        if self._forward_hooks or self._forward_pre_hooks or isinstance(self._program, str):
            return None
        return self._program

    def program_problem(self) -> str | None:
        return self._program if isinstance(self._program, str) else None

    def state_qparams(self) -> tuple[PerTensorQParams | None, ...]:
        return self._state_qparams

    def projection_graph(self) -> Graph:
        """Return the graph x -> projected, the part of the cell that depends only on x. Its attributes are
        those of the cell."""
        return self._functions.graphs.first

    def step_graph(self) -> Graph:
        """Return the graph (*projected, *states) -> the new states. Its attributes are those of the cell."""
        return self._functions.graphs.outside

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the inputs of a step that depend on ``x`` (..., I), for all steps at once; (..., width)
        each."""
        project = qdq.weight_by_weight(self, self.projection_graph()) or partial(
            self._functions.project, self
        )
        projected: tuple[Tensor, ...] = project(x)
        return projected

    def repeated_step(self) -> Callable[..., tuple[Tensor, ...]]:
        """Return (*projected, *states) -> the new states, (B, width) each, for many steps in a row: weights
        are dequantized once, in this call. ``projected`` are results of ``project`` for one step."""
        functions = self._functions
        return qdq.weight_by_weight(self, self.step_graph()) or partial(
            functions.step, self, *functions.constants(self, *functions.weights(self))
        )

    def step_of_weights(self) -> tuple[Callable[..., tuple[Tensor, ...]], tuple[Tensor, ...]]:
        """Return a step as a function of (*weights, *projected, *states), and the stored, quantized
        weights."""
        weights = self._functions.weights(self)
        return partial(self._functions.step_of_weights, self, len(weights)), weights


# Makes the prepared cells of a float recurrent module, one for each layer and direction.


WEIGHT_NAMES = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")


def prepared_cell(
    module: nn.Module,
    specs: parts.PartSpecs,
    *,
    split_gates: bool,
    suffix: str = "",
    input_dtype: torch.dtype | None = None,
) -> CellGraphModule:
    """Return the prepared cell with copies of the parameters of ``module`` whose names end in ``suffix``.

    ``input_dtype`` is the quantized dtype of the cell's input; default: the QConfig's activation dtype.
    """
    kind = kind_of(module)
    cell, weights = float_cell(module, suffix, split_gates=split_gates), _weights(module, suffix)
    prepared = parts.prepare_parts(
        capture_by_structure(cell, cell.example_inputs()),
        kind.parts(split_gates=split_gates, projected="weight_hr" in weights),
        specs,
        {
            "x": input_dtype or specs.op_specs.activation_dtype,
            "hx": specs.group_dtype(kind.states[0].group),
        },
    )
    return CellGraphModule.wrap(prepared)


def float_cell(module: nn.Module, suffix: str, *, split_gates: bool) -> FloatCell:
    """Return the float cell with copies of the parameters of ``module`` whose names end in ``suffix``."""
    return kind_of(module).float_cell(_weights(module, suffix), split_gates=split_gates)


def _weights(module: nn.Module, suffix: str) -> dict[str, Tensor]:
    result = {name: getattr(module, f"{name}{suffix}", None) for name in WEIGHT_NAMES}
    return {name: value for name, value in result.items() if value is not None}


#: Name of a projection in a cell -> the names of its weight and bias in torch.nn.
PROJECTIONS = {
    "igates": ("weight_ih", "bias_ih"),
    "hgates": ("weight_hh", "bias_hh"),
    "projection": ("weight_hr", ""),
}


def weights_of(cell: GraphModule) -> dict[str, Tensor]:
    """Return the parameters of a prepared cell by their names in torch.nn, without a suffix; the weights of
    split gates are concatenated."""
    pieces: dict[str, list[Tensor]] = {}
    for path, parameter in cell.named_parameters():
        projection, *_, kind = path.split(".")
        weight, bias = PROJECTIONS[projection]
        pieces.setdefault(weight if kind == "weight" else bias, []).append(parameter)
    return {name: torch.cat(values) for name, values in pieces.items()}
