"""The specs that the outer graph has around one call of a custom module."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torchao.quantization.pt2e.quantizer import QuantizationSpec

__all__ = ["OpaqueBoundary"]


@dataclass(frozen=True)
class OpaqueBoundary:
    """The specs at the inputs and outputs of one call of a custom module.

    Attributes:
        input_specs: the spec of each flat input that arrives as floats; None if it is not observed.
        output_dtypes: the quantized dtype of each flat output that the module quantizes itself; None
            for floats.
        output_specs: the spec of each flat output that leaves as floats; None if it is not observed.
        accepted: quantized dtypes that an input may have besides that of its spec.
    """

    input_specs: tuple[QuantizationSpec | None, ...]
    output_dtypes: tuple[torch.dtype | None, ...]
    output_specs: tuple[QuantizationSpec | None, ...]
    accepted: frozenset[torch.dtype] = field(default=frozenset())

    @classmethod
    def floats(cls, inputs: int, outputs: int) -> OpaqueBoundary:
        """Return the boundary of a call with float inputs and outputs, none of which is observed."""
        return cls((None,) * inputs, (None,) * outputs, (None,) * outputs)
