"""module_name_object_type_order beyond the last call: FX ignores it in silence, here it is an error."""

from __future__ import annotations

from torchq_compat.annotate.groups import OpGroup
from torchq_compat.errors import ConfigError
from torchq_compat.legacy.qconfig_mappings import OrderRule, QConfigRules

__all__ = ["check_order_rules"]


def check_order_rules(groups: list[OpGroup], rules: QConfigRules) -> None:
    """Refuse an index that no call has. A rule about what the module never calls says nothing and may stand,
    as in FX: configurations are written for many models.

    Raises:
        ConfigError: names the rule and the number of calls.
    """
    for rule in rules.orders:
        indices = [group.call_index for group in groups if _is_about(rule, group)]
        calls = max(indices, default=-1) + 1
        if rule.index < 0 or (calls and rule.index >= calls):
            kind = rule.object_type if isinstance(rule.object_type, str) else rule.object_type.__name__
            raise ConfigError.index_out_of_range(rule.module_name, kind, rule.index, calls)


def _is_about(rule: OrderRule, group: OpGroup) -> bool:
    return group.caller == rule.module_name and rule.object_type in group.origin.object_types
