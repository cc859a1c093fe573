"""A report of ``explain`` as text: the counts, then the model in its order, then the sizes of the inputs."""

from __future__ import annotations

from collections.abc import Sequence

from torchq_compat.support.showing.rows import Row, counted, default_reason, headline
from torchq_compat.support.showing.text_table import folded_prefixes, text_table

__all__ = ["HEADER", "cells", "report_text", "stored_as"]

HEADER = ("where", "what", "as", "scale", "zero", "note")
SIZES = ("input", "what", "size", "note")
#: The beginning of the reason of every part of a custom module.
OF_PARTS = "part of the custom module"


def report_text(rows: Sequence[Row], width: int) -> str:
    """Return the report as lines of at most ``width`` columns."""
    if not rows:
        return "no decisions: the model has no modules that could be quantized"
    common = default_reason(rows)
    model = [row for row in rows if row.role != "size"]
    sizes = [row for row in rows if row.role == "size"]
    blocks = [headline(rows)]
    if model:
        blocks.append(_table(HEADER, [cells(row, common) for row in model], width))
    if common:
        blocks.append(f"Reason, unless noted otherwise: {common}.")
    if sizes:
        blocks.append(_table(SIZES, [(row.path, row.kind, row.action, row.reason) for row in sizes], width))
    return "\n\n".join(blocks)


def cells(row: Row, common: str) -> tuple[str, ...]:
    """Return the cells of the table for ``row``; a reason equal to ``common`` is left out."""
    reason = "" if row.reason in (common, OF_PARTS) else row.reason.removeprefix(f"{OF_PARTS}; ")
    if row.action == "shared":
        reason = ""
    note = "; ".join(filter(None, (row.runs_as, reason)))
    scale = "" if row.scale is None else f"{row.scale:.6g}"
    scale = counted(row.channels, "scale") if row.channels else scale
    zero_point = "" if row.zero_point is None else str(row.zero_point)
    kind = row.kind.removesuffix(".default")
    return row.path or "(model)", kind, stored_as(row), scale, zero_point, note


def stored_as(row: Row) -> str:
    """Return the dtype, and ``shared`` if the qparams are the input's; the action if there is no dtype."""
    return " ".join(filter(None, (row.dtype, row.action if row.action == "shared" or not row.dtype else "")))


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> str:
    lines: list[tuple[str, ...]] = []
    for (above, path), row in zip(folded_prefixes([row[0] for row in rows]), rows, strict=True):
        if above:
            lines.append((above, *[""] * (len(header) - 1)))
        lines.append((path, *row[1:]))
    return text_table(header, lines, width)
