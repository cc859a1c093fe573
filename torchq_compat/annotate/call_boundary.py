"""What the outer graph observes around one call of a custom module."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torchao.quantization.pt2e.quantizer import QuantizationSpec

__all__ = ["OpaqueBoundary"]


@dataclass(frozen=True)
class OpaqueBoundary:
    """What a custom-module call wants at its inputs and yields at its outputs.

    Attributes:
        input_specs: observes each flat input that arrives in floats; None leaves one alone.
        output_dtypes: the quantized dtype of each flat output that the module quantizes itself; None
            for floats.
        output_specs: observes each flat output behind the module; None leaves one alone.
        accepted: quantized dtypes an input may already have, apart from its spec's.
    """

    input_specs: tuple[QuantizationSpec | None, ...]
    output_dtypes: tuple[torch.dtype | None, ...]
    output_specs: tuple[QuantizationSpec | None, ...]
    accepted: frozenset[torch.dtype] = field(default=frozenset())

    @classmethod
    def floats(cls, inputs: int, outputs: int) -> OpaqueBoundary:
        """Nothing is observed."""
        return cls((None,) * inputs, (None,) * outputs, (None,) * outputs)
