"""Batch norm through the stages, behind six verbs; no other module looks inside this folder.

- ``before_capture``: give ``momentum=None`` a number, which torch.export can capture.
- ``prepare``: let torchao fold what may be folded, fuse the others for QAT as FX does, average cumulatively.
- ``convert``: fold what was fused, and keep the others out of torchao's sight.
- ``freeze``: keep the statistics while the rest trains.
- ``by_path``: tell where they are, before they are folded.
- ``describe``: tell the names of each one's parameters, and what it was fused with.
"""

from torchq_compat.batch_norm.cumulative import give_momentum as before_capture
from torchq_compat.batch_norm.nodes import batch_norms_by_path as by_path
from torchq_compat.batch_norm.parts import describe_batch_norms as describe
from torchq_compat.batch_norm.stages import convert, prepare
from torchq_compat.capture.training_modes import freeze_batch_norm as freeze

__all__ = ["before_capture", "by_path", "convert", "describe", "freeze", "prepare"]
