"""Read PrepareCustomConfig and ConvertCustomConfig, objects or dicts, into frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import nn

from torchq_compat.errors import ConfigError, CustomModuleError
from torchq_compat.read.backend_configs import BackendTable, read_backend_config
from torchq_compat.read.old_forms import read_config
from torchq_compat.read.qconfig_mappings import DICT_KEYS, QConfigRules, read_qconfig_mapping
from torchq_compat.support import argument_checks, torch_ao
from torchq_compat.support.user_warnings import warn_user

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

MODULE_CLASS = argument_checks.Expected(
    "a class of modules", lambda value: isinstance(value, type) and issubclass(value, nn.Module)
)
NAMES = argument_checks.names_of(argument_checks.instance_of(str))
CLASS_MAPPING = argument_checks.mapping_of(
    argument_checks.instance_of(torch_ao.QuantType),
    argument_checks.mapping_of(MODULE_CLASS, argument_checks.instance_of(type, what="a class")),
)
ENTRY = argument_checks.instance_of(torch_ao.StandaloneModuleConfigEntry)
#: The expected types of attributes that torch.ao's setters do not check. Indexes are checked at capture.
ENTRIES = {
    "float_to_observed_mapping": CLASS_MAPPING,
    "observed_to_quantized_mapping": CLASS_MAPPING,
    "non_traceable_module_names": NAMES,
    "non_traceable_module_classes": argument_checks.names_of(MODULE_CLASS),
    "preserved_attributes": NAMES,
    "input_quantized_indexes": argument_checks.names_of(argument_checks.ANYTHING),
    "output_quantized_indexes": argument_checks.names_of(argument_checks.ANYTHING),
    "standalone_module_names": argument_checks.mapping_of(argument_checks.instance_of(str), ENTRY),
    "standalone_module_classes": argument_checks.mapping_of(MODULE_CLASS, ENTRY),
}

#: Class -> class, separately for static, dynamic and weight-only QConfigs.
ClassMapping = Mapping[torch_ao.QuantType, Mapping[type[nn.Module], type[nn.Module]]]


@dataclass(frozen=True)
class StandaloneSettings:
    """The configuration of one standalone module; None for a setting that the model around it gives."""

    rules: QConfigRules | None
    example_inputs: tuple[Any, ...]
    settings: PrepareSettings
    backend: BackendTable | None


@dataclass(frozen=True)
class PrepareSettings:
    """The settings of a PrepareCustomConfig, as frozen values."""

    float_to_observed: ClassMapping
    kept_float_names: tuple[str, ...]
    kept_float_classes: tuple[type[nn.Module], ...]
    preserved_attributes: tuple[str, ...]
    input_quantized_indexes: tuple[int, ...] = ()
    output_quantized_indexes: tuple[int, ...] = ()
    standalone_names: Mapping[str, StandaloneSettings] = field(default_factory=dict)
    standalone_classes: Mapping[type[nn.Module], StandaloneSettings] = field(default_factory=dict)


@dataclass(frozen=True)
class ConvertSettings:
    """The settings of a ConvertCustomConfig, as frozen values."""

    observed_to_quantized: ClassMapping
    preserved_attributes: tuple[str, ...]


def read_prepare_custom_config(
    value: torch_ao.PrepareCustomConfig | dict[str, Any] | None,
) -> PrepareSettings:
    """Read the config once.

    Raises:
        ConfigError: wrong type, unknown dict key, or a setting that this release does not support.
        CustomModuleError: an observed class without ``from_float``.
    """
    setting = "prepare_custom_config"
    config = read_config(setting, value, PREPARE_KEYS, torch_ao.PrepareCustomConfig, ENTRIES)
    mapping = _read_mapping("float_to_observed_mapping", config.float_to_observed_mapping, "from_float")
    return PrepareSettings(
        float_to_observed=mapping,
        kept_float_names=tuple(config.non_traceable_module_names),
        kept_float_classes=tuple(config.non_traceable_module_classes),
        preserved_attributes=tuple(config.preserved_attributes),
        input_quantized_indexes=tuple(config.input_quantized_indexes),
        output_quantized_indexes=tuple(config.output_quantized_indexes),
        standalone_names=_read_standalone(config.standalone_module_names),
        standalone_classes=_read_standalone(config.standalone_module_classes),
    )


def read_convert_custom_config(
    value: torch_ao.ConvertCustomConfig | dict[str, Any] | None,
) -> ConvertSettings:
    """Read the config once.

    Raises:
        ConfigError: wrong type or unknown dict key.
        CustomModuleError: a quantized class without ``from_observed``.
    """
    # Some scripts give the qconfig dict to ``convert_fx`` too.
    if isinstance(value, dict) and value and set(value) <= set(DICT_KEYS):
        warn_user("TQ305")
        value = None
    if isinstance(value, torch_ao.QConfigMapping):
        raise ConfigError.of("TQ910.mapping_for_custom_config")
    setting = "convert_custom_config"
    config = read_config(setting, value, CONVERT_KEYS, torch_ao.ConvertCustomConfig, ENTRIES)
    mapping = _read_mapping(
        "observed_to_quantized_mapping", config.observed_to_quantized_mapping, "from_observed"
    )
    return ConvertSettings(
        observed_to_quantized=mapping, preserved_attributes=tuple(config.preserved_attributes)
    )


def read_fuse_custom_config(value: torch_ao.FuseCustomConfig | dict[str, Any] | None) -> tuple[str, ...]:
    """Return the preserved attributes of a FuseCustomConfig, its only setting."""
    config = read_config("fuse_custom_config", value, FUSE_KEYS, torch_ao.FuseCustomConfig, ENTRIES)
    return tuple(config.preserved_attributes)


def _read_mapping(setting: str, mapping: ClassMapping, method: str) -> ClassMapping:
    for cls in (cls for classes in mapping.values() for cls in classes.values()):
        if not callable(getattr(cls, method, None)):
            module, kind = cls.__module__, cls.__qualname__
            raise CustomModuleError.of(
                "TQ940.no_method", module=module, kind=kind, mapping=setting, method=method
            )
    return MappingProxyType({kind: MappingProxyType(dict(classes)) for kind, classes in mapping.items()})


def _read_standalone(entries: Mapping[Any, Any]) -> MappingProxyType[Any, StandaloneSettings]:
    settings = {
        key: StandaloneSettings(
            rules=None if entry.qconfig_mapping is None else read_qconfig_mapping(entry.qconfig_mapping),
            example_inputs=tuple(entry.example_inputs or ()),
            settings=read_prepare_custom_config(entry.prepare_custom_config),
            backend=None if entry.backend_config is None else read_backend_config(entry.backend_config),
        )
        for key, entry in entries.items()
    }
    return MappingProxyType(settings)
