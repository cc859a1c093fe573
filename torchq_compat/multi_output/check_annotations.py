"""Every annotation of a graph, checked and settled: torchao does what is written there, or it is an error.

torchao's prepare drops an ``output_qspec`` on a node with several outputs, and a spec on an edge it does not
observe, without a word; observers of torch.ao it takes, and quantizes nothing. A ``ComposableQuantizer`` does
not call the ``validate`` of its quantizers. So the graph is looked at, whoever wrote on it.
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
    """Check every annotation of ``model`` and write it as torchao carries it out.

    Call it on an annotated graph, as in ``Quantizer.validate``. ``prepare_fx`` and ``prepare_qat_fx`` do it
    themselves, whatever the Quantizer.

    - An ``output_qspec`` on an operator with several outputs moves to its outputs: one spec to every float
      output, a sequence to one each, ``None`` in it leaves one alone.
    - Observers and fake-quantizes of torch.ao become torchao's, with the settings of their spec.
    - References are settled: a spec may share with a point that is annotated later.

    Args:
        model: a graph captured by torch.export, annotated; changed in place, unless there is an error.

    Raises:
        AnnotationError: a spec that torchao would drop or could not carry out: for what is no float tensor or
            no positional input, not one for each output, without a qscheme, with an observer that cannot be
            made, two at one point; a reference to a point without a spec, round in a circle, or a derived
            one to a later point.

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


#: The name it had when references were all it checked.
check_sharing = check_annotations


def _check_annotation(node: Node) -> None:
    """Refuse what no point of the graph stands for."""
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
            f"the output of {node.name} ({node.target}) has a spec, and is no tensor.",
            hint="annotate a node whose meta['val'] is a tensor, or several; torchao drops other specs.",
        )


def _check_keywords(node: Node, *, is_annotated: bool) -> None:
    """torchao fails with an assertion on an annotated node that is given a tensor by keyword."""
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
