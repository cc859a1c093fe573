"""Specs for operators with several outputs, for any torchao Quantizer.

torchao's prepare drops the ``output_qspec`` of a node whose value is no tensor (``chunk``, ``topk`` ...)
without a word. ``annotate_outputs`` takes one spec per output and puts each where prepare does look: on the
``getitem`` node that picks the output.
"""

from torchq_compat.errors import AnnotationError
from torchq_compat.multi_output.annotate_outputs import annotate_outputs
from torchq_compat.multi_output.check_annotations import check_annotations, check_sharing
from torchq_compat.multi_output.edges_and_nodes import Output

__all__ = ["AnnotationError", "Output", "annotate_outputs", "check_annotations", "check_sharing"]
