"""The constructors that observe the parts of a module: those given for groups, and the defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torchao.quantization.pt2e.quantizer import QuantizationSpec

from torchq_compat.custom_modules.parts.part import Part, PartKind
from torchq_compat.qspecs.observers import (
    ObserverConstructor,
    fixed_qparams_constructor,
    translate_constructor,
)
from torchq_compat.qspecs.quantization_specs import OpSpecs, make_spec
from torchq_compat.qspecs.weight_observers import WeightConstructor
from torchq_compat.support.dtypes import dtype_range, is_integer

__all__ = ["DynamicPartSpecs", "FloatPartSpecs", "PartConstructors", "PartSpecs"]


@dataclass(frozen=True)
class PartConstructors:
    """Observer or fake-quantize constructors by group of parts; groups left out follow the QConfig."""

    by_group: dict[str, ObserverConstructor] = field(default_factory=dict)

    @classmethod
    def from_legacy(cls, **legacy: Any) -> PartConstructors:
        """Translate ``group=constructor`` pairs; None leaves a group out.

        Raises:
            ConfigError: if a value is not a constructor; names its group.
        """
        return cls(
            {
                group: translate_constructor(constructor, f"{group}_obs_ctr")
                for group, constructor in legacy.items()
                if constructor is not None
            }
        )


@dataclass(frozen=True)
class PartSpecs:
    """The specs of every edge of a graph of parts, from one QConfig and the user's constructors.

    Attributes:
        op_specs: the specs of the module's QConfig.
        constructors: the user's constructors for groups of parts.
    """

    op_specs: OpSpecs
    constructors: PartConstructors = PartConstructors()

    def output_constructor(self, part: Part) -> ObserverConstructor:
        """Return the constructor that observes the output of ``part``.

        Default: the QConfig's activation. Sigmoid, its complement and tanh have FX's fixed qparams, which
        divide [0, 1) and [-1, 1) by the number of integers of the dtype: scales 1/256 and 2/256 for 8 bits.
        """
        given = self.constructors.by_group.get(part.group)
        if given is not None:
            return given
        if part.kind in (PartKind.SIGMOID, PartKind.COMPLEMENT, PartKind.TANH):
            return self._fixed_constructor(part.kind)
        return self.op_specs.activation_constructor

    def output_spec(self, part: Part) -> QuantizationSpec | None:
        """Return the spec for the output of ``part``; None if it stays float, because its constructor has a
        float dtype."""
        return _spec_of_integers(self.output_constructor(part))

    def input_spec(self, part: Part) -> QuantizationSpec | None:
        """Return the spec for the input of ``part`` if it is observed separately from its producer's output;
        else None."""
        given = self.constructors.by_group.get(part.input_group or "")
        return None if given is None else _spec_of_integers(given)

    def linear_input_spec(self, input_dtype: torch.dtype | None) -> QuantizationSpec | None:
        """Return the spec for the input of a linear: None if it has the QConfig's activation dtype already;
        else it is quantized again."""
        if input_dtype == self.op_specs.activation_dtype:
            return None
        return self.op_specs.activation

    def group_dtype(self, group: str) -> torch.dtype:
        """Return the dtype of the parts of ``group``, which is a float dtype if they stay float."""
        given = self.constructors.by_group.get(group)
        return given.settings.dtype if given is not None else self.op_specs.activation_dtype

    def weight_spec(self) -> QuantizationSpec | None:
        given = self.constructors.by_group.get("weight")
        if given is None:
            return self.op_specs.weight
        return make_spec(given if given.settings.is_fake_quantize else WeightConstructor(given))

    def _fixed_constructor(self, kind: PartKind) -> ObserverConstructor:
        activation = self.op_specs.activation_constructor.settings
        low, high = dtype_range(activation.dtype)
        levels = high - low + 1
        scale, zero_point = (2 / levels, low + levels // 2) if kind is PartKind.TANH else (1 / levels, low)
        return fixed_qparams_constructor(
            scale, zero_point, activation.dtype, fake_quantize=activation.is_fake_quantize
        )


def _spec_of_integers(constructor: ObserverConstructor) -> QuantizationSpec | None:
    return make_spec(constructor) if is_integer(constructor.settings.dtype) else None


class FloatPartSpecs(PartSpecs):
    """The specs of a module without a QConfig: nothing is observed."""

    def output_spec(self, part: Part) -> QuantizationSpec | None:
        return None

    def input_spec(self, part: Part) -> QuantizationSpec | None:
        return None

    def linear_input_spec(self, input_dtype: torch.dtype | None) -> QuantizationSpec | None:
        return None

    def weight_spec(self) -> QuantizationSpec | None:
        return None

    def group_dtype(self, group: str) -> torch.dtype:
        return torch.float32


class DynamicPartSpecs(PartSpecs):
    """The specs of a dynamic QConfig: linears quantize their inputs at run time; nothing else is quantized.

    Like ``torch.ao.nn.quantized.dynamic``, where float16 means half-precision weights and float activations.
    """

    def output_spec(self, part: Part) -> QuantizationSpec | None:
        return None

    def input_spec(self, part: Part) -> QuantizationSpec | None:
        return None

    def linear_input_spec(self, input_dtype: torch.dtype | None) -> QuantizationSpec | None:
        return self.op_specs.activation if is_integer(self.op_specs.activation_dtype) else None
