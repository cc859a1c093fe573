"""The decisions about ops that convert with the qparams of their observers, as FX converts trained models."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from torchq_compat.support.decisions import Action, Decision

__all__ = ["with_observer_qparams"]

FROM_OBSERVER = "with its observer's qparams and the dtype's range, as in FX, not those it trained with"
KEEPS_TRAINED = "its parts keep the qparams they trained with"


def with_observer_qparams(
    decisions: tuple[Decision, ...], changed: Collection[str], owners: Collection[str]
) -> tuple[Decision, ...]:
    """Return ``decisions`` with the reason why qparams are not, or are, those of the training.

    Args:
        changed: the paths of ops whose qparams or ranges differ from those they trained with.
        owners: the paths of trained custom modules with parts.
    """
    return tuple(_told(decision, changed, owners) for decision in decisions)


def _told(decision: Decision, changed: Collection[str], owners: Collection[str]) -> Decision:
    if decision.action not in (Action.QUANTIZED, Action.SHARED):
        return decision
    if decision.path in owners and not decision.node:
        return replace(decision, reason=f"{decision.reason}; {KEEPS_TRAINED}")
    if decision.path in changed:
        return replace(decision, reason=f"{decision.reason}; {FROM_OBSERVER}")
    return decision
