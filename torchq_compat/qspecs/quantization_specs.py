"""Translate a QConfig to the torchao QuantizationSpecs of one op: activation and weight.

A legacy QConfig has one activation constructor for inputs and outputs. Its meaning depends on its dtype: a
float placeholder quantizes nothing, ``is_dynamic`` quantizes only inputs, and any other activation is static.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torchao.quantization.pt2e.quantizer import QuantizationSpec

from torchq_compat.qspecs.contradictions import check_settings
from torchq_compat.qspecs.observers import ObserverConstructor, translate_constructor
from torchq_compat.qspecs.weight_observers import WeightConstructor
from torchq_compat.support.dtypes import is_integer
from torchq_compat.support.torch_ao import QConfig, QuantType

__all__ = ["OpSpecs", "make_spec"]


def make_spec(constructor: ObserverConstructor | WeightConstructor) -> QuantizationSpec:
    """Return the spec whose observers ``constructor`` makes.

    Raises:
        ConfigError: the settings of ``constructor`` contradict each other.
    """
    settings = constructor.settings
    check_settings(settings, constructor.setting)
    return QuantizationSpec(
        dtype=settings.dtype,
        observer_or_fake_quant_ctr=constructor,
        quant_min=settings.quant_min,
        quant_max=settings.quant_max,
        qscheme=settings.qscheme,
        ch_axis=settings.ch_axis,
        is_dynamic=settings.is_dynamic,
    )


@dataclass(frozen=True)
class OpSpecs:
    """The specs of one QConfig; a spec is None if the QConfig does not quantize it."""

    qconfig: QConfig

    @cached_property
    def activation_constructor(self) -> ObserverConstructor:
        return translate_constructor(self.qconfig.activation, "qconfig.activation")

    @cached_property
    def weight_constructor(self) -> ObserverConstructor:
        return translate_constructor(self.qconfig.weight, "qconfig.weight")

    @cached_property
    def activation(self) -> QuantizationSpec | None:
        """The spec of inputs, and of outputs unless the QConfig is dynamic."""
        constructor = self.activation_constructor
        return make_spec(constructor) if _quantizes(constructor.settings.dtype) else None

    @cached_property
    def weight(self) -> QuantizationSpec | None:
        constructor = self.weight_constructor
        if not _quantizes(constructor.settings.dtype):
            return None
        if constructor.settings.is_fake_quantize:
            return make_spec(constructor)
        return make_spec(WeightConstructor(constructor))

    @cached_property
    def computed_weight(self) -> QuantizationSpec:
        """The spec of a weight that the model computes: observed in every call, not once at convert."""
        return make_spec(self.weight_constructor)

    @property
    def activation_dtype(self) -> torch.dtype:
        return self.activation_constructor.settings.dtype

    @property
    def weight_dtype(self) -> torch.dtype:
        return self.weight_constructor.settings.dtype

    @property
    def declared_weight_dtype(self) -> torch.dtype:
        """The weight dtype that the QConfig gives: to a backend, quint4x2 differs from uint8."""
        return self.weight_constructor.settings.declared_dtype

    @property
    def reuses_input(self) -> bool:
        return self.activation_constructor.settings.reuses_input

    @property
    def is_dynamic(self) -> bool:
        return self.activation_constructor.settings.is_dynamic

    @property
    def quant_type(self) -> QuantType:
        """The quantization type whose mapping of a custom config applies."""
        if self.is_static:
            return QuantType.STATIC
        return QuantType.DYNAMIC if self.is_dynamic else QuantType.WEIGHT_ONLY

    @property
    def is_static(self) -> bool:
        """Whether activations are quantized with qparams known after calibration."""
        return is_integer(self.activation_dtype) and not self.is_dynamic


def _quantizes(dtype: torch.dtype) -> bool:
    return is_integer(dtype) or dtype is torch.float16
