"""Which calls of a model keep a state in a stream, and whether pieces give what the whole gives."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from torchq_compat.capture.opaque_calls import layout_index, opaque_call_nodes
from torchq_compat.capture.sizes.input_sizes import Dimension, InputSizes, Place
from torchq_compat.capture.trial_runs import sqnr
from torchq_compat.errors import ExportError
from torchq_compat.ops import those
from torchq_compat.recurrent.contracts import SequenceContract
from torchq_compat.recurrent.families import DynamicRecurrent
from torchq_compat.recurrent.python_loops import OpaqueLoop
from torchq_compat.recurrent.recurrent_module import RecurrentModule
from torchq_compat.recurrent.states import CallKey, Streams
from torchq_compat.support.graph_nodes import attribute_at, behind, module_path_of, user_line_of
from torchq_compat.support.upstream import pytree

# Calls of a q-dq graph on random inputs, at chosen sizes: what a stream needs to know is found by trying.


@dataclass(frozen=True)
class TrialCalls:
    """Calls of ``graph_module``, whose inputs have ``sizes``."""

    graph_module: GraphModule
    sizes: InputSizes

    @cached_property
    def _dimensions(self) -> dict[Node, tuple[Dimension, ...]]:
        """The dimensions of each input."""
        graph = self.graph_module.graph
        placeholders = graph.find_nodes(op="placeholder")
        return dict(zip(placeholders, self.sizes.of_placeholders(graph), strict=True))

    def places(self, placeholder: Node) -> list[Place | None]:
        """Return, for each dimension of an input, the place of the size that it has; None if it is fixed."""
        dimensions = self._dimensions.get(placeholder, ())
        return [None if item.is_fixed else item.root or item.place for item in dimensions]

    def inputs(self, sizes: Mapping[Place, int]) -> list[Any]:
        """Return random inputs with ``sizes``, and the sizes of the example where it names none."""
        generator = torch.Generator().manual_seed(0)
        return [self._random(node, sizes, generator) for node in self._dimensions]

    def _random(self, node: Node, sizes: Mapping[Place, int], generator: torch.Generator) -> Any:
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            return value
        shape = [sizes.get(item.root or item.place, item.example) for item in self._dimensions[node]]
        if value.dtype is torch.bool:
            return (torch.rand(shape, generator=generator) < 0.5).to(value.device)
        if not value.dtype.is_floating_point:
            return torch.randint(0, self._tokens, shape, generator=generator).to(value)
        return torch.randn(shape, generator=generator).to(value)

    @cached_property
    def _tokens(self) -> int:
        """The number of tokens that every embedding table of the graph has."""
        counts = [2]
        for node in self.graph_module.graph.nodes:
            if node.target in those("embedding"):
                table = node.args[0]
                while isinstance(table, Node) and table.op == "call_function":
                    table = table.args[0]
                if isinstance(table, Node) and table.op == "get_attr":
                    counts.append(len(attribute_at(self.graph_module, str(table.target))))
        return max(2, min(counts[1:], default=2))

    def values(self, inputs: list[Any], streams: Streams | None = None) -> dict[Node, Any]:
        """Return the value of every node that is no input.

        Raises:
            ExportError: the graph does not run on ``inputs``.
        """
        recorder = Interpreter(self.graph_module, garbage_collect_values=False)
        recorder.extra_traceback = False
        with torch.no_grad(), (Streams(frozenset()) if streams is None else streams).active():
            try:
                recorder.run(*inputs, enable_io_processing=False)
            except ExportError:
                raise
            except Exception as cause:
                raise ExportError.of("TQ931.does_not_run", cause=cause) from cause
        return {node: v for node, v in recorder.env.items() if node.op not in ("placeholder", "get_attr")}

    @cached_property
    def shapes(self) -> dict[Place | None, dict[Node, Any]]:
        """Place of a free size -> the values of the graph with that size larger by one; None -> at the sizes
        of the example. A size that cannot change alone has no values."""
        matches: dict[Place | None, dict[Node, Any]] = {None: self.values(self.inputs({}))}
        for item in self.sizes.free:
            try:
                matches[item.place] = self.values(self.inputs({item.place: item.example + 1}))
            except ExportError:
                continue
        return matches

    def place_of(self, node: Node, dim: int) -> Place | None:
        """Return the place of the size that dimension ``dim`` of ``node`` has, or of its first result; None
        if it is fixed."""
        if node.op == "placeholder":
            return self.places(node)[dim]
        before = _first(self.shapes[None][node]).shape[dim]
        sizes = ((place, _first(values[node]).shape[dim]) for place, values in self.shapes.items())
        return next((place for place, size in sizes if size == before + 1), None)

    def rows_of(self, call: Node, states: int, steps: Place) -> tuple[Place | None, tuple[int | None, ...]]:
        """Return the place of the size, other than that of the ``steps``, that most of the first ``states``
        results of ``call`` have, and the dimension that has it in each."""
        before = [item.shape for item in self.shapes[None][call][:states]]
        match: tuple[Place | None, tuple[int | None, ...]] = None, (None,) * states
        for place, values in self.shapes.items():
            if place in (None, steps):
                continue
            changed = [
                [dim for dim, size in enumerate(item.shape) if size != shape[dim]]
                for item, shape in zip(values[call], before, strict=False)
            ]
            dims = tuple(item[0] if item else None for item in changed)
            if dims.count(None) < match[1].count(None):
                match = place, dims
        return match


def _first(value: Any) -> Tensor:
    tensor: Tensor = value if isinstance(value, Tensor) else value[0]
    return tensor


# The recurrent calls of a converted graph, and which of them keep their state in a stream.


#: In the name of the operator that computes qparams of the values that it is given.
CHOOSE_QPARAMS = "choose_qparams"


@dataclass(frozen=True)
class RecurrentCall:
    """One call of a recurrent module or of a rolled loop.

    Attributes:
        key: the name of the call in streams.
        steps: the place of its number of steps among the sizes of the inputs.
        batch: the place of its batch size; None if it is fixed, or the input is not batched.
        keeps_state: whether the model gives it no state, or the same state in every call.
        is_dynamic: whether the ranges of its values are those of each call.
        rows: see ``Streams``; None for a recurrent module.
        counts: what only gives a loop the number of its steps.
    """

    node: Node
    key: CallKey
    steps: Place
    batch: Place | None
    keeps_state: bool
    is_dynamic: bool
    rows: tuple[int | None, ...] | None = None
    counts: Node | None = None


def recurrent_calls(trial: TrialCalls) -> list[RecurrentCall]:
    """Return the calls of recurrent modules in a q-dq graph.

    Raises:
        ExportError: a call cannot run in pieces, named by its path; or no call keeps its state.
    """
    graph_module, result = trial.graph_module, []
    for node, module in opaque_call_nodes(graph_module).items():
        if isinstance(module, RecurrentModule):
            result.append(_read(trial, node, module, str(node.target)))
        elif isinstance(module, OpaqueLoop):
            result.append(_read_loop(trial, node, module))
    if not any(call.keeps_state for call in result):
        raise ExportError.of("TQ931.nothing_to_keep")
    return result


def streams_of(calls: Sequence[RecurrentCall]) -> Streams:
    """Return streams, not begun, that keep the states of ``calls``."""
    rows = {call.key: call.rows for call in calls if call.rows is not None}
    return Streams(frozenset(call.key for call in calls), rows=rows)


def _read(trial: TrialCalls, node: Node, module: RecurrentModule, path: str) -> RecurrentCall:
    contract = module.contract
    if not isinstance(contract, SequenceContract):
        raise _refused(path, "it is a cell: the loop around it is Python's and has a fixed number of steps")
    if contract.bidirectional:
        raise _refused(path, "it is bidirectional: its backward direction begins at the end of the sequence")
    index = layout_index(node)
    layout = module.opaque_layouts[index]
    if any(layout.inputs.holds_indices()):
        raise _refused(path, "it is given a PackedSequence")
    count = layout.inputs.count()
    args, kwargs = layout.inputs.put_together(node.args[:count], node.args[count:])
    _, hidden = contract.arguments_of(path, args, kwargs)
    shape = node.meta["val"][0].shape
    is_batched = len(shape) == 3
    axis = 1 if is_batched and contract.batch_first else 0
    steps = trial.place_of(node, axis)
    if steps is None:
        raise _refused(path, f"the model fixes its sequences to {shape[axis]} steps")
    batch = trial.place_of(node, 0 if contract.batch_first else 1) if is_batched else None
    return RecurrentCall(
        node,
        (path, index),
        steps,
        batch,
        keeps_state=hidden is None or _is_kept(trial, path, hidden, steps),
        is_dynamic=isinstance(module, DynamicRecurrent),
    )


def _read_loop(trial: TrialCalls, node: Node, loop: OpaqueLoop) -> RecurrentCall:
    layout, parts = loop.opaque_layouts[0], loop.form.parts
    count = layout.inputs.count()
    (states, wholes, _), _ = layout.inputs.put_together(node.args[:count], node.args[count:])
    if any(part.backward for part in parts):
        raise _refused(loop.path, "it begins at the end of the sequence")
    steps = trial.place_of(wholes[0], parts[0].dim)
    if steps is None:
        raise _refused(loop.path, "the number of its steps is fixed, or computed")
    batch, rows = trial.rows_of(node, len(states), steps)
    keeps_state = bool(states) and _is_kept(trial, loop.path, states, steps)
    counts = wholes[-1] if loop.form.counted else None
    is_dynamic = any(CHOOSE_QPARAMS in str(inner.target) for inner in loop.step.graph.nodes)
    return RecurrentCall(node, loop.key, steps, batch, keeps_state, is_dynamic, rows, counts)


def _is_kept(trial: TrialCalls, path: str, hidden: Any, steps: Place) -> bool:
    """Return whether an initial state in the graph is the same in every call; False if it is the caller's.

    Raises:
        ExportError: the state is computed from the sequence.
    """
    read = behind(pytree.tree_leaves(hidden), stops=lambda node: node.target in those("of shapes"))
    given = {node for node in read if node.op == "placeholder"}
    if any(steps in trial.places(item) for item in given):
        raise _refused(path, "the state it begins with is computed from the sequence")
    return not given


def _refused(path: str, reason: str) -> ExportError:
    return ExportError.of("TQ931.recurrent", path=path, reason=reason)


# Check that a model computes the same in pieces as for the whole sequence, by running both.
#
# Every value of the graph is compared: a value with steps has to be the concatenation of its pieces; a value
# without steps, say a last state, has to be the same after the last piece as after the whole.


#: The numbers of steps in the pieces of a trial: different lengths, the last a single step.
PIECES = (2, 3, 1)
BATCH = 5
#: SQNRs in dB that count as equal: q-dq may round differently where a float sum has another order, and
#: dynamic ranges are computed for each piece.
EQUAL, EQUAL_DYNAMIC = 30.0, 12.0


def check_causality(trial: TrialCalls, calls: Sequence[RecurrentCall], *, is_dynamic: bool) -> None:
    """Run a q-dq graph on random sequences and on their pieces, and compare all values.

    Raises:
        ExportError: a value differs in pieces; the error names the op.
    """
    steps = calls[0].steps
    if any(call.steps != steps for call in calls):
        raise _refused_as_not_causal(
            "its recurrent modules run over different numbers of steps", calls[-1].node
        )
    sizes = {call.batch: BATCH for call in calls if call.batch is not None}
    whole = trial.inputs({**sizes, steps: sum(PIECES)})
    # A state that the caller gives also continues from piece to piece.
    expected = trial.values(whole, streams_of(calls))
    streams, pieces, start = streams_of(calls), [], 0
    placeholders = trial.graph_module.graph.find_nodes(op="placeholder")
    for count in PIECES:
        piece = [
            _piece(value, trial.places(node), steps, start, count)
            for node, value in zip(placeholders, whole, strict=True)
        ]
        pieces.append(trial.values(piece, streams))
        start += count
    least = EQUAL_DYNAMIC if is_dynamic else EQUAL
    counts = {call.counts for call in calls}
    for node, value in expected.items():
        if node in counts and len(node.users) == 1:
            continue
        if not _agrees(value, [item[node] for item in pieces], least):
            raise _refused_as_not_causal(
                "it is computed from several steps, or from the number of steps", node
            )


def _piece(value: Any, places: Sequence[Place | None], steps: Place, start: int, count: int) -> Any:
    """Return ``count`` steps of ``value`` from step ``start`` on; an input without steps is unchanged."""
    for dimension, place in enumerate(places):
        if place == steps:
            value = value.narrow(dimension, start, count)
    return value


def _agrees(whole: Any, pieces: list[Any], least: float) -> bool:
    expected, result = pytree.tree_leaves(whole), [pytree.tree_leaves(piece) for piece in pieces]
    if any(len(item) != len(expected) for item in result):
        return False
    return all(
        not isinstance(value, Tensor) or _tensor_agrees(value, list(parts), least)
        for value, *parts in zip(expected, *result, strict=True)
    )


def _tensor_agrees(whole: Tensor, pieces: list[Tensor], least: float) -> bool:
    if any(piece.dim() != whole.dim() for piece in pieces):
        return False
    if all(piece.shape == whole.shape for piece in pieces):
        return _equal(whole, pieces[-1], least)
    axis = next(
        (d for d in range(whole.dim()) if any(piece.shape[d] != whole.shape[d] for piece in pieces)), 0
    )
    lengths = [piece.shape[axis] for piece in pieces]
    if lengths == list(PIECES) and whole.shape[axis] == sum(PIECES):
        joined = _join(pieces, axis)
        return joined is not None and _equal(whole, joined, least)
    rows, remaining = divmod(lengths[-1], PIECES[-1])
    if remaining or [rows * count for count in PIECES] != lengths or whole.shape[axis] != rows * sum(PIECES):
        return False
    # Steps and batch are flattened into one dimension, in either order.
    for by_step in (False, True):
        parts = (-1, rows) if by_step else (rows, -1)
        split = [
            item.reshape(*item.shape[:axis], *parts, *item.shape[axis + 1 :]) for item in (whole, *pieces)
        ]
        joined = _join(split[1:], axis if by_step else axis + 1)
        if joined is not None and _equal(split[0], joined, least):
            return True
    return False


def _join(pieces: list[Tensor], axis: int) -> Tensor | None:
    others = {math.prod(piece.shape) // max(1, piece.shape[axis]) for piece in pieces}
    if len(others) > 1:
        return None
    return torch.cat(pieces, axis)


def _equal(whole: Tensor, tensor: Tensor, least: float) -> bool:
    if whole.shape != tensor.shape:
        return False
    a, b = whole.double(), tensor.double()
    return torch.equal(a, b) or sqnr(a, b) >= least


def _refused_as_not_causal(reason: str, node: Node) -> ExportError:
    path, line = str(node.target) if node.op == "call_module" else module_path_of(node), user_line_of(node)
    where = f" in {path!r}" if path else ""
    at = f" at {line}" if line else ""
    name = path if node.op == "call_module" else str(node.target)
    return ExportError.of("TQ931.not_causal", name=name, where=where, at=at, reason=reason)
