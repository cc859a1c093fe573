"""Read a QConfigMapping or its dict form into ``QConfigRules``, and select the QConfig of an op by FX's
five levels.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from torchq_compat.errors import ConfigError
from torchq_compat.read.old_forms import read_config
from torchq_compat.support import argument_checks
from torchq_compat.support.torch_ao import QConfig, QConfigMapping, qconfig_equals

# Read a QConfigMapping or its dict form into ``QConfigRules``, the same rules as a frozen value.


#: An object type as FX defines it: a module class, a function, or the name of a tensor method.
ObjectType = type | Callable[..., Any] | str

SETTING = "qconfig_mapping"
#: What is given in its place by mistake -> the text of TQ910 about it.
MISTAKEN_FOR_MAPPINGS: dict[type | tuple[type, ...], str] = {
    QConfig: "qconfig",
    str: "name",
    nn.Module: "model",
    (tuple, list, torch.Tensor): "example",
}
DICT_KEYS = ("", "object_type", "module_name_regex", "module_name", "module_name_object_type_order")

OBJECT_TYPE = argument_checks.Expected(
    "a class, a function or a name", lambda value: isinstance(value, str) or callable(value)
)
ORDER = argument_checks.Expected(
    "(module name, object type, index)",
    lambda value: (
        isinstance(value, tuple)
        and len(value) == 3
        and isinstance(value[0], str)
        and OBJECT_TYPE.accepts(value[1])
        and argument_checks.INDEX.accepts(value[2])
    ),
)
#: The expected types of keys that torch.ao's setters do not check. QConfigs are checked later, one by one.
ENTRIES = {
    "object_type_qconfigs": argument_checks.mapping_of(OBJECT_TYPE, argument_checks.ANYTHING),
    "module_name_regex_qconfigs": argument_checks.mapping_of(
        argument_checks.instance_of(str), argument_checks.ANYTHING
    ),
    "module_name_qconfigs": argument_checks.mapping_of(
        argument_checks.instance_of(str), argument_checks.ANYTHING
    ),
    "module_name_object_type_order_qconfigs": argument_checks.mapping_of(ORDER, argument_checks.ANYTHING),
}


@dataclass(frozen=True)
class OrderRule:
    """One ``module_name_object_type_order`` entry: the ``index``-th call of a type inside a module."""

    module_name: str
    object_type: ObjectType
    index: int
    qconfig: QConfig | None


@dataclass(frozen=True)
class QConfigRules:
    """The five levels of a QConfigMapping. A QConfig of None means "keep float" at every level."""

    global_qconfig: QConfig | None
    object_types: Mapping[ObjectType, QConfig | None]
    module_name_regexes: tuple[tuple[re.Pattern[str], QConfig | None], ...]
    module_names: Mapping[str, QConfig | None]
    orders: tuple[OrderRule, ...]
    #: What to name in place of the level, by module name.
    sources: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_global(cls, qconfig: QConfig) -> QConfigRules:
        """Return rules with one QConfig for everything."""
        return read_qconfig_mapping(QConfigMapping().set_global(qconfig))

    @property
    def levels(self) -> dict[str, Mapping[Any, QConfig | None]]:
        """The QConfigs that have a key: by level, by key."""
        regexes = {pattern.pattern: qconfig for pattern, qconfig in self.module_name_regexes}
        types, names = self.object_types, self.module_names
        return {"object_type": types, "module_name": names, "module_name_regex": regexes}

    @property
    def named(self) -> tuple[tuple[str, QConfig | None], ...]:
        """(name of the rule, QConfig), those of ``orders`` last."""
        return (
            ("the global entry", self.global_qconfig),
            *(
                (f"{level} {key!r}", item)
                for level, items in self.levels.items()
                for key, item in items.items()
            ),
            *((f"module_name_object_type_order {rule.module_name!r}", rule.qconfig) for rule in self.orders),
        )

    @property
    def qconfigs(self) -> tuple[QConfig | None, ...]:
        """All QConfigs, those of ``orders`` last."""
        return tuple(qconfig for _, qconfig in self.named)


def read_qconfig_mapping(value: QConfigMapping | dict[str, Any]) -> QConfigRules:
    """Read the mapping once.

    Raises:
        ConfigError: neither a QConfigMapping nor a dict; an unknown key; a regular expression that does
            not compile; a value that is not a QConfig.
    """
    for kinds, mistake in MISTAKEN_FOR_MAPPINGS.items():
        if isinstance(value, kinds):
            raise ConfigError.of(f"TQ910.{mistake}_for_mapping", value=value)
    if value is None:
        raise ConfigError.wrong_type(SETTING, "a QConfigMapping", value)
    value = read_config(SETTING, value, DICT_KEYS, QConfigMapping, ENTRIES)
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
    for name, qconfig in rules.named:
        if qconfig is not None and not isinstance(qconfig, QConfig):
            raise ConfigError.wrong_type(f"{SETTING}: {name}", "a QConfig or None", qconfig)
    return rules


def check_convert_rules(prepare: QConfigRules, convert: QConfigRules) -> None:
    """Refuse a convert mapping that differs from the prepare mapping otherwise than by QConfigs of None.

    Raises:
        ConfigError: as in FX, for another global QConfig, for a key that is missing, and for a key with
            another QConfig.
    """
    if not qconfig_equals(prepare.global_qconfig, convert.global_qconfig):
        raise _other_mapping_at_convert("the global qconfig is another")
    for level, before in prepare.levels.items():
        after = convert.levels[level]
        for key, qconfig in before.items():
            if key not in after:
                raise _other_mapping_at_convert(f"{level} {key!r} is missing")
            if after[key] is not None and not qconfig_equals(qconfig, after[key]):
                raise _other_mapping_at_convert(f"{level} {key!r} has another qconfig")


def _compile(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as cause:
        raise ConfigError.of("TQ910.pattern", pattern=pattern, cause=cause) from cause


def _other_mapping_at_convert(difference: str) -> ConfigError:
    return ConfigError.of("TQ910.other_mapping", difference=difference)


# Select the QConfig that applies: FX's five levels, in FX's order of precedence.
#
# global < object type < module name regex < module name < call order of a type inside a module.


@dataclass(frozen=True)
class Selection:
    """A QConfig and a description of the rule it came from."""

    qconfig: QConfig | None
    rule: str


def select_for_module(
    rules: QConfigRules, module_type: type[nn.Module], path: str, call_index: int = 0
) -> Selection:
    """Select for a module that FX keeps as one node; ``call_index`` counts the calls of its type in the
    parent module."""
    everything = Selection(rules.global_qconfig, rules.sources.get("", "global"))
    selection = _by_object_type(rules, (module_type,), everything)
    selection = _by_name(rules, path, selection)
    return _by_order(rules, path.rpartition(".")[0], (module_type,), call_index, selection)


def select_for_function(
    rules: QConfigRules,
    object_types: Iterable[ObjectType],
    scope_type: type[nn.Module],
    scope_path: str,
    call_index: int = 0,
) -> Selection:
    """Select for a function or method called in the code of the module at ``scope_path``."""
    types = tuple(object_types)
    selection = _by_object_type(rules, types, Selection(rules.global_qconfig, "global"))
    selection = _by_object_type(rules, (scope_type,), selection)
    selection = _by_name(rules, scope_path, selection)
    return _by_order(rules, scope_path, types, call_index, selection)


def _by_object_type(rules: QConfigRules, types: Iterable[ObjectType], fallback: Selection) -> Selection:
    for object_type in types:
        if object_type in rules.object_types:
            name = object_type if isinstance(object_type, str) else object_type.__name__
            return Selection(rules.object_types[object_type], f"object_type {name}")
    return fallback


def _by_name(rules: QConfigRules, path: str, fallback: Selection) -> Selection:
    """Select by module name: the nearest named ancestor wins over a regular expression."""
    name = path
    while name:
        if name in rules.module_names:
            return Selection(rules.module_names[name], rules.sources.get(name, f"module_name {name!r}"))
        name = name.rpartition(".")[0]
    for pattern, qconfig in rules.module_name_regexes:
        if pattern.match(path):
            return Selection(qconfig, f"module_name_regex {pattern.pattern!r}")
    return fallback


def _by_order(
    rules: QConfigRules, parent: str, types: Iterable[ObjectType], call_index: int, fallback: Selection
) -> Selection:
    candidates = tuple(types)
    for rule in rules.orders:
        if rule.module_name == parent and rule.index == call_index and rule.object_type in candidates:
            return Selection(rule.qconfig, f"module_name_object_type_order {parent!r} #{call_index}")
    return fallback
