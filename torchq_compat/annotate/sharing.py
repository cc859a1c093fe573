"""Resolve which edges and nodes share an observer by their specs."""

import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torchao.quantization.pt2e import quantizer
from torchao.quantization.pt2e.observer import PlaceholderObserver
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY
from torchao.quantization.pt2e.quantizer.quantizer import QuantizationSpecBase as Spec

from torchq_compat.errors import AnnotationError, ConfigError
from torchq_compat.read.qspecs import with_torchao_observer
from torchq_compat.support import torch_ao
from torchq_compat.support.argument_checks import INDEX, check_arguments, instance_of
from torchq_compat.support.dtypes import dtype_name, dtype_range, is_integer
from torchq_compat.support.graph_nodes import replace_node

# Points of a graph that can be observed, including outputs that do not have a node yet.
#
# torchao names an output by its node and an edge by (producer, consumer). An output of an operator with
# several outputs has one ``getitem`` node, several, or none; ``Output`` names the output in every case.


OUTPUT_FIELDS = {"node": instance_of(Node, what="a torch.fx.Node"), "index": INDEX}


@dataclass(frozen=True)
class Output:
    """Output ``index`` of ``node``.

    It is used in place of a node in SharedQuantizationSpec, DerivedQuantizationSpec and edges:
    ``SharedQuantizationSpec(Output(node, 1))``, ``SharedQuantizationSpec((Output(node, 0), reader))``.
    """

    node: Node
    index: int

    def __post_init__(self) -> None:
        check_arguments("Output", OUTPUT_FIELDS, vars(self))


Source = Output | Node
#: The output of a node, or an edge: (producer, consumer).
EdgeOrNode = Source | tuple[Source, Node]


def output_values(node: Node) -> tuple[Any, ...]:
    """Return the example values of the outputs of ``node``.

    Raises:
        AnnotationError: ``node`` has no example value.
    """
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        return tuple(value)
    if isinstance(value, Tensor):
        return (value,)
    raise AnnotationError.of("TQ943.no_example_value", node=node)


def canonical(point: Any) -> EdgeOrNode:
    """Return ``point`` in the form used for comparison: a getitem of a node's result as an ``Output``, the
    only output of a node as that node.

    Raises:
        AnnotationError: there is no such output, or the node was erased.
    """
    if isinstance(point, tuple):
        producer, consumer = point
        return canonical_source(producer), consumer
    return canonical_source(point)


def canonical_source(source: Source) -> Source:
    """Return ``canonical`` of a ``source``, which is no edge."""
    if isinstance(source, Output):
        values = output_values(source.node)
        if not -len(values) <= source.index < len(values):
            raise AnnotationError.of(
                "TQ943.no_such_output", source=source, outputs=len(values), last=len(values) - 1
            )
        if isinstance(source.node.meta["val"], Tensor):
            return source.node
        return Output(source.node, source.index % len(values))
    if source._erased:
        raise AnnotationError.of("TQ943.gone_node", source=source)
    if source.target is operator.getitem:
        producer, index = source.args
        if isinstance(producer, Node) and isinstance(index, int) and has_several(producer):
            return Output(producer, index % len(producer.meta["val"]))
    return source


def has_several(node: Node) -> bool:
    """Return whether ``node`` has several outputs, according to its example value."""
    return isinstance(node.meta.get("val"), (tuple, list))


def float_outputs(node: Node) -> list[Output]:
    """Return the outputs of ``node``, which has several, that can be quantized."""
    return [
        Output(node, index)
        for index, value in enumerate(output_values(node))
        if isinstance(value, Tensor) and value.dtype.is_floating_point
    ]


def check_input(node: Node, source: Source) -> None:
    """Refuse an edge that torchao does not observe: it observes positional arguments, also in nested lists.

    Raises:
        AnnotationError: ``source`` is not a positional argument of ``node``.
    """
    positional: set[EdgeOrNode] = set()
    map_arg(node.args, lambda argument: positional.add(canonical(argument)))
    if canonical(source) not in positional:
        raise AnnotationError.of(
            "TQ943.no_such_input",
            source=shown(canonical(source)),
            node=node,
            inputs=", ".join(argument.name for argument in node.all_input_nodes),
        )


def getitems_of(output: Output) -> list[Node]:
    """Return the getitem nodes of ``output``, in graph order."""
    picked = [user for user in output.node.users if canonical(user) == output]
    return sorted(picked)


def point_at(point: EdgeOrNode) -> Node | tuple[Node, Node]:
    """Return ``point`` written with nodes, as torchao reads it; see ``node_at``."""
    return (node_at(point[0]), point[1]) if isinstance(point, tuple) else node_at(point)


