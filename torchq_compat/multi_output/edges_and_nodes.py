"""Points of a graph that can be observed, whether or not a node stands for them yet.

torchao names an output by its node and an edge by (producer, consumer). An output of an operator with several
has no node of its own but a ``getitem``, several, or none; ``Output`` names it in every case.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from torchq_compat.errors import AnnotationError
from torchq_compat.support.argument_checks import INDEX, check_arguments, instance_of

__all__ = [
    "EdgeOrNode",
    "Output",
    "Source",
    "canonical",
    "canonical_source",
    "check_input",
    "float_outputs",
    "getitems_of",
    "has_several",
    "node_at",
    "output_values",
    "shown",
    "shown_source",
]


OUTPUT_FIELDS = {"node": instance_of(Node, what="a torch.fx.Node"), "index": INDEX}


@dataclass(frozen=True)
class Output:
    """Output ``index`` of ``node``. Stands for a node in SharedQuantizationSpec, DerivedQuantizationSpec and
    edges: ``SharedQuantizationSpec(Output(node, 1))``, ``SharedQuantizationSpec((Output(node, 0), reader))``.
    """

    node: Node
    index: int

    def __post_init__(self) -> None:
        check_arguments("Output", OUTPUT_FIELDS, vars(self))


Source = Output | Node
#: The output of a node, or an edge (what is read, the node that reads it).
EdgeOrNode = Source | tuple[Source, Node]


def output_values(node: Node) -> tuple[Any, ...]:
    """Return the example values of the outputs of ``node``.

    Raises:
        AnnotationError: it carries none.
    """
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        return tuple(value)
    if isinstance(value, Tensor):
        return (value,)
    raise AnnotationError(
        f"node {node.name!r} ({node.target}) carries no example value, so its outputs are not known.",
        hint="annotate a graph captured by torch.export, whose nodes have meta['val'].",
    )


def canonical(point: Any) -> EdgeOrNode:
    """Return ``point`` in the one form it is compared in: a getitem of a node's result becomes an ``Output``,
    the only output of a node the node itself.

    Raises:
        AnnotationError: no such output, or a node that was erased.
    """
    if isinstance(point, tuple):
        producer, consumer = point
        return canonical_source(producer), consumer
    return canonical_source(point)


def canonical_source(source: Source) -> Source:
    """Return ``canonical`` of what stands for a node."""
    if isinstance(source, Output):
        values = output_values(source.node)
        if not -len(values) <= source.index < len(values):
            raise _no_such_output(source.node, source.index, len(values))
        if isinstance(source.node.meta["val"], Tensor):
            return source.node
        return Output(source.node, source.index % len(values))
    if source._erased:
        raise AnnotationError(
            f"a spec refers to node {source.name!r}, which is no longer in the graph.",
            hint="refer to an output as Output(node, index): getitem nodes of the same output are merged.",
        )
    if source.target is operator.getitem:
        producer, index = source.args
        if isinstance(producer, Node) and isinstance(index, int) and has_several(producer):
            return Output(producer, index % len(producer.meta["val"]))
    return source


def has_several(node: Node) -> bool:
    """Return whether ``node`` has several outputs, as far as its example value tells."""
    return isinstance(node.meta.get("val"), (tuple, list))


def float_outputs(node: Node) -> list[Output]:
    """Those outputs of ``node``, which has several, that can be quantized."""
    return [
        Output(node, index)
        for index, value in enumerate(output_values(node))
        if isinstance(value, Tensor) and value.dtype.is_floating_point
    ]


def check_input(node: Node, source: Source) -> None:
    """Refuse an edge that torchao does not observe: it takes positional arguments, in nested lists too.

    Raises:
        AnnotationError: ``source`` is no positional argument of ``node``.
    """
    positional: set[EdgeOrNode] = set()
    map_arg(node.args, lambda argument: positional.add(canonical(argument)))
    if canonical(source) not in positional:
        raise AnnotationError(
            f"{shown(canonical(source))} is no positional input of node {node.name!r} ({node.target}).",
            hint="its inputs are: "
            + ", ".join(argument.name for argument in node.all_input_nodes)
            + ". torchao observes positional arguments only.",
        )


def getitems_of(output: Output) -> list[Node]:
    """Return the nodes that pick ``output``, in graph order."""
    picked = [user for user in output.node.users if canonical(user) == output]
    return sorted(picked)


def node_at(source: Source) -> Node:
    """Return the one node for ``source``: a missing getitem is made, several of one output are merged."""
    if isinstance(source, Node):
        return source
    found = getitems_of(source)
    if not found:
        graph = source.node.graph
        with graph.inserting_after(source.node):
            getitem = graph.call_function(operator.getitem, (source.node, source.index))
        # Where it came from, as the getitems have that torch.export writes.
        origin = {key: value for key, value in source.node.meta.items() if key != Q_ANNOTATION_KEY}
        getitem.meta = {**origin, "val": source.node.meta["val"][source.index]}
        return getitem
    first, *duplicates = found
    for duplicate in duplicates:
        duplicate.replace_all_uses_with(first)
        duplicate.graph.erase_node(duplicate)
    return first


def shown(point: EdgeOrNode) -> str:
    """Return ``point`` for people."""
    if isinstance(point, tuple):
        return f"the edge ({shown_source(point[0])} -> {point[1].name})"
    return shown_source(point) if isinstance(point, Output) else f"the output of {point.name}"


def shown_source(source: Source) -> str:
    """``source`` for people, as it was spelled."""
    return f"output {source.index} of {source.node.name}" if isinstance(source, Output) else source.name


def _no_such_output(node: Node, index: int, count: int) -> AnnotationError:
    return AnnotationError(
        f"output {index} of node {node.name!r} ({node.target}) does not exist: it has {count}.",
        hint=f"outputs are numbered from 0 to {count - 1}.",
    )
