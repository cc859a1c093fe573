"""A comparison for a notebook cell, and as rows of plain values."""

from __future__ import annotations

from html import escape
from typing import Any

from torchq_compat.migrate.comparison.report.summary_sentence import grade, summary_sentence, worst_places
from torchq_compat.migrate.comparison.report.terminal_report import COLUMNS, NONE, point_row
from torchq_compat.migrate.comparison.results import Capture, ComparedModel, Point, Side
from torchq_compat.support.showing.report_html import html_table

__all__ = ["PLACE_COLUMNS", "comparison_html", "place_rows"]

#: The columns for one side.
OF_SIDE = ("dtype", "scale", "zero_point", "sqnr", "saturated")
PLACE_COLUMNS = (
    *("name", "kind", "operation", "grade"),
    *OF_SIDE,
    *(f"fx_{name}" for name in OF_SIDE),
    *("differ", "largest_steps"),
)


def comparison_html(comparison: ComparedModel) -> str:
    """Return the verdict, the worst places, and all places in a ``<details>``."""
    capture, verdict = comparison.capture, comparison.verdict
    worst = "".join(
        f"<li><code>{escape(', '.join(place.names))}</code>: {place.point.ours.sqnr:.1f} dB, "
        f"{grade(place.point.ours.sqnr)}. {escape(why)}</li>"
        for place, why in worst_places(capture)
    )
    rows = [
        tuple("" if cell == NONE else cell for cell in point_row(point))
        for point in (*capture.outputs, *capture.points)
    ]
    return (
        f"<div><p><b>{escape(capture.model)}: {verdict.status}</b>. "
        f"{escape(summary_sentence(comparison))}</p><ol>{worst}</ol>"
        f"<details><summary>{len(rows)} places</summary>{html_table(COLUMNS, rows)}</details></div>"
    )


def place_rows(capture: Capture) -> list[dict[str, Any]]:
    """Return a row for each output and place, with the keys of ``PLACE_COLUMNS``."""
    return [_row(point) for point in (*capture.outputs, *capture.points)]


def _row(point: Point) -> dict[str, Any]:
    steps = point.steps
    return {
        "name": point.name,
        "kind": point.kind.value,
        "operation": point.operation,
        "grade": grade(point.ours.sqnr),
        **_side(point.ours, ""),
        **_side(point.fx, "fx_"),
        "differ": steps.share if steps else None,
        "largest_steps": steps.largest if steps else None,
    }


def _side(side: Side | None, prefix: str) -> dict[str, Any]:
    if side is None:
        return dict.fromkeys(f"{prefix}{name}" for name in OF_SIDE)
    qparams = side.qparams
    one = qparams if qparams is not None and len(qparams.scales) == 1 else None
    told = {
        "dtype": qparams.dtype if qparams else "float",
        "scale": one.scales[0] if one else None,
        "zero_point": one.zero_points[0] if one else None,
        "sqnr": side.sqnr,
        "saturated": side.saturated,
    }
    return {f"{prefix}{name}": value for name, value in told.items()}
