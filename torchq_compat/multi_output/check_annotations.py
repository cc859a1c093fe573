"""Check every annotation of a graph, so that torchao either applies it or an error is raised.

torchao's prepare silently drops an ``output_qspec`` on a node with several outputs, and a spec on an edge it
does not observe; with an observer of torch.ao it quantizes nothing. A ``ComposableQuantizer`` does not call
the ``validate`` of its quantizers. So the graph itself is checked, independent of the Quantizer.
"""

from __future__ import annotations

from torch import Tensor
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from torchq_compat.errors import AnnotationError
from torchq_compat.multi_output.edges_and_nodes import check_input, has_several
from torchq_compat.multi_output.sharing import SpecTable
from torchq_compat.multi_output.spec_checks import checked_value
from torchq_compat.multi_output.write_specs import write_specs
from torchq_compat.support.argument_checks import checked_arguments, instance_of

__all__ = ["check_annotations", "check_sharing"]


@checked_arguments(model=instance_of(GraphModule))
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
    table = SpecTable(model.graph)
    for point in table.specs:
        checked_value(point)
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
        raise AnnotationError(
            f"the annotation of node {node.name!r} ({node.target}) is a {type(annotation).__name__}.",
            hint="write a torchao QuantizationAnnotation.",
        )
    told = [source for source, spec in annotation.input_qspec_map.items() if spec is not None]
    for source in told:
        check_input(node, source)
    _check_keywords(node, is_annotated=bool(told) or annotation.output_qspec is not None)
    is_known = isinstance(node.meta.get("val"), Tensor) or has_several(node)
    if annotation.output_qspec is not None and not is_known:
        raise AnnotationError(
            f"the output of {node.name} ({node.target}) has a spec, but is not a tensor.",
            hint="annotate a node whose meta['val'] is a tensor, or several; torchao drops other specs.",
        )


def _check_keywords(node: Node, *, is_annotated: bool) -> None:
    """Refuse an annotated node with a tensor passed by keyword, on which torchao fails with an assertion."""
    given = [name for name, value in node.kwargs.items() if _holds_node(value)]
    if is_annotated and node.op == "call_function" and given:
        raise AnnotationError(
            f"node {node.name!r} ({node.target}) is annotated and takes {', '.join(given)} by keyword.",
            hint="torchao observes positional arguments only: call the function with positional tensors.",
        )


def _holds_node(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return any(_holds_node(item) for item in value)
    return isinstance(value, Node)
