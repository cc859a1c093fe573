"""Describe what the outer graph observes around one call of a custom module."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torchao.quantization.pt2e.quantizer import QuantizationSpec

__all__ = ["OpaqueBoundary"]


@dataclass(frozen=True)
class OpaqueBoundary:
    """The specs at the inputs and outputs of one call of a custom module.

    Attributes:
        input_specs: the spec for each flat input that comes in floats; None: not observed.
        output_dtypes: the quantized dtype of each flat output that the module quantizes itself; None
            for floats.
        output_specs: the spec for each flat output that comes out in floats; None: not observed.
        accepted: quantized dtypes that an input may come in besides that of its spec.
    """

    input_specs: tuple[QuantizationSpec | None, ...]
    output_dtypes: tuple[torch.dtype | None, ...]
    output_specs: tuple[QuantizationSpec | None, ...]
    accepted: frozenset[torch.dtype] = field(default=frozenset())

    @classmethod
    def floats(cls, inputs: int, outputs: int) -> OpaqueBoundary:
        """Make the boundary of a call with float inputs and outputs, of which none is observed."""
        return cls((None,) * inputs, (None,) * outputs, (None,) * outputs)
