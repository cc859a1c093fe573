"""QConfigMapping or its dict form -> ``QConfigRules``, the same rules as a frozen value."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch.ao.quantization import QConfig, QConfigMapping

from torchq_compat.errors import ConfigError
from torchq_compat.legacy.dict_forms import read_dict_form

__all__ = ["ObjectType", "OrderRule", "QConfigRules", "read_qconfig_mapping"]

#: What FX calls an object type: a module class, a function, or the name of a tensor method.
ObjectType = type | Callable[..., Any] | str

SETTING = "qconfig_mapping"
DICT_KEYS = ("", "object_type", "module_name_regex", "module_name", "module_name_object_type_order")


@dataclass(frozen=True)
class OrderRule:
    """One ``module_name_object_type_order`` entry: the ``index``-th call of a type inside a module."""

    module_name: str
    object_type: ObjectType
    index: int
    qconfig: QConfig | None


@dataclass(frozen=True)
class QConfigRules:
    """The five levels of a QConfigMapping. A value of None anywhere means "keep float"."""

    global_qconfig: QConfig | None
    object_types: Mapping[ObjectType, QConfig | None]
    module_name_regexes: tuple[tuple[re.Pattern[str], QConfig | None], ...]
    module_names: Mapping[str, QConfig | None]
    orders: tuple[OrderRule, ...]

    @classmethod
    def of_global(cls, qconfig: QConfig) -> QConfigRules:
        """One QConfig for everything."""
        return read_qconfig_mapping(QConfigMapping().set_global(qconfig))


def read_qconfig_mapping(value: QConfigMapping | dict[str, Any] | None) -> QConfigRules:
    """Read the mapping once.

    Raises:
        ConfigError: neither a QConfigMapping nor a dict; an unknown key; a regular expression that does
            not compile; a value that is not a QConfig.
    """
    if value is None:
        value = QConfigMapping()
    if isinstance(value, dict):
        value = read_dict_form(SETTING, value, DICT_KEYS, QConfigMapping)
    if not isinstance(value, QConfigMapping):
        raise ConfigError.wrong_type(SETTING, "a QConfigMapping", value)
    rules = QConfigRules(
        global_qconfig=value.global_qconfig,
        object_types=MappingProxyType(dict(value.object_type_qconfigs)),
        module_name_regexes=tuple(
            (_compile(pattern), qconfig) for pattern, qconfig in value.module_name_regex_qconfigs.items()
        ),
        module_names=MappingProxyType(dict(value.module_name_qconfigs)),
        orders=tuple(
            OrderRule(*key, qconfig) for key, qconfig in value.module_name_object_type_order_qconfigs.items()
        ),
    )
    _check_values(rules)
    return rules


def _compile(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as cause:
        raise ConfigError.bad_regex(pattern, cause) from cause


def _check_values(rules: QConfigRules) -> None:
    named = [
        ("the global entry", rules.global_qconfig),
        *((f"object_type {key!r}", qconfig) for key, qconfig in rules.object_types.items()),
        *((f"module_name_regex {key.pattern!r}", qconfig) for key, qconfig in rules.module_name_regexes),
        *((f"module_name {key!r}", qconfig) for key, qconfig in rules.module_names.items()),
        *((f"module_name_object_type_order {rule.module_name!r}", rule.qconfig) for rule in rules.orders),
    ]
    for name, qconfig in named:
        if qconfig is not None and not isinstance(qconfig, QConfig):
            raise ConfigError.wrong_type(f"{SETTING}: {name}", "a QConfig or None", qconfig)
