"""Observers that the script replaced or removed after prepare: which of them count, as FX counts them.

FX has observers of activations in the graph and observes weights at convert, by the QConfig; here those of
weights are in the graph too. A loop that replaces or removes all observers means those of activations.
"""

from collections.abc import Collection
from dataclasses import replace

import torch
from torch.fx import GraphModule

from torchq_compat.annotate.annotation import op_record
from torchq_compat.annotate.observed_graph import ObservedPlace, adopt_observers, observed_places
from torchq_compat.model.graph_module import ModelRecord
from torchq_compat.read.qconfig_mappings import QConfigRules
from torchq_compat.read.qspecs import OpSpecs
from torchq_compat.support.argument_checks import listed
from torchq_compat.support.decisions import Action, Decision
from torchq_compat.support.dtypes import plain_dtype
from torchq_compat.support.user_warnings import warn_user

UNSIGNED = (torch.uint8, torch.uint16)


def settle_observers(working: GraphModule, record: ModelRecord) -> tuple[ObservedPlace, ...]:
    """Make every observer in ``working`` one that convert knows; return the places that lost theirs.

    Observers of weights that the script replaced or removed are put back, except after training, where FX has
    them too.
    """
    adopted = adopt_observers(working)
    if not record.is_qat and record.rules is not None:
        _restore_weight_observers(working, record.rules, record.observed, adopted)
    if record.is_qat and record.rules is not None:
        _warn_of_activations_on_weights(working, record.observed, adopted)
    there = {place.target for place in observed_places(working)}
    removed = tuple(place for place in record.observed if place.target not in there)
    if removed:
        names = [f"{place.target} ({place.op or 'no op'})" for place in removed]
        warn_user("TQ404", count=len(removed), observers=listed(names))
    return removed


def with_removed_observers(
    decisions: tuple[Decision, ...], removed: Collection[ObservedPlace], observed: Collection[ObservedPlace]
) -> tuple[Decision, ...]:
    """Return ``decisions`` with the ops as float that have no observer left, and the reason for all that lost
    one."""
    lost: dict[str, list[str]] = {}
    for place in removed:
        lost.setdefault(place.op, []).append(place.target)
    left = {place.op for place in observed if place not in removed}
    return tuple(
        replace(
            decision,
            action=decision.action if decision.path in left else Action.FLOAT,
            reason=f"{decision.reason}; {', '.join(lost[decision.path])} removed from the prepared model",
        )
        if decision.path in lost and decision.action is Action.QUANTIZED
        else decision
        for decision in decisions
    )


def _warn_of_activations_on_weights(
    working: GraphModule, observed: Collection[ObservedPlace], adopted: Collection[str]
) -> None:
    """Warn about weights that the script gave an observer of unsigned integers, which are for activations."""
    replaced = [
        f"{place.target} ({place.op})"
        for place in observed
        if place.is_weight
        and place.target in adopted
        and plain_dtype(working.get_submodule(place.target).dtype) in UNSIGNED  # type: ignore[arg-type]
    ]
    if replaced:
        warn_user("TQ330", observers=listed(replaced))


def _restore_weight_observers(
    working: GraphModule, rules: QConfigRules, observed: Collection[ObservedPlace], adopted: Collection[str]
) -> None:
    there = {place.target for place in observed_places(working)} - set(adopted)
    weights = {place.target for place in observed if place.is_weight and place.target not in there}
    restored = []
    for node in working.graph.nodes:
        if node.op != "call_module" or node.target not in weights:
            continue
        records = [result for result in map(op_record, node.users) if result is not None]
        qconfig = records[0].select(rules).qconfig if records else None
        spec = None if qconfig is None else OpSpecs(qconfig).weight
        if spec is not None:
            working.set_submodule(str(node.target), spec.observer_or_fake_quant_ctr())
            restored.append(f"{node.target} ({records[0].label})")
    if restored:
        warn_user("TQ319", observers=listed(restored))
