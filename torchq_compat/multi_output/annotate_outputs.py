"""Annotate a node with one spec per output: check the specs, and write them where torchao reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.fx import Node
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY
from torchao.quantization.pt2e.quantizer.quantizer import QuantizationSpecBase as Spec

from torchq_compat.errors import AnnotationError
from torchq_compat.multi_output.edges_and_nodes import (
    EdgeOrNode,
    Output,
    Source,
    canonical,
    check_input,
    output_values,
    shown_source,
)
from torchq_compat.multi_output.sharing import SpecTable
from torchq_compat.multi_output.spec_checks import checked_spec, checked_value
from torchq_compat.multi_output.write_specs import write_specs
from torchq_compat.support.argument_checks import (
    ANYTHING,
    FLAG,
    checked_arguments,
    instance_of,
    mapping_of,
    sequence_of,
)

__all__ = ["annotate_outputs"]


# An error about a spec names its point, so the specs are not checked here.
@checked_arguments(
    node=instance_of(Node, what="a torch.fx.Node"),
    input_specs=mapping_of(instance_of(Node, Output, what="a torch.fx.Node or Output"), ANYTHING),
    output_specs=sequence_of(ANYTHING),
    allow_implicit_sharing=FLAG,
)
def annotate_outputs(
    node: Node,
    input_specs: Mapping[Node | Output, Spec | None],
    output_specs: Sequence[Spec | None],
    *,
    allow_implicit_sharing: bool = True,
) -> None:
    """Annotate ``node`` with one spec per input and one per output; call it in ``Quantizer.annotate``.

    Every kind of torchao spec works for an input and for an output, and may refer to an output:
    ``SharedQuantizationSpec(Output(node, 1))``, also from a point before that output, and
    ``DerivedQuantizationSpec(derived_from=[(x, node), Output(node, 0)], ...)``. Sharing is transitive, and
    implicit for one tensor observed with equal settings, as in torchao's prepare. An unused output gets a
    getitem node; several getitems of one output are merged. On an error the graph is unchanged.

    Args:
        node: a node of a graph captured by torch.export; it may also have a single output.
        input_specs: input node or ``Output`` -> spec; None, or leaving an input out, means no spec.
        output_specs: one spec per output, in order; None means no spec.
        allow_implicit_sharing: as in torchao's QuantizationAnnotation, for the inputs of ``node``.

    Raises:
        AnnotationError: a spec is for something that is not an input, an output or a float tensor; torchao
            cannot apply it, as in ``check_annotations``; its point has another spec already; references form
            a circle, or derive from a point that comes later.

    Example:
        >>> import torch
        >>> from torchao.quantization.pt2e.observer import MinMaxObserver
        >>> from torchao.quantization.pt2e.quantizer import QuantizationSpec, SharedQuantizationSpec
        >>> from torchq_compat import Output, annotate_outputs
        >>> class Halves(torch.nn.Module):
        ...     def forward(self, x):
        ...         first, second = x.chunk(2)
        ...         return first + second
        >>> graph = torch.export.export(Halves(), (torch.randn(4, 3),)).module().graph
        >>> (chunk,) = graph.find_nodes(op="call_function", target=torch.ops.aten.chunk.default)
        >>> int8 = QuantizationSpec(torch.int8, MinMaxObserver, -128, 127, torch.per_tensor_affine)
        >>> annotate_outputs(chunk, {chunk.args[0]: int8}, [int8, SharedQuantizationSpec(Output(chunk, 0))])
    """
    told = _told(node, input_specs, output_specs)
    table = SpecTable(node.graph)
    for point, spec in told.items():
        table.tell(point, spec)
    table.check_circles()
    settled = table.settled()
    annotation = node.meta.setdefault(Q_ANNOTATION_KEY, QuantizationAnnotation())
    annotation._annotated = True
    annotation.allow_implicit_sharing = allow_implicit_sharing
    write_specs(node.graph, settled)


def _told(
    node: Node, input_specs: Mapping[Node | Output, Spec | None], output_specs: Sequence[Spec | None]
) -> dict[EdgeOrNode, Spec]:
    """Return the specs by point, each checked on its own."""
    values = output_values(node)
    if len(output_specs) != len(values):
        raise AnnotationError(
            f"{len(output_specs)} output specs were given for node {node.name!r} ({node.target}), "
            f"which has {len(values)} outputs.",
            hint="give one spec per output, in order; None leaves an output alone.",
        )
    told: dict[EdgeOrNode, Spec] = {}
    spelled: dict[EdgeOrNode, Source] = {}
    for source, spec in input_specs.items():
        edge = canonical((source, node))
        check_input(node, source)
        if spec is None:
            continue
        if edge in told and told[edge] != _checked(edge, spec):
            raise AnnotationError(
                f"{shown_source(spelled[edge])} and {shown_source(source)} are the same input of node "
                f"{node.name!r} ({node.target}), and have different specs.",
                hint="leave one of the two out: getitems of one output carry the same tensor.",
            )
        told[edge] = _checked(edge, spec)
        spelled[edge] = source
    for index, spec in enumerate(output_specs):
        if spec is not None:
            point = canonical(Output(node, index))
            told[point] = _checked(point, spec)
    return told


def _checked(point: EdgeOrNode, spec: Spec) -> Spec:
    checked_value(point)
    return checked_spec(point, spec)
