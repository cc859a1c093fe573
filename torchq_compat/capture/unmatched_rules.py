"""Rules of a QConfigMapping about modules that the model does not have: FX ignores them in silence."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from torchq_compat.decisions import Action, Decision
from torchq_compat.legacy.qconfig_mappings import QConfigRules

__all__ = ["decide_unmatched_rules"]


def decide_unmatched_rules(model: nn.Module, rules: QConfigRules) -> Iterator[Decision]:
    """Decisions about the rules by name that name nothing in ``model``."""
    paths = [path for path, _ in model.named_modules(remove_duplicate=False)]
    for name in rules.module_names:
        if name not in paths:
            yield _unmatched(f"module_name {name!r}")
    for pattern, _ in rules.module_name_regexes:
        if not any(pattern.match(path) for path in paths):
            yield _unmatched(f"module_name_regex {pattern.pattern!r}")
    for rule in rules.orders:
        if rule.module_name not in paths:
            yield _unmatched(f"module_name_object_type_order {rule.module_name!r}")


def _unmatched(rule: str) -> Decision:
    return Decision(rule, "qconfig rule", Action.DROPPED, "no module of the model has such a path")
