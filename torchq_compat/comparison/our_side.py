"""This package's side of a comparison, and its cells as plain values."""

import copy
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from torchq_compat.capture import opaque_calls
from torchq_compat.checkpoints import load_fx_state
from torchq_compat.comparison import sides
from torchq_compat.comparison.cases import Case
from torchq_compat.comparison.results import CellGraph, CellNode, Explained, Kind
from torchq_compat.model.quantized_boundary import qparams_of_integers
from torchq_compat.modules.parts import PartKind, PartOwner, part_nodes, part_of
from torchq_compat.port.running.recorder import computes_nothing
from torchq_compat.quantize.explain import explain
from torchq_compat.quantize.first_call import at_once
from torchq_compat.quantize_fx import convert_fx, prepare_fx, prepare_qat_fx
from torchq_compat.read.qdq import QUANTIZE, is_dequantize
from torchq_compat.read.qparams import QParams
from torchq_compat.support.decisions import Action, Decision
from torchq_compat.support.graph_nodes import position_of, source_of
from torchq_compat.support.torch_ao import disable_fake_quant
from torchq_compat.support.upstream import pytree

# The cells of a converted model as plain values, for drawing: which part reads which.


#: The ``CellNode.formula`` of an input of a cell.
CELL_INPUT = "input of the cell"


def cell_graphs(converted: GraphModule) -> Iterator[CellGraph]:
    """Yield every cell of every custom module in ``converted``."""
    for path, opaque in opaque_calls.opaque_modules(converted).items():
        for cell_path, cell in opaque.graphs() if isinstance(opaque, PartOwner) else ():
            yield CellGraph(f"{path}.{cell_path}", tuple(_cell_nodes(cell)))


def _cell_nodes(cell: GraphModule) -> Iterator[CellNode]:
    names = {node: name for name, node in part_nodes(cell)}
    for node in cell.graph.nodes:
        if node.op == "placeholder":
            names[node] = str(node.target)
            yield CellNode(names[node], CELL_INPUT, ())
    for node, name in names.items():
        if node.op != "placeholder":
            inputs = [source for arg in node.all_input_nodes if (source := _named_source(arg, names))]
            yield CellNode(name, part_of(node).formula, tuple(dict.fromkeys(inputs)))


def _named_source(node: Node, names: Mapping[Node, str]) -> str | None:
    """Return the part or input whose value reaches ``node`` through q-dq and slices; None for weights."""
    while node not in names:
        if not node.all_input_nodes:
            return None
        node = node.all_input_nodes[0]
    return names[node]


# This package's side: the prepared, calibrated and converted model, and the places to read in it.


@dataclass(frozen=True)
class KeyFacts:
    """The facts of ``explain`` about a key; ``part_kind`` is for parts only."""

    name: str
    kind: Kind
    operation: str
    reason: str
    part_kind: PartKind | None = None


@dataclass(frozen=True)
class OurSide:
    """Both forms of the model.

    Attributes:
        exact: the observed model, which computes the float values at every place.
        quantized: the q-dq model.
        places: every key in graph order.
        cells: the graphs of parts, for drawing.
        left_float: modules that stay float as a whole.
        unlike_fx: where FX has other numbers.
        quantized_count: the number of quantized modules and ops.
    """

    exact: sides.QuantizedModel
    quantized: sides.QuantizedModel
    places: Mapping[sides.Key, KeyFacts]
    cells: tuple[CellGraph, ...]
    left_float: tuple[Explained, ...]
    unlike_fx: tuple[Explained, ...]
    quantized_count: int


def quantize_by_us(case: Case) -> OurSide:
    """Prepare, calibrate and convert ``case.model``, which is not changed.

    Raises:
        TorchQCompatError: the errors of ``prepare_fx`` and ``convert_fx``.
    """
    # Fake-quantizes observe in evaluation mode too, and batch norms keep their statistics there.
    model = case.as_trained() if case.is_qat else case.model
    prepare = at_once(prepare_qat_fx) if case.is_qat else at_once(prepare_fx)
    settings = case.qconfig_mapping, case.example_inputs, case.prepare_custom_config
    prepared = prepare(model, *settings, backend_config=case.backend_config).eval()
    if case.fx_state is not None:
        load_fx_state(prepared, case.fx_state)
    case.calibrate(prepared)
    as_fx = bool(case.observer_qparams)
    deployed = convert_fx(prepared, case.convert_custom_config, observer_qparams=as_fx)
    converted = deployed.reference
    decisions = tuple(explain(converted))
    names = {decision.path: _name(key) for key, decision in _op_keys(decisions)}
    places = dict(_places(converted, decisions))
    exact, quantized = copy.deepcopy(prepared).apply(disable_fake_quant).eval(), copy.deepcopy(converted)
    # A quantize after a node whose output has no qspec of its own belongs to the node's consumer.
    annotations = ((node.name, node.meta.get(Q_ANNOTATION_KEY)) for node in prepared.graph.nodes)
    observed = {name for name, item in annotations if item is not None and item.output_qspec is not None}
    return OurSide(
        sides.QuantizedModel(_runner(exact, decisions), lambda _: (), None),
        sides.QuantizedModel(
            _runner(quantized, decisions, observed), partial(_output_qparams, converted), deployed
        ),
        places,
        tuple(cell_graphs(converted)),
        tuple(
            Explained(d.path, d.kind, d.reason, d.code)
            for d in decisions
            if d.action is Action.FLOAT and (d.warn or not d.node) and not computes_nothing(converted, d)
        ),
        tuple(
            Explained(names.get(d.path, d.path), d.kind, d.unlike_fx, d.code)
            for d in decisions
            if d.unlike_fx
        ),
        sum(d.action is Action.QUANTIZED for d in decisions),
    )


