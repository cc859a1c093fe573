"""One spec per output: checked against the graph first, then written where torchao's prepare reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY
from torchao.quantization.pt2e.quantizer.quantizer import QuantizationSpecBase as Spec

from torchq_compat.errors import AnnotationError
from torchq_compat.multi_output.edges_and_nodes import (
    EdgeOrNode,
    Output,
    Source,
    canonical,
    canonical_source,
    has_several,
    node_at,
    output_values,
    shown,
)
from torchq_compat.multi_output.sharing import SpecTable, with_nodes
from torchq_compat.support.argument_checks import (
    ANYTHING,
    FLAG,
    checked_arguments,
    instance_of,
    mapping_of,
    sequence_of,
)
from torchq_compat.support.user_warnings import warn_user

__all__ = ["annotate_outputs", "check_sharing"]


# What is no spec is said by the name of its point.
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
    ``SharedQuantizationSpec(Output(node, 1))``, also from a point before it, and
    ``DerivedQuantizationSpec(derived_from=[(x, node), Output(node, 0)], ...)``. Sharing is transitive, and
    implicit for one tensor observed with equal settings, as torchao's prepare has it. An output that is not
    used gets a getitem node; several getitems of one output are merged. On an error the graph is unchanged.

    Args:
        node: of a graph captured by torch.export; with one output it is annotated like any node.
        input_specs: by input node; None, or leaving an input out, leaves it alone.
        output_specs: one per output, in order; None leaves it alone.
        allow_implicit_sharing: as in torchao's QuantizationAnnotation, for the inputs of ``node``.

    Raises:
        AnnotationError: a spec for what is no input, no output, or no float tensor; another spec at the same
            point; references that go round in a circle, or derive from a point that comes later.

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
    _write(settled)


@checked_arguments(model=instance_of(GraphModule))
def check_sharing(model: GraphModule) -> None:
    """Settle and check all specs of ``model``; call it in ``Quantizer.validate``.

    ``annotate_outputs`` lets a spec refer to a point that is annotated later, which may be by hand, with
    ``Output`` in the specs; here every reference must lead to a spec.

    Warns of an ``output_qspec`` on a node with several outputs, whoever wrote it: torchao drops it.

    Raises:
        AnnotationError: as ``annotate_outputs``, or a reference to a point without a spec.

    Args:
        model: captured by torch.export and annotated.

    Example:
        >>> import torch
        >>> from torchq_compat import check_sharing
        >>> check_sharing(torch.export.export(torch.nn.ReLU(), (torch.randn(3),)).module())
    """
    table = SpecTable(model.graph)
    table.check_circles()
    table.check_observed()
    _write(table.settled())
    for node in model.graph.nodes:
        annotation = node.meta.get(Q_ANNOTATION_KEY)
        if annotation is not None and annotation.output_qspec is not None and has_several(node):
            warn_user(
                f"node {node.name!r} ({node.target}) has several outputs, and torchao drops its "
                "output_qspec; give each output its spec with annotate_outputs."
            )


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
    for source, spec in input_specs.items():
        edge = canonical((source, node))
        _check_input(node, source)
        if spec is not None:
            told[edge] = _checked(edge, spec)
    for index, (spec, value) in enumerate(zip(output_specs, values, strict=True)):
        if spec is not None:
            point = canonical(Output(node, index))
            if not isinstance(value, Tensor):
                raise _not_quantizable(shown(point), f"a {type(value).__name__}")
            if not value.dtype.is_floating_point:
                raise _not_quantizable(shown(point), f"a tensor of {value.dtype}")
            told[point] = _checked(point, spec)
    return told


def _check_input(node: Node, source: Source) -> None:
    """torchao observes positional arguments, in nested lists too, and no keywords."""
    positional: set[EdgeOrNode] = set()
    map_arg(node.args, lambda argument: positional.add(canonical(argument)))
    if canonical(source) not in positional:
        raise AnnotationError(
            f"{shown(canonical(source))} is no positional input of node {node.name!r} ({node.target}).",
            hint="its inputs are: "
            + ", ".join(argument.name for argument in node.all_input_nodes)
            + ". torchao observes positional arguments only.",
        )


def _checked(point: EdgeOrNode, spec: Any) -> Spec:
    if not isinstance(spec, Spec):
        raise AnnotationError(
            f"the spec of {shown(point)} is a {type(spec).__name__}.",
            hint="use one of torchao's QuantizationSpec, FixedQParamsQuantizationSpec, "
            "SharedQuantizationSpec, DerivedQuantizationSpec, or None.",
        )
    return spec


def _write(specs: Mapping[EdgeOrNode, Spec]) -> None:
    """Put ``specs`` into the annotations, in their order; torchao goes by the order of an input map."""
    consumers = {point[1] for point in specs if isinstance(point, tuple)}
    left_alone = {consumer: _left_alone(consumer) for consumer in consumers}
    # From here on getitems are made and merged: a node read before may be gone.
    spelled = {point: with_nodes(spec, node_at) for point, spec in specs.items()}
    for consumer, sources in left_alone.items():
        consumer.meta[Q_ANNOTATION_KEY].input_qspec_map = {node_at(source): None for source in sources}
    for point, spec in spelled.items():
        if isinstance(point, tuple):
            source, consumer = point
            consumer.meta[Q_ANNOTATION_KEY].input_qspec_map[node_at(source)] = spec
        else:
            annotation = node_at(point).meta.setdefault(Q_ANNOTATION_KEY, QuantizationAnnotation())
            annotation.output_qspec, annotation._annotated = spec, True


def _left_alone(consumer: Node) -> list[Source]:
    """List the inputs of ``consumer`` that its annotation names without a spec."""
    inputs = consumer.meta[Q_ANNOTATION_KEY].input_qspec_map
    return [canonical_source(source) for source, spec in inputs.items() if spec is None]


def _not_quantizable(point: str, found: str) -> AnnotationError:
    return AnnotationError(
        f"{point} is {found}, which cannot be quantized.",
        hint="give None as its spec; only floating point tensors have qparams.",
    )
