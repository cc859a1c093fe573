"""Ops that were calibrated and stay float because ``convert_fx(qconfig_mapping=...)`` switches them off.

FX's rule: an observer is removed if neither the op before it nor any op behind it is still quantized.
"""

from __future__ import annotations

from dataclasses import replace

from torch.fx import GraphModule, Node

from torchq_compat.annotate.op_parameters import weight_of
from torchq_compat.annotate.op_records import op_record
from torchq_compat.config.qconfig_mappings import QConfigRules, same_qconfig
from torchq_compat.errors import ConfigError
from torchq_compat.graph.observed_graph import observer_nodes
from torchq_compat.support.decisions import Action, Decision

__all__ = ["decide_switched_off", "remove_observers", "with_switched_off"]

#: Label of an op -> the rule that switched it off.
SwitchedOff = dict[str, str]


def decide_switched_off(prepared: GraphModule, before: QConfigRules, after: QConfigRules) -> SwitchedOff:
    """Return the ops of ``prepared`` that had a QConfig under the rules ``before`` and have none under
    ``after``.

    Raises:
        ConfigError: ``after`` gives an op another QConfig, or switches a custom module off.
    """
    found: SwitchedOff = {}
    for node in prepared.graph.nodes:
        record = op_record(node)
        if record is None:
            continue
        was, now = record.select(before), record.select(after)
        if now.qconfig is None and was.qconfig is not None:
            if node.op == "call_module":
                raise ConfigError.not_supported(
                    f"convert_fx: qconfig_mapping: None for the custom module at "
                    f"{record.label!r} ({now.rule})",
                    "an observed custom module has no float form to go back to",
                    "set its qconfig to None in the mapping given to prepare_fx.",
                )
            found[record.label] = now.rule
        elif now.qconfig is not None and not same_qconfig(was.qconfig, now.qconfig):
            raise ConfigError(
                f"convert_fx: qconfig_mapping gives {record.label!r} another qconfig than prepare_fx did "
                f"({now.rule}).",
                hint="its observers were made for the one of prepare_fx; convert can only switch them off.",
            )
    return found


def remove_observers(prepared: GraphModule, switched_off: SwitchedOff) -> None:
    """Remove the observers from ``prepared`` that no quantized op needs any more."""

    def is_float(node: Node) -> bool:
        record = op_record(node)
        return node.op in ("placeholder", "output", "get_attr") or (
            record is not None and record.label in switched_off
        )

    for node, _ in list(observer_nodes(prepared)):
        source = node.args[0]
        assert isinstance(source, Node)
        # The producer of a weight does not count: in QAT the weight is computed from that of a batch norm.
        is_weight = any(weight_of(user) is node for user in node.users)
        neighbours = [*node.users] if is_weight else [source, *node.users]
        if all(is_float(neighbour) for neighbour in neighbours):
            node.replace_all_uses_with(source)
            prepared.graph.erase_node(node)
    prepared.delete_all_unused_submodules()
    prepared.recompile()


def with_switched_off(decisions: tuple[Decision, ...], switched_off: SwitchedOff) -> tuple[Decision, ...]:
    """Return ``decisions`` with the ops in ``switched_off`` as float."""
    return tuple(
        replace(
            decision,
            action=Action.FLOAT,
            reason=f"its qconfig is None in the mapping given to convert ({switched_off[decision.path]})",
        )
        if decision.node and decision.path in switched_off
        else decision
        for decision in decisions
    )
