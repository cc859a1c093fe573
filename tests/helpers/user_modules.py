"""Custom modules as users write them, and their settings, shared by several tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.ao.nn.quantized as nnq
from torch import Tensor, nn
from torch.ao.quantization import (
    get_default_qconfig_mapping,
)
from torch.ao.quantization.fx.custom_config import ConvertCustomConfig, PrepareCustomConfig
from torch.ao.quantization.quant_type import QuantType
from torch.fx import GraphModule

import torchq_compat as tc
from tests.helpers.engines import with_exact_sums
from tests.helpers.lstm_flow import uniform
from tests.helpers.once import made_once
from tests.helpers.oracle import calibrate

MAPPING = get_default_qconfig_mapping("qnnpack")


def settings_for(
    float_class: type, observed: type, quantized: type, quant_type: QuantType = QuantType.STATIC
) -> tuple[PrepareCustomConfig, ConvertCustomConfig]:
    prepare, convert = PrepareCustomConfig(), ConvertCustomConfig()
    # The setter accepts only static mappings; FX reads the other kinds, too.
    prepare.float_to_observed_mapping[quant_type] = {float_class: observed}
    convert.observed_to_quantized_mapping[quant_type] = {observed: quantized}
    return prepare, convert


def by_ours(
    model: nn.Module, data: Sequence[tuple[Any, ...]], configs: tuple[Any, Any], mapping: Any = MAPPING
) -> tuple[GraphModule, GraphModule]:
    prepared = tc.prepare_fx(model, mapping, data[0], configs[0])
    calibrate(prepared, data)
    return prepared, tc.convert_fx(prepared, configs[1])


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class ObservedCustom(nn.Module):
    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)

    @classmethod
    def from_float(cls, module: nn.Module) -> nn.Module:
        assert hasattr(module, "qconfig")
        observed = cls(module.linear)
        observed.qconfig = module.qconfig
        return observed


class StaticCustom(nn.Module):
    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)

    @classmethod
    def from_observed(cls, observed: nn.Module) -> nn.Module:
        assert hasattr(observed, "qconfig")
        assert hasattr(observed, "activation_post_process")
        observed.linear.qconfig = observed.qconfig
        observed.linear.activation_post_process = observed.activation_post_process
        return cls(with_exact_sums(nnq.Linear.from_float(observed.linear)))


CLASSIC = settings_for(Custom, ObservedCustom, StaticCustom)


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.custom = Custom()
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.custom(self.linear(x)))


def rows(count: int = 8, size: int = 16, width: int = 3) -> list[tuple[Tensor]]:
    return [(uniform(2.0, size, width),) for _ in range(count)]


@made_once
def classic() -> tuple[nn.Module, tuple[Tensor], GraphModule, GraphModule]:
    """Return (float, arguments, prepared, converted) of the classic custom module in a model."""
    model, data = Around().eval(), rows()
    return model, data[0], *by_ours(model, data, CLASSIC)


def with_weights_of(made: nn.Module, module: nn.Module) -> nn.Module:
    state = module.state_dict()
    made.load_state_dict({name: state[name] for name in made.state_dict()})
    return made


def mirror(float_class: type[nn.Module], **attributes: Any) -> tuple[Any, Any]:
    """Return settings with classes that compute as ``float_class``; ``attributes``: the observed class's."""

    class Observed(float_class):  # type: ignore[valid-type, misc]
        @classmethod
        def from_float(cls, module: nn.Module) -> nn.Module:
            return with_weights_of(cls(), module)

    class Quantized(float_class):  # type: ignore[valid-type, misc]
        takes_floats = True

        @classmethod
        def from_observed(cls, module: nn.Module) -> nn.Module:
            return with_weights_of(cls(), module)

    for name, value in attributes.items():
        setattr(Observed, name, value)
    return settings_for(float_class, Observed, Quantized)


class Mixer(nn.Module):
    """Base of the modules below: a linear layer to mix in."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