def node_at(source: Source) -> Node:
    """Return the node for ``source``; make its getitem if there is none, merge several into one."""
    if isinstance(source, Node):
        return source
    result = getitems_of(source)
    if not result:
        graph = source.node.graph
        with graph.inserting_after(source.node):
            getitem = graph.call_function(operator.getitem, (source.node, source.index))
        # Keep the metadata of the producer, as torch.export does for its getitems.
        origin = {key: value for key, value in source.node.meta.items() if key != Q_ANNOTATION_KEY}
        getitem.meta = {**origin, "val": source.node.meta["val"][source.index]}
        return getitem
    first, *duplicates = result
    for duplicate in duplicates:
        replace_node(duplicate, first)
    return first


def shown(point: EdgeOrNode) -> str:
    """Return ``point`` as text for messages."""
    if isinstance(point, tuple):
        return f"the edge ({shown_source(point[0])} -> {point[1].name})"
    return shown_source(point) if isinstance(point, Output) else f"the output of {point.name}"


def shown_source(source: Source) -> str:
    """Return ``source`` as text for messages, as the user wrote it."""
    return f"output {source.index} of {source.node.name}" if isinstance(source, Output) else source.name


# Check one spec at one point: that a tensor is there to quantize, and that torchao can make its observer.


PLACEHOLDERS = (PlaceholderObserver, torch_ao.PlaceholderObserver)


def checked_spec(point: EdgeOrNode, spec: Any) -> Spec:
    """Return the ``spec`` of ``point``, with a torchao observer if it had one of torch.ao.

    Raises:
        AnnotationError: ``spec`` is not a spec, has no qscheme, or its observer cannot be made.
    """
    if not isinstance(spec, Spec):
        raise AnnotationError.of("TQ943.spec_type", place=shown(point), spec=spec)
    if isinstance(spec, (quantizer.FixedQParamsQuantizationSpec, quantizer.DerivedQuantizationSpec)):
        # torchao reads no qscheme, and no axis, as per tensor; its convert fails without a range.
        low, high = dtype_range(spec.dtype) if is_integer(spec.dtype) else (None, None)
        return dataclasses.replace(
            spec,
            qscheme=torch.per_tensor_affine if spec.qscheme is None else spec.qscheme,
            quant_min=low if spec.quant_min is None else spec.quant_min,
            quant_max=high if spec.quant_max is None else spec.quant_max,
        )
    if not isinstance(spec, quantizer.QuantizationSpec):
        return spec
    try:
        translated, result = with_torchao_observer(spec, f"the spec of {shown(point)}")
    except ConfigError as cause:
        raise AnnotationError(cause.message, hint=cause.hint) from cause
    except Exception as cause:
        # torchao's observers report a qscheme of None as one that is not supported.
        if spec.qscheme is None:
            raise _without_qscheme(point, spec) from cause
        raise AnnotationError.of("TQ943.observer", place=shown(point), cause=cause) from cause
    if not is_integer(spec.dtype) or spec.is_dynamic:
        return translated
    if isinstance(getattr(result, "legacy", result), PLACEHOLDERS):
        raise AnnotationError.of("TQ943.observer_without_qparams", place=shown(point), result=result)
    # A block-wise observer of torchao has no qscheme, and no attribute for one.
    if getattr(result, "qscheme", spec) is None:
        raise _without_qscheme(point, spec)
    return translated


def checked_value(point: EdgeOrNode) -> None:
    """Refuse ``point`` if its value is known and is not a float tensor.

    Raises:
        AnnotationError: the value is an integer tensor, a tuple or a number.
    """
    source = point[0] if isinstance(point, tuple) else point
    node = source.node if isinstance(source, Output) else source
    value = node.meta.get("val")
    if value is None:
        return
    if isinstance(source, Output):
        value = value[source.index]
    if isinstance(value, Tensor) and value.dtype.is_floating_point:
        return
    result = f"a tensor of {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise AnnotationError.of("TQ943.not_a_value", place=shown(point), result=result)


def _without_qscheme(point: EdgeOrNode, spec: Spec) -> AnnotationError:
    return AnnotationError.of("TQ943.no_qscheme", spec=spec, place=shown(point))


# Resolve which points share an observer by their specs, and the order in which torchao makes the observers.
#
# torchao makes one observer per group, in graph order, from the first spec of the group. That spec must not
# refer to another point (torchao asserts this), and the points a derived spec refers to must have observers
# by then. So in a group that shares, the first point has the spec and the other points refer to it.
# Implicit sharing, of one tensor observed with equal settings at its producer and its consumers, is left to
# torchao.


