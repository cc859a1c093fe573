"""The rows of ``explain``: decisions, their weights and inputs, and the counts of all rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Role", "Row", "counted", "default_reason", "headline"]

Role = Literal["op", "part", "input", "weight", "batch norm", "size", "setting", "lowering"]

#: The roles of rows that are counted as ops of the model.
OPS: tuple[Role, ...] = ("op",)


@dataclass(frozen=True)
class Row:
    """One row of a report.

    Attributes:
        path: module path; ``scope/node`` for a function; ``path.weight`` and ``path.input`` for the values
            that an op reads as integers.
        role: what the row is about.
        kind: module class, operator, or a part's formula.
        action: ``quantized``, ``shared``, ``float``, ``dropped``, ``folded``, ``free``, ``fixed``,
            ``lowered`` or ``reference``.
        dtype: the integer dtype, without ``torch.``; empty if there is none.
        scale: the scale per tensor; None if it is per channel, chosen at run time or not known yet.
        zero_point: the zero point, or None as for ``scale``.
        channels: the number of scales; None if there is one.
        runs_as: what the op runs as after ``convert_fx``; empty if this is not known.
        on_integers: whether the op runs on an integer kernel; None if this is not known.
        reason: why; it names the setting that decided.
    """

    path: str
    role: Role
    kind: str
    action: str
    dtype: str = ""
    scale: float | None = None
    zero_point: int | None = None
    channels: int | None = None
    runs_as: str = ""
    on_integers: bool | None = None
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the row as plain values."""
        return dict(vars(self))


def counted(count: int, what: str, plural: str = "") -> str:
    """Return ``1 file`` or ``2 files``."""
    return f"{count} {what if count == 1 else plural or what + 's'}"


def headline(rows: Sequence[Row]) -> str:
    """Return the counts of ``rows``: ``14 quantized, 0 float, 1 batch norm folded``."""
    ops = Counter(row.action for row in rows if row.role in OPS)
    parts = sum(row.role == "part" for row in rows)
    folded = sum(row.role == "batch norm" for row in rows)
    in_floats = sum(row.on_integers is False for row in rows if row.role in OPS)
    told = [f"{ops['quantized']} quantized"]
    if parts:
        told[0] += f" ({counted(parts, 'part')} inside)"
    if ops["shared"]:
        told.append(f"{ops['shared']} on {'its' if ops['shared'] == 1 else 'their'} input's qparams")
    told.append(f"{ops['float']} float")
    if folded:
        told.append(f"{counted(folded, 'batch norm')} folded")
    dropped = sum(row.role == "setting" for row in rows)
    if dropped:
        told.append(f"{counted(dropped, 'setting')} without effect")
    if in_floats:
        told.append(f"{in_floats} between q-dq without an integer kernel")
    return ", ".join(told)


def default_reason(rows: Iterable[Row]) -> str:
    """Return the reason that most quantized ops have, to be shown once; empty if no two ops share it."""
    reasons = Counter(row.reason for row in rows if row.role == "op" and row.action == "quantized")
    (reason, count), *_ = reasons.most_common(1) or [("", 0)]
    return reason if count > 1 else ""
