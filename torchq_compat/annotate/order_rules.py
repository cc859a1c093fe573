"""Warnings about module_name_object_type_order rules that match no call, which FX ignores silently."""

from __future__ import annotations

from collections.abc import Iterator

from torchq_compat.annotate.source_partitions import SourcePartition
from torchq_compat.capture.unmatched_rules import type_name
from torchq_compat.config.qconfig_mappings import OrderRule, QConfigRules
from torchq_compat.support.decisions import Action, Decision

__all__ = ["decide_order_rules"]


def decide_order_rules(partitions: list[SourcePartition], rules: QConfigRules) -> Iterator[Decision]:
    """Yield a decision about each rule whose module makes no call of the rule's type, or too few.

    Rules about a module class that the module lacks are reported by ``capture.unmatched_rules``.
    """
    callers = {partition.caller for partition in partitions}
    for rule in rules.orders:
        calls = len({partition.call_index for partition in partitions if _is_about(rule, partition)})
        is_absent = not calls and not isinstance(rule.object_type, type) and rule.module_name in callers
        if is_absent or (calls and not 0 <= rule.index < calls):
            kind = type_name(rule.object_type)
            yield Decision(
                f"module_name_object_type_order ({rule.module_name!r}, {kind}, {rule.index})",
                "qconfig rule",
                Action.DROPPED,
                f"the code of that very module calls {kind} {calls} times; the index counts from 0"
                if calls
                else f"the code of that very module never calls {kind}",
                warn=True,
            )


def _is_about(rule: OrderRule, partition: SourcePartition) -> bool:
    return partition.caller == rule.module_name and rule.object_type in partition.origin.object_types
