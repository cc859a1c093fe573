"""Decisions: what was done with every module, op and part, and why; what ``explain`` prints.

A decision is a value. The stage that takes it returns it; the report only collects and shows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

__all__ = ["Action", "Decision", "Report"]


class Action(StrEnum):
    """The outcome of a decision."""

    QUANTIZED = "quantized"
    SHARED = "shared"
    FLOAT = "float"
    DROPPED = "dropped"
    #: A dimension of an input: any size may follow, or only the one of the example.
    FREE = "free"
    FIXED = "fixed"
    #: What ``convert_fx`` made of it: an integer kernel, or the q-dq of the reference graph.
    LOWERED = "lowered"
    REFERENCE = "reference"


@dataclass(frozen=True)
class Decision:
    """One decision.

    Attributes:
        path: module path, with the node name behind it for an op: ``encoder.fc`` or ``encoder/add_1``.
        kind: module class, operator, or the part's formula.
        action: see ``Action``.
        reason: why, in words that name the setting.
        details: dtype, scale and zero point where they are known.
        node: name of the graph node whose output the decision is about; empty for a module.
        warn: whether the user could be misled by not knowing.
    """

    path: str
    kind: str
    action: Action
    reason: str
    details: dict[str, Any] = field(default_factory=dict)
    node: str = ""
    warn: bool = False


@dataclass(frozen=True)
class Report:
    """Decisions in graph order; ``str()`` is a table, ``as_dicts()`` and ``to_json()`` are data."""

    decisions: tuple[Decision, ...]

    def __iter__(self) -> Iterator[Decision]:
        return iter(self.decisions)

    def __len__(self) -> int:
        return len(self.decisions)

    def find(self, path: str) -> tuple[Decision, ...]:
        """Return the decisions about ``path`` and everything below it.

        Args:
            path: of a module, as ``named_modules`` has it, or of an op: ``"module/op"``.
        """
        return tuple(
            d for d in self.decisions if d.path == path or d.path.startswith((f"{path}.", f"{path}/"))
        )

    def left_float(self) -> tuple[Decision, ...]:
        """Return the decisions about what stays float."""
        return tuple(d for d in self.decisions if d.action is Action.FLOAT)

    def as_dicts(self) -> list[dict[str, Any]]:
        """Return the decisions as plain values, one dict each; dtypes are torch's."""
        return [asdict(decision) for decision in self.decisions]

    def to_json(self) -> str:
        """Return ``as_dicts`` as indented JSON, dtypes by their names."""
        return json.dumps(self.as_dicts(), indent=2, default=str)

    def __str__(self) -> str:
        rows = [("path", "kind", "action", "why"), *(_row(decision) for decision in self.decisions)]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        return "\n".join(
            "  ".join(
                [*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]
            ).rstrip()
            for row in rows
        )


def _row(decision: Decision) -> tuple[str, str, str, str]:
    details = ", ".join(f"{key}={_short(value)}" for key, value in decision.details.items())
    why = f"{decision.reason} [{details}]" if details else decision.reason
    return decision.path or "(model)", decision.kind, decision.action.value, why


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value).removeprefix("torch.")
