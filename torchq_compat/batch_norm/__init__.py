"""Batch norm through the stages, behind six functions; no other package imports its modules directly.

- ``before_capture``: set a number in place of ``momentum=None``, which torch.export cannot capture.
- ``prepare``: let torchao fold what may be folded; for QAT, fuse as FX does; average cumulatively.
- ``convert``: fold the fused batch norms, and hide the others from torchao.
- ``freeze``: keep the statistics while the rest of the model trains.
- ``by_path``: return the paths of the batch norms before they are folded.
- ``describe``: yield the names of each batch norm's parameters, and the op it was fused with.
"""

from torchq_compat.batch_norm.cumulative import give_momentum as before_capture
from torchq_compat.batch_norm.nodes import batch_norms_by_path as by_path
from torchq_compat.batch_norm.parts import describe_batch_norms as describe
from torchq_compat.batch_norm.stages import convert, prepare
from torchq_compat.capture.training_modes import freeze_batch_norm as freeze

__all__ = ["before_capture", "by_path", "convert", "describe", "freeze", "prepare"]
