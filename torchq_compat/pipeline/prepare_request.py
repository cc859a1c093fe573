"""The arguments of ``prepare_fx`` or ``prepare_qat_fx`` as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torchao.quantization.pt2e.quantizer import Quantizer

from torchq_compat.config.backend_configs import BackendTable
from torchq_compat.config.custom_configs import PrepareSettings
from torchq_compat.config.qconfig_mappings import QConfigRules
from torchq_compat.custom_modules.registry import ObserveRequest

__all__ = ["PrepareRequest"]


@dataclass(frozen=True)
class PrepareRequest:
    """The arguments of ``prepare``, read and checked.

    Attributes:
        rules: the QConfigMapping; if ``quantizer`` is given, the default one, for custom modules alone.
        is_step: whether the model is the step of a loop, prepared by the rules of the model around it.
        unrolled_because: why loops over time stay as they are written; empty if they may be rolled.
        untraced_because: why modules of torch.nn that FX does not trace are one float call each; empty if
            they are traced.
        has_two_samples: whether each single sample of the example was doubled.
        quantizer: annotates everything but custom modules, in place of ``rules`` and ``backend``.
    """

    rules: QConfigRules
    quantizer: Quantizer | None
    example_inputs: tuple[Any, ...]
    settings: PrepareSettings
    backend: BackendTable
    dynamic_shapes: Any
    is_qat: bool
    is_step: bool = False
    unrolled_because: str = ""
    untraced_because: str = ""
    has_two_samples: bool = False

    def inside(self, inner: ObserveRequest) -> PrepareRequest:
        """Return the request for preparing a standalone module or the step of a loop."""
        if inner.example_inputs is not None:
            settings = replace(
                self.settings,
                input_quantized_indexes=(),
                output_quantized_indexes=(),
                preserved_attributes=(),
            )
            return replace(
                self,
                example_inputs=inner.example_inputs,
                settings=settings,
                dynamic_shapes=None,
                is_step=True,
            )
        standalone = inner.standalone
        assert standalone is not None
        return PrepareRequest(
            rules=standalone.rules or QConfigRules.of_global(inner.qconfig),
            quantizer=self.quantizer if standalone.rules is None else None,
            example_inputs=standalone.example_inputs,
            settings=standalone.settings,
            backend=standalone.backend or self.backend,
            dynamic_shapes=None,
            is_qat=self.is_qat,
        )
