"""Select the QConfig that applies: FX's five levels, in FX's order of precedence.

global < object type < module name regex < module name < call order of a type inside a module.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from torchq_compat.config.qconfig_mappings import ObjectType, QConfigRules
from torchq_compat.support.torch_ao import QConfig

__all__ = ["Selection", "select_for_function", "select_for_module"]


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
    selection = _by_object_type(rules, (module_type,), Selection(rules.global_qconfig, "global"))
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
            return Selection(rules.module_names[name], f"module_name {name!r}")
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