def references(spec: Spec) -> list[EdgeOrNode]:
    """Return the points from which ``spec`` gets its qparams."""
    if isinstance(spec, quantizer.SharedQuantizationSpec):
        return [_referred(spec.edge_or_node)]
    if isinstance(spec, quantizer.DerivedQuantizationSpec):
        return [_referred(point) for point in spec.derived_from]
    return []


def _referred(point: Any) -> EdgeOrNode:
    """Return ``point`` in canonical form; a node with several outputs, one of them float, is that output."""
    if isinstance(point, Node) and has_several(point):
        floats = float_outputs(point)
        return floats[0] if len(floats) == 1 else point
    return canonical(point)


def read_specs(graph: Graph) -> Iterator[tuple[EdgeOrNode, Spec]]:
    """Yield every point of ``graph`` that has a spec; a point with duplicated getitems may occur twice."""
    for node in graph.nodes:
        annotation = node.meta.get(Q_ANNOTATION_KEY)
        if annotation is None:
            continue
        for source, spec in annotation.input_qspec_map.items():
            if spec is not None:
                yield canonical((source, node)), spec
        if annotation.output_qspec is not None:
            yield from _output_specs(node, annotation.output_qspec)


def _output_specs(node: Node, given: Any) -> Iterator[tuple[EdgeOrNode, Spec]]:
    """Yield output and spec for the ``output_qspec`` of ``node``, ``given``: a single spec is for every float
    output, a sequence has one spec for each output.

    Raises:
        AnnotationError: the number of specs is not that of outputs, or no output can be quantized.
    """
    if not has_several(node) and not isinstance(given, (list, tuple)):
        yield canonical(node), given
        return
    count = len(output_values(node))
    if not isinstance(given, (list, tuple)):
        outputs = float_outputs(node)
        if not outputs:
            raise AnnotationError.of("TQ943.no_tensor_output", node=node, count=count)
        for output in outputs:
            yield canonical(output), given
        return
    if len(given) != count:
        raise AnnotationError.of("TQ943.count_of_outputs", node=node, given=len(given), count=count)
    for index, spec in enumerate(given):
        if spec is not None:
            yield canonical(Output(node, index)), spec