def _places(converted: GraphModule, decisions: tuple[Decision, ...]) -> Iterator[tuple[sides.Key, KeyFacts]]:
    by_path = {decision.path: decision for decision in decisions}
    of_ops = dict(_op_keys(decisions))
    for key, (_, node) in _nodes(converted, decisions).items():
        part_kind = None
        if isinstance(key, sides.OpKey):
            decision, name, kind = of_ops[key], _name(key), Kind.OP if key.function else Kind.MODULE
        elif isinstance(key, sides.ResultKey):
            decision, name, kind = by_path[key.path], f"{key.path}[{key.position}]", Kind.RESULT
        else:
            decision, kind, part_kind = by_path[f"{key.cell}.{key.part}"], Kind.PART, part_of(node).kind
            name = decision.path
        yield key, KeyFacts(name, kind, decision.kind, decision.reason, part_kind)


def _name(key: sides.OpKey) -> str:
    place = "/".join(filter(None, (key.path, key.function)))
    return f"{place}#{key.call + 1}" if key.call else place


def _op_keys(decisions: tuple[Decision, ...]) -> Iterator[tuple[sides.OpKey, Decision]]:
    """Yield key and decision for each decision about a node. The path of a function's caller is its path up
    to the last slash."""
    seen: Counter[tuple[str, str]] = Counter()
    for decision in decisions:
        if not decision.node:
            continue
        operator = decision.kind.split(" + ")[0]
        function = operator.split(".")[0] if "." in operator else ""
        path = decision.path.rpartition("/")[0] if function else decision.path
        yield sides.OpKey(path, function, seen[path, function]), decision
        seen[path, function] += 1


def _nodes(
    graph_module: GraphModule, decisions: tuple[Decision, ...]
) -> dict[sides.Key, tuple[GraphModule, Node]]:
    """Return every key with the graph and the node that computes it, in graph order."""
    matches: dict[sides.Key, tuple[GraphModule, Node]] = {}
    by_name = {node.name: node for node in graph_module.graph.nodes}
    keys: dict[str, sides.OpKey] = {decision.node: key for key, decision in _op_keys(decisions)}
    calls = opaque_calls.opaque_call_nodes(graph_module)
    for node in by_name.values():
        if node.name in keys:
            matches[keys[node.name]] = graph_module, node
        elif node in calls:
            path, opaque = str(node.target), calls[node]
            for cell_path, cell in opaque.graphs() if isinstance(opaque, PartOwner) else ():
                for part, item in part_nodes(cell):
                    matches[sides.PartKey(f"{path}.{cell_path}", part)] = cell, item
            for getitem in node.users:
                matches[sides.ResultKey(path, position_of(getitem))] = graph_module, getitem
    return matches


def _runner(
    model: GraphModule, decisions: tuple[Decision, ...], observed: Collection[str] | None = None
) -> sides.Run:
    """Return a function that runs ``model`` with taps, and reads floats, or the integers of the ``observed``
    nodes, of results and of parts."""
    places: dict[sides.Key, tuple[GraphModule, Node]] = {}
    integers_at: dict[sides.Key, QParams | None] = {}
    for key, (graph, node) in _nodes(model, decisions).items():
        is_own = observed is not None and (not isinstance(key, sides.OpKey) or node.name in observed)
        source, integers_at[key] = _integers_of(node) if is_own else (node, None)
        places[key] = graph, source

    def read(key: sides.Key, passes: list[Tensor]) -> sides.Reading:
        whole, qparams = passes[0] if len(passes) == 1 else torch.stack(passes), integers_at[key]
        return sides.Reading(whole if qparams is None else qparams.dequantize(whole), qparams)

    return sides.runner(model, sides.tap_nodes(places), read)


def _integers_of(node: Node) -> tuple[Node, QParams | None]:
    """Return the node that holds the integers of ``node``, with their qparams; ``node`` and None if it stays
    float."""
    quantizes = (user for user in node.users if user.target is QUANTIZE)
    known = ((item, qparams_of_integers(item)) for item in (node, *quantizes))
    return next((pair for pair in known if pair[1] is not None), (node, None))


def _output_qparams(converted: GraphModule, result: Any) -> tuple[QParams | None, ...]:
    nodes = pytree.tree_leaves(converted.graph.output_node().args[0])
    pairs = zip(nodes, pytree.tree_leaves(result), strict=True)
    return tuple(
        qparams_of_integers(source_of(node)) if is_dequantize(node) else None
        for node, leaf in pairs
        if isinstance(leaf, Tensor)
    )
