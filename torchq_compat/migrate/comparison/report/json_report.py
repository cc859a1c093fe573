"""Comparisons as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from torchq_compat.migrate.comparison.results import ComparedModel, Point

__all__ = ["FORMAT_VERSION", "as_data", "report_data"]

#: Increased when this format changes.
FORMAT_VERSION = 1


def report_data(comparisons: Iterable[ComparedModel]) -> dict[str, Any]:
    """Return the data that ``torchq-compat compare --json`` prints."""
    return {"version": FORMAT_VERSION, "comparisons": [as_data(comparison) for comparison in comparisons]}


def as_data(comparison: ComparedModel) -> dict[str, Any]:
    """Return one comparison as plain values, without the data of plots. SQNR is a number of dB, or "inf"."""
    capture, verdict = comparison.capture, comparison.verdict
    data: dict[str, Any] = _finite(
        {
            "model": capture.model,
            "verdict": verdict.status.value,
            "headline": verdict.headline,
            "needs_attention": verdict.needs_attention,
            "findings": [asdict(finding) for finding in verdict.findings],
            "outputs": [_point(point) for point in capture.outputs],
            "points": [_point(point) for point in capture.points],
            "left_float": [asdict(left) for left in capture.left_float],
            "costs": asdict(capture.costs),
            "fx": {**asdict(capture.fx), "outcome": capture.fx.outcome.value},
        }
    )
    return data


def _point(point: Point) -> dict[str, Any]:
    data = asdict(point)
    del data["histogram"]
    return {**data, "kind": point.kind.value}


def _finite(value: Any) -> Any:
    """Return ``value`` without infinities, which JSON does not have."""
    if isinstance(value, float) and math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, (list, tuple)) else value
