"""PrepareCustomConfig and ConvertCustomConfig, objects or dicts -> frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import nn
from torch.ao.quantization.fx.custom_config import ConvertCustomConfig, FuseCustomConfig, PrepareCustomConfig
from torch.ao.quantization.quant_type import QuantType

from torchq_compat.errors import ConfigError, CustomModuleError
from torchq_compat.legacy.dict_forms import read_dict_form

__all__ = ["ConvertSettings", "PrepareSettings", "read_convert_custom_config", "read_prepare_custom_config"]

PREPARE_KEYS = (
    "standalone_module_name",
    "standalone_module_class",
    "float_to_observed_custom_module_class",
    "non_traceable_module_name",
    "non_traceable_module_class",
    "input_quantized_idxs",
    "output_quantized_idxs",
    "preserved_attributes",
)
CONVERT_KEYS = ("observed_to_quantized_custom_module_class", "preserved_attributes")
FUSE_KEYS = ("preserved_attributes",)

#: From classes to classes, apart for static, dynamic and weight-only QConfigs.
ClassMapping = Mapping[QuantType, Mapping[type[nn.Module], type[nn.Module]]]


@dataclass(frozen=True)
class PrepareSettings:
    """What a PrepareCustomConfig says, read once."""

    float_to_observed: ClassMapping
    kept_float_names: tuple[str, ...]
    kept_float_classes: tuple[type[nn.Module], ...]
    preserved_attributes: tuple[str, ...]
    input_quantized_indexes: tuple[int, ...] = ()
    output_quantized_indexes: tuple[int, ...] = ()


@dataclass(frozen=True)
class ConvertSettings:
    """What a ConvertCustomConfig says, read once."""

    observed_to_quantized: ClassMapping
    preserved_attributes: tuple[str, ...]


def read_prepare_custom_config(value: PrepareCustomConfig | dict[str, Any] | None) -> PrepareSettings:
    """Read the config once.

    Raises:
        ConfigError: wrong type, unknown dict key, or a setting this release does not carry over.
        CustomModuleError: an observed class without ``from_float``.
    """
    if isinstance(value, dict):
        value = read_dict_form("prepare_custom_config", value, PREPARE_KEYS, PrepareCustomConfig)
    if value is None:
        value = PrepareCustomConfig()
    if not isinstance(value, PrepareCustomConfig):
        raise ConfigError.wrong_type("prepare_custom_config", "a PrepareCustomConfig", value)
    _refuse_what_is_not_carried_over(value)
    mapping = _read_mapping("float_to_observed_mapping", value.float_to_observed_mapping, "from_float")
    return PrepareSettings(
        float_to_observed=mapping,
        kept_float_names=tuple(value.non_traceable_module_names),
        kept_float_classes=tuple(value.non_traceable_module_classes),
        preserved_attributes=tuple(value.preserved_attributes),
        input_quantized_indexes=tuple(value.input_quantized_indexes),
        output_quantized_indexes=tuple(value.output_quantized_indexes),
    )


def read_convert_custom_config(value: ConvertCustomConfig | dict[str, Any] | None) -> ConvertSettings:
    """Read the config once.

    Raises:
        ConfigError: wrong type or unknown dict key.
        CustomModuleError: a quantized class without ``from_observed``.
    """
    if isinstance(value, dict):
        value = read_dict_form("convert_custom_config", value, CONVERT_KEYS, ConvertCustomConfig)
    if value is None:
        value = ConvertCustomConfig()
    if not isinstance(value, ConvertCustomConfig):
        raise ConfigError.wrong_type("convert_custom_config", "a ConvertCustomConfig", value)
    mapping = _read_mapping(
        "observed_to_quantized_mapping", value.observed_to_quantized_mapping, "from_observed"
    )
    return ConvertSettings(
        observed_to_quantized=mapping,
        preserved_attributes=tuple(value.preserved_attributes),
    )


def read_fuse_custom_config(value: FuseCustomConfig | dict[str, Any] | None) -> tuple[str, ...]:
    """The preserved attributes of a FuseCustomConfig, the only thing it says."""
    if isinstance(value, dict):
        value = read_dict_form("fuse_custom_config", value, FUSE_KEYS, FuseCustomConfig)
    if value is None:
        return ()
    if not isinstance(value, FuseCustomConfig):
        raise ConfigError.wrong_type("fuse_custom_config", "a FuseCustomConfig", value)
    return tuple(value.preserved_attributes)


def _read_mapping(setting: str, mapping: ClassMapping, method: str) -> ClassMapping:
    for found in (cls for classes in mapping.values() for cls in classes.values()):
        _check_method(setting, found, method)
    return MappingProxyType({kind: MappingProxyType(dict(classes)) for kind, classes in mapping.items()})


def _check_method(mapping: str, found: type, method: str) -> None:
    if not callable(getattr(found, method, None)):
        raise CustomModuleError.missing_method(mapping, found, method)


def _refuse_what_is_not_carried_over(value: PrepareCustomConfig) -> None:
    refused = {
        "standalone modules": value.standalone_module_names or value.standalone_module_classes,
    }
    for setting, given in refused.items():
        if given:
            raise ConfigError.not_supported(
                f"prepare_custom_config: {setting}",
                "this release does not carry it to PT2E",
                "remove it from the config; quantize at the model's boundary in your own code for now.",
            )
