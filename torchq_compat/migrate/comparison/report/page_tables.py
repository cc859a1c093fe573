"""The tables and bars of the page; a column that would be empty is left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torchq_compat.migrate.comparison.report.summary_sentence import Place, grade, told_places
from torchq_compat.migrate.comparison.report.terminal_report import step_text
from torchq_compat.migrate.comparison.results import Capture, Kind, Point, QParamsView, Side
from torchq_compat.migrate.comparison.verdict import decibel_text

__all__ = ["Bar", "Column", "PageTable", "bars", "page_table"]

#: The SQNR in dB from which noise is not shown: the bar has no length.
INVISIBLE = 60.0


@dataclass(frozen=True)
class Column:
    title: str
    of: Callable[[Place], str]
    is_number: bool = True


@dataclass(frozen=True)
class PageTable:
    """A table; ``rows`` are (column, cell) pairs, and the first cell has the names of a place."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[tuple[Column, Any], ...], ...]


@dataclass(frozen=True)
class BarSide:
    length: float
    text: str
    grade: str
    is_fx: bool


@dataclass(frozen=True)
class Bar:
    name: str
    sides: tuple[BarSide, ...]
    worst: bool


def bars(capture: Capture, worst: Sequence[Place]) -> list[Bar]:
    """Return the bars: one for each side of each place; its length shows the noise."""
    marked = {place.point.name for place in worst}
    found = []
    for place in told_places((*capture.outputs, *capture.points)):
        point = place.point
        sides = [_bar_side(point.ours, is_fx=False)]
        if point.fx is not None:
            sides.append(_bar_side(point.fx, is_fx=True))
        more = f" and {len(place.names) - 1} more" if len(place.names) > 1 else ""
        found.append(Bar(f"{point.name}{more}", tuple(sides), not marked.isdisjoint(place.names)))
    return found


def _bar_side(side: Side, *, is_fx: bool) -> BarSide:
    length = (INVISIBLE - max(0.0, min(side.sqnr, INVISIBLE))) / INVISIBLE * 78
    return BarSide(length, decibel_text(side.sqnr), grade(side.sqnr), is_fx)


def page_table(points: Sequence[Point]) -> PageTable:
    """Return the table of ``points`` without the columns that would be empty."""
    places = told_places(points)
    kept = tuple(column for column in COLUMNS if any(column.of(place) for place in places))
    name = Column("where", lambda place: "", is_number=False)
    rows = tuple(((name, place.names), *((column, column.of(place)) for column in kept)) for place in places)
    return PageTable((name, *kept), rows)


def _operation(place: Place) -> str:
    return "" if place.point.kind is Kind.OUTPUT else place.point.operation


def _qparams(read: Callable[[QParamsView], str], *, of_fx: bool) -> Callable[[Place], str]:
    def cell(place: Place) -> str:
        ours, fx = place.point.ours, place.point.fx
        side = fx if of_fx else ours
        if side is None:
            return ""
        if side.qparams is None:
            return "float" if read is _dtype else ""
        told = read(side.qparams)
        if not of_fx or ours.qparams is None:
            return told
        if ours.qparams.same_qparams(side.qparams):
            return "same" if read is _dtype else ""
        # Values that are the same here and in FX are shown once.
        return "" if read is not _dtype and told == read(ours.qparams) else told

    return cell


def _dtype(qparams: QParamsView) -> str:
    limits = "" if qparams.is_full_range else f" in {qparams.quant_min} to {qparams.quant_max}"
    return f"{qparams.dtype}{limits}"


def _scale(qparams: QParamsView) -> str:
    scales = [f"{scale:.4g}" for scale in qparams.scales]
    return ", ".join(scales) if len(scales) <= 2 else f"{len(scales)} scales"


def _zero_point(qparams: QParamsView) -> str:
    return ", ".join(map(str, qparams.zero_points)) if len(qparams.zero_points) <= 2 else ""


def _covers(qparams: QParamsView) -> str:
    if len(qparams.scales) > 1:
        return ""
    (scale,), (zero,) = qparams.scales, qparams.zero_points
    return f"{(qparams.quant_min - zero) * scale:.4g} to {(qparams.quant_max - zero) * scale:.4g}"


def _float_range(place: Place) -> str:
    histogram = place.point.histogram
    return f"{histogram.low:.4g} to {histogram.high:.4g}" if histogram else ""


def _graded(side: Side | None) -> str:
    if side is None:
        return ""
    word = grade(side.sqnr)
    return "bit-equal" if word == "exact" else f"{side.sqnr:.1f} {word}"


def _outside(side: Side | None) -> str:
    return f"{side.saturated:.2%}" if side is not None and side.saturated else ""


def _differ(place: Place) -> str:
    steps = place.point.steps
    return f"{steps.share:.2%}" if steps else ""


def _distance(place: Place) -> str:
    steps = place.point.steps
    return step_text(steps.largest) if steps else ""


#: The most important columns come first: a narrow screen shows only those.
COLUMNS = (
    Column("what", _operation, is_number=False),
    Column("dB here", lambda place: _graded(place.point.ours)),
    Column("dB FX", lambda place: _graded(place.point.fx)),
    Column("differ", _differ),
    Column("steps", _distance),
    Column("outside", lambda place: _outside(place.point.ours)),
    Column("outside, FX", lambda place: _outside(place.point.fx)),
    Column("float from, to", _float_range),
    Column("dtype", _qparams(_dtype, of_fx=False), is_number=False),
    Column("scale", _qparams(_scale, of_fx=False)),
    Column("zero point", _qparams(_zero_point, of_fx=False)),
    Column("covers", _qparams(_covers, of_fx=False)),
    Column("FX dtype", _qparams(_dtype, of_fx=True), is_number=False),
    Column("FX scale", _qparams(_scale, of_fx=True)),
    Column("FX zero point", _qparams(_zero_point, of_fx=True)),
)
