"""Specs for operators with several outputs, for any torchao Quantizer.

torchao's prepare silently drops the ``output_qspec`` of a node whose value is not a tensor (``chunk``,
``topk`` ...). ``annotate_outputs`` accepts one spec per output and writes each where prepare reads it: on the
``getitem`` node of the output.
"""

from torchq_compat.errors import AnnotationError
from torchq_compat.multi_output.annotate_outputs import annotate_outputs
from torchq_compat.multi_output.check_annotations import check_annotations, check_sharing
from torchq_compat.multi_output.edges_and_nodes import Output

__all__ = ["AnnotationError", "Output", "annotate_outputs", "check_annotations", "check_sharing"]
