"""Points of a graph that can be observed, including outputs that do not have a node yet.

torchao names an output by its node and an edge by (producer, consumer). An output of an operator with several
outputs has one ``getitem`` node, several, or none; ``Output`` names the output in every case.
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
    raise AnnotationError(
        f"node {node.name!r} ({node.target}) carries no example value, so its outputs are not known.",
        hint="annotate a graph captured by torch.export, whose nodes have meta['val'].",
    )


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
        raise AnnotationError(
            f"{shown(canonical(source))} is not a positional input of node {node.name!r} ({node.target}).",
            hint="its inputs are: "
            + ", ".join(argument.name for argument in node.all_input_nodes)
            + ". torchao observes positional arguments only.",
        )


def getitems_of(output: Output) -> list[Node]:
    """Return the getitem nodes of ``output``, in graph order."""
    picked = [user for user in output.node.users if canonical(user) == output]
    return sorted(picked)


def node_at(source: Source) -> Node:
    """Return the node for ``source``; make its getitem if there is none, merge several into one."""
    if isinstance(source, Node):
        return source
    found = getitems_of(source)
    if not found:
        graph = source.node.graph
        with graph.inserting_after(source.node):
            getitem = graph.call_function(operator.getitem, (source.node, source.index))
        # Keep the metadata of the producer, as torch.export does for its getitems.
        origin = {key: value for key, value in source.node.meta.items() if key != Q_ANNOTATION_KEY}
        getitem.meta = {**origin, "val": source.node.meta["val"][source.index]}
        return getitem
    first, *duplicates = found
    for duplicate in duplicates:
        duplicate.replace_all_uses_with(first)
        duplicate.graph.erase_node(duplicate)
    return first


def shown(point: EdgeOrNode) -> str:
    """Return ``point`` as text for messages."""
    if isinstance(point, tuple):
        return f"the edge ({shown_source(point[0])} -> {point[1].name})"
    return shown_source(point) if isinstance(point, Output) else f"the output of {point.name}"


def shown_source(source: Source) -> str:
    """Return ``source`` as text for messages, as the user wrote it."""
    return f"output {source.index} of {source.node.name}" if isinstance(source, Output) else source.name


def _no_such_output(node: Node, index: int, count: int) -> AnnotationError:
    return AnnotationError(
        f"output {index} of node {node.name!r} ({node.target}) does not exist: it has {count}.",
        hint=f"outputs are numbered from 0 to {count - 1}.",
    )
