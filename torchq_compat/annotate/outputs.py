"""Specs for operators with several outputs, for any torchao Quantizer.

torchao's prepare silently drops the ``output_qspec`` of a node whose value is not a tensor (``chunk``,
``topk`` ...). ``annotate_outputs`` accepts one spec per output and writes each where prepare reads it: on the
``getitem`` node of the output.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY
from torchao.quantization.pt2e.quantizer.quantizer import QuantizationSpecBase as Spec

from torchq_compat.annotate import sharing
from torchq_compat.errors import AnnotationError
from torchq_compat.support import argument_checks
from torchq_compat.support.upstream import pytree

# Write settled specs into the annotations, where torchao's prepare reads them.


def write_specs(graph: Graph, specs: Mapping[sharing.EdgeOrNode, Spec | None]) -> None:
    """Write ``specs`` into the annotations of ``graph``, in their order, in which torchao makes observers.

    Args:
        specs: point -> spec, for every point of the graph that has one, and None for edges that are named
            without one.
    """
    # From here on getitems are made and merged: a node found earlier may have been erased.
    spelled = {
        point: None if spec is None else sharing.with_points(spec, sharing.point_at)
        for point, spec in specs.items()
    }
    for consumer in {point[1] for point in specs if isinstance(point, tuple)}:
        consumer.meta[Q_ANNOTATION_KEY].input_qspec_map = {}
    for point, spec in spelled.items():
        if isinstance(point, tuple):
            source, consumer = point
            consumer.meta[Q_ANNOTATION_KEY].input_qspec_map[sharing.node_at(source)] = spec
        else:
            annotation = sharing.node_at(point).meta.setdefault(Q_ANNOTATION_KEY, QuantizationAnnotation())
            annotation.output_qspec, annotation._annotated = spec, True
    for node in graph.nodes:
        annotation = node.meta.get(Q_ANNOTATION_KEY)
        if annotation is not None and sharing.has_several(node):
            annotation.output_qspec = None  # Each output has its own spec now.


# Annotate a node with one spec per output: check the specs, and write them where torchao reads them.


# An error about a spec names its point, so the specs are not checked here.
@argument_checks.checked_arguments(
    node=argument_checks.instance_of(Node, what="a torch.fx.Node"),
    input_specs=argument_checks.mapping_of(
        argument_checks.instance_of(Node, sharing.Output, what="a torch.fx.Node or Output"),
        argument_checks.ANYTHING,
    ),
    output_specs=argument_checks.sequence_of(argument_checks.ANYTHING),
    allow_implicit_sharing=argument_checks.FLAG,
)
def annotate_outputs(
    node: Node,
    input_specs: Mapping[Node | sharing.Output, Spec | None],
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
    by_point = _specs_of(node, input_specs, output_specs)
    table = sharing.SpecTable(node.graph)
    for point, spec in by_point.items():
        table.tell(point, spec)
    table.check_circles()
    settled = table.settled()
    annotation = node.meta.setdefault(Q_ANNOTATION_KEY, QuantizationAnnotation())
    annotation._annotated = True
    annotation.allow_implicit_sharing = allow_implicit_sharing
    write_specs(node.graph, settled)


def _specs_of(
    node: Node, input_specs: Mapping[Node | sharing.Output, Spec | None], output_specs: Sequence[Spec | None]
) -> dict[sharing.EdgeOrNode, Spec]:
    """Return the specs by point, each checked on its own."""
    values = sharing.output_values(node)
    if len(output_specs) != len(values):
        raise AnnotationError.of(
            "TQ943.count_of_specs", count=len(output_specs), node=node, outputs=len(values)
        )
    by_point: dict[sharing.EdgeOrNode, Spec] = {}
    spelled: dict[sharing.EdgeOrNode, sharing.Source] = {}
    for source, spec in input_specs.items():
        edge = sharing.canonical((source, node))
        sharing.check_input(node, source)
        if spec is None:
            continue
        if edge in by_point and by_point[edge] != _checked(edge, spec):
            raise AnnotationError.of(
                "TQ943.shares_two_ways",
                first=sharing.shown_source(spelled[edge]),
                second=sharing.shown_source(source),
                node=node,
            )
        by_point[edge] = _checked(edge, spec)
        spelled[edge] = source
    for index, spec in enumerate(output_specs):
        if spec is not None:
            point = sharing.canonical(sharing.Output(node, index))
            by_point[point] = _checked(point, spec)
    return by_point


def _checked(point: sharing.EdgeOrNode, spec: Spec) -> Spec:
    sharing.checked_value(point)
    return sharing.checked_spec(point, spec)


# Check every annotation of a graph, so that torchao either applies it or an error is raised.
#
# torchao's prepare silently drops an ``output_qspec`` on a node with several outputs, and a spec on an edge
# it does not observe; with an observer of torch.ao it quantizes nothing. A ``ComposableQuantizer`` does not
# call the ``validate`` of its quantizers. So the graph itself is checked, independent of the Quantizer.


@argument_checks.checked_arguments(model=argument_checks.instance_of(GraphModule))
def check_annotations(model: GraphModule) -> None:
    """Check every annotation of ``model`` and rewrite it in the form that torchao applies.

    Call it on an annotated graph, for example in ``Quantizer.validate``. ``prepare_fx`` and
    ``prepare_qat_fx`` call it themselves for every Quantizer.

    - An ``output_qspec`` on an operator with several outputs moves to the outputs: a single spec to every
      float output, a sequence one by one, with None for an output without a spec.
    - Observers and fake-quantizes of torch.ao become torchao's, with the settings of their spec.
    - References are resolved: a spec may share with a point that is annotated later.

    Args:
        model: an annotated graph captured by torch.export; changed in place, unless there is an error.

    Raises:
        AnnotationError: torchao would drop a spec or could not apply it: it is for something that is not a
            float tensor or a positional input, not one per output, without a qscheme, with an observer that
            cannot be made, or the second at one point; or it refers to a point without a spec, in a circle,
            or, if derived, to a later point.

    Example:
        >>> import torch
        >>> from torchq_compat import check_annotations
        >>> class Halves(torch.nn.Module):
        ...     def forward(self, x):
        ...         return x.chunk(2)
        >>> graph = torch.export.export(Halves(), (torch.randn(4, 2),)).module()
        >>> check_annotations(graph)  # nothing is annotated, so nothing is wrong
    """
    for node in model.graph.nodes:
        _check_annotation(node)
    table = sharing.SpecTable(model.graph)
    for point in table.specs:
        sharing.checked_value(point)
    table.check_circles()
    table.check_observed()
    write_specs(model.graph, table.settled())


#: The name of ``check_annotations`` when it checked references only.
check_sharing = check_annotations


def _check_annotation(node: Node) -> None:
    """Refuse an annotation of ``node`` that no point of the graph corresponds to."""
    annotation = node.meta.get(Q_ANNOTATION_KEY)
    if annotation is None:
        return
    if not isinstance(annotation, QuantizationAnnotation):
        raise AnnotationError.of("TQ943.annotation_type", node=node, annotation=annotation)
    sources = [source for source, spec in annotation.input_qspec_map.items() if spec is not None]
    for source in sources:
        sharing.check_input(node, source)
    _check_keywords(node, is_annotated=bool(sources) or annotation.output_qspec is not None)
    is_known = isinstance(node.meta.get("val"), Tensor) or sharing.has_several(node)
    if annotation.output_qspec is not None and not is_known:
        raise AnnotationError.of("TQ943.not_a_tensor", node=node)


def _check_keywords(node: Node, *, is_annotated: bool) -> None:
    """Refuse an annotated node with a tensor passed by keyword, on which torchao fails with an assertion."""
    given = [
        name
        for name, value in node.kwargs.items()
        if any(isinstance(leaf, Node) for leaf in pytree.tree_leaves(value))
    ]
    if is_annotated and node.op == "call_function" and given:
        raise AnnotationError.of("TQ943.keywords", node=node, given=", ".join(given))