class SpecTable:
    """The specs of a graph by point, with their references resolved. It does not change the graph."""

    def __init__(self, graph: Graph) -> None:
        self.specs: dict[EdgeOrNode, Spec] = {}
        self._order = {node: index for index, node in enumerate(graph.nodes)}
        self._inputs: dict[Node, dict[Source, int]] = {}
        self._left_alone = {
            (canonical_source(source), node): None
            for node in graph.nodes
            for source, spec in getattr(node.meta.get(Q_ANNOTATION_KEY), "input_qspec_map", {}).items()
            if spec is None and source in node.all_input_nodes
        }
        checked: dict[int, Spec] = {}
        for point, spec in read_specs(graph):
            if id(spec) not in checked:
                checked[id(spec)] = checked_spec(point, spec)
            self.tell(point, checked[id(spec)])

    def tell(self, point: EdgeOrNode, spec: Spec) -> None:
        """Add the ``spec`` of ``point``.

        Raises:
            AnnotationError: ``point`` already has another spec.
        """
        already = self.specs.setdefault(point, spec)
        if self._form(already) != self._form(spec):
            raise AnnotationError.of(
                "TQ943.two_specs",
                place=shown(point),
                spec=self._text_of(spec),
                already=self._text_of(already),
            )

    def check_circles(self) -> None:
        """Refuse specs that get their qparams from each other.

        Raises:
            AnnotationError: the references form a circle; the message names every point of it.
        """
        done: set[EdgeOrNode] = set()
        for start in self.specs:
            self._walk(start, [], done)

    def _walk(self, point: EdgeOrNode, path: list[EdgeOrNode], done: set[EdgeOrNode]) -> None:
        if point in path:
            circle = [shown(item) for item in path[path.index(point) :]]
            chain = "; ".join(
                f"{entry} takes its qparams from {source}"
                for entry, source in zip(circle, [*circle[1:], circle[0]], strict=True)
            )
            raise AnnotationError.of("TQ943.circle", chain=chain)
        if point in done or point not in self.specs:
            return
        for source in references(self.specs[point]):
            self._walk(source, [*path, point], done)
        done.add(point)

    def check_observed(self) -> None:
        """Refuse references to points without a spec.

        Raises:
            AnnotationError: a spec refers to such a point; the message names both points.
        """
        for point, spec in self.specs.items():
            for source in references(spec):
                if source in self.specs:
                    continue
                is_of_another = _graphs_of(source) != _graphs_of(point)
                raise AnnotationError.of(
                    "TQ943.not_observed",
                    place=shown(point),
                    source=shown(source),
                    problem=" of another graph." if is_of_another else ", which no spec observes.",
                )

    def settled(self) -> dict[EdgeOrNode, Spec | None]:
        """Return specs with the same sharing, in a form and order from which torchao can make the observers.

        A reference to a point without a spec is kept; so is an edge that an annotation leaves alone, as None.

        Raises:
            AnnotationError: a derived spec refers to a point after it.
        """
        points = sorted(self.specs, key=self._position)
        leaders: dict[EdgeOrNode, EdgeOrNode] = {}
        for point in points:
            leaders.setdefault(self._root(point), point)
        settled: dict[EdgeOrNode, Spec | None] = {}
        for point in sorted(self._left_alone | self.specs, key=self._position):
            root = self._root(point)
            if point not in self.specs:
                settled[point] = None
            elif root in self.specs and leaders[root] == point:
                settled[point] = self._leading(point, self.specs[root], leaders)
            else:
                settled[point] = quantizer.SharedQuantizationSpec(
                    leaders[root] if root in self.specs else root
                )
        return settled

    def _leading(self, point: EdgeOrNode, spec: Spec, leaders: Mapping[EdgeOrNode, EdgeOrNode]) -> Spec:
        if not isinstance(spec, quantizer.DerivedQuantizationSpec):
            return spec
        sources = []
        for source in references(spec):
            leader = leaders.get(self._root(source), source)
            if source in self.specs and self._position(leader) > self._position(point):
                raise AnnotationError.of("TQ943.derived", place=shown(point), source=shown(source))
            sources.append(leader)
        return dataclasses.replace(spec, derived_from=sources)

    def _root(self, point: EdgeOrNode) -> EdgeOrNode:
        """Follow shared specs from ``point`` to the first point that has its own spec, or none."""
        seen: set[EdgeOrNode] = set()
        while point not in seen and isinstance(self.specs.get(point), quantizer.SharedQuantizationSpec):
            seen.add(point)
            (point,) = references(self.specs[point])
        return point

    def _form(self, spec: Spec) -> Spec:
        """Return ``spec`` in the form used for comparison: each reference is replaced by its root."""
        return with_points(spec, lambda point: self._root(_referred(point)))

    def _position(self, point: EdgeOrNode) -> tuple[int, int, int, int]:
        """Return the key for graph order: edges into a node before its output, derived edges after their
        sources; else as arguments, in which order torchao reads the specs of a convolution it trains."""
        if isinstance(point, tuple):
            source, consumer = point
            if consumer not in self._inputs:
                inputs = map(canonical_source, consumer.all_input_nodes)
                self._inputs[consumer] = {item: index for index, item in enumerate(inputs)}
            return self._order[consumer], 0, self._depth(point), self._inputs[consumer][source]
        if isinstance(point, Output):
            getitems = getitems_of(point)
            place = self._order[getitems[0]] if getitems else self._order[point.node]
            return place, 1, point.index, 0
        return self._order[point], 1, 0, 0

    def _depth(self, point: EdgeOrNode) -> int:
        """Return the number of derived specs between ``point`` and observed values."""
        spec = self.specs.get(self._root(point))
        if not isinstance(spec, quantizer.DerivedQuantizationSpec):
            return 0
        return 1 + max((self._depth(source) for source in references(spec)), default=0)

    def _text_of(self, spec: Spec) -> str:
        if not isinstance(spec, quantizer.SharedQuantizationSpec):
            return described(spec)
        (source,) = references(spec)
        root = self.specs.get(self._root(source))
        of = f" ({described(root)})" if root is not None else ""
        return f"to share the observer of {shown(source)}{of}"


def described(spec: Any) -> str:
    """Return ``spec`` as text for messages: its kind and dtype."""
    dtype = getattr(spec, "dtype", None)
    return f"a {type(spec).__name__}" + (f" of {dtype_name(dtype)}" if dtype is not None else "")


def with_points(spec: Spec, point_for: Callable[[Any], Any]) -> Spec:
    """Return ``spec`` with ``point_for`` of every point it refers to."""
    if isinstance(spec, quantizer.SharedQuantizationSpec):
        return quantizer.SharedQuantizationSpec(point_for(spec.edge_or_node))
    if isinstance(spec, quantizer.DerivedQuantizationSpec):
        return dataclasses.replace(spec, derived_from=[point_for(point) for point in spec.derived_from])
    return spec


def _graphs_of(point: EdgeOrNode) -> set[Graph]:
    sources = point if isinstance(point, tuple) else (point,)
    return {(source.node if isinstance(source, Output) else source).graph for source in sources}
