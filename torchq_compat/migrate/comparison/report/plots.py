"""The plots of the page, each a data URI of an SVG picture."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterator, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from torchq_compat.migrate.comparison.report.cell_drawing import draw_cell
from torchq_compat.migrate.comparison.results import (
    Capture,
    CellGraph,
    Kind,
    Point,
    QParamsView,
    Series,
    Side,
)

__all__ = ["cell_chain", "error_per_place", "histogram_groups", "histograms", "over_time"]

FLOAT, OURS, FX = "#555555", "#1f77b4", "#d95f02"
#: Highest bar for places that are bit-equal to float.
CEILING = 100.0
COLUMNS_OF_HISTOGRAMS = 4
MAX_TICKS = 64
#: Height of a tick, as a share of the axes.
TICK = 0.07
#: Width of every figure, inches.
WIDTH = 12.0
MAX_NAME = 44


def error_per_place(capture: Capture) -> str:
    """SQNR of every output and place, a row each."""
    points = [*capture.outputs, *capture.points]
    figure = Figure(figsize=(WIDTH, 1.1 + 0.24 * len(points)), layout="constrained")
    axes = figure.subplots()
    rows = range(len(points))
    for offset, label, colour, sides in (
        (-0.2, "here", OURS, [point.ours for point in points]),
        (0.2, "FX", FX, [point.fx for point in points]),
    ):
        if any(side is not None for side in sides):
            heights = [_height(side) for side in sides]
            axes.barh([row + offset for row in rows], heights, 0.38, label=label, color=colour)
    axes.set_yticks(list(rows), [_shortened(point.name) for point in points], fontsize=8)
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.set_xlabel("SQNR against float, dB")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    figure.legend(loc="outside upper right", ncols=2, frameon=False)
    return _data_uri(figure)


def _height(side: Side | None) -> float:
    return 0.0 if side is None else max(0.0, min(side.sqnr, CEILING))


def over_time(series: Series) -> str:
    """One output channel of all sides, and below it the errors."""
    figure = Figure(figsize=(WIDTH, 4.4), layout="constrained")
    values, errors = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    steps = range(len(series.exact))
    marker = "." if len(series.exact) < 60 else ""
    values.plot(steps, series.exact, color=FLOAT, linewidth=2.5, alpha=0.6, label="float")
    for label, colour, side in (("here", OURS, series.ours), ("FX", FX, series.fx)):
        if side is not None:
            values.plot(steps, side, color=colour, linewidth=1.2, marker=marker, label=label)
            error = [a - b for a, b in zip(side, series.exact, strict=True)]
            errors.plot(steps, error, color=colour, linewidth=1.2, marker=marker)
    values.set_ylabel("value")
    errors.set_ylabel("error")
    errors.set_xlabel(series.axis)
    errors.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (values, errors):
        axes.grid(alpha=0.3)
    figure.legend(loc="outside upper right", ncols=3, frameon=False)
    return _data_uri(figure)


def histogram_groups(capture: Capture) -> Iterator[tuple[str, list[Point]]]:
    """Places that are drawn together: outputs, modules and ops first, then each cell."""
    outer = [*capture.outputs, *(point for point in capture.points if point.kind is not Kind.PART)]
    yield "outputs, modules and ops", [point for point in outer if point.histogram]
    for cell in capture.cells:
        parts = [p for p in capture.points if p.kind is Kind.PART and p.name.startswith(f"{cell.path}.")]
        yield cell.path, [point for point in parts if point.histogram]


def histograms(points: Sequence[Point]) -> str:
    """Return the float values at each place, and the qparams of both sides."""
    rows = max(1, math.ceil(len(points) / COLUMNS_OF_HISTOGRAMS))
    figure = Figure(figsize=(WIDTH, 0.4 + 2.1 * rows), layout="constrained")
    all_axes = figure.subplots(rows, COLUMNS_OF_HISTOGRAMS, squeeze=False).flatten()
    for axes in all_axes[len(points) :]:
        axes.set_axis_off()
    for axes, point in zip(all_axes, points, strict=False):
        _histogram(axes, point)
    handles = [
        Patch(color=colour, label=label)
        for colour, label in ((OURS, "qparams here"), (FX, "qparams of FX, if others"))
    ]
    figure.legend(handles=handles, loc="outside upper right", ncols=2, frameon=False, fontsize=8)
    return _data_uri(figure)


def _histogram(axes: Axes, point: Point) -> None:
    histogram = point.histogram
    assert histogram is not None
    width = (histogram.high - histogram.low) / len(histogram.counts)
    edges = [histogram.low + width * i for i in range(len(histogram.counts) + 1)]
    margin = 0.08 * (histogram.high - histogram.low)
    view = histogram.low - margin, histogram.high + margin
    axes.stairs(histogram.counts, edges, fill=True, color="#9aa5b1")
    axes.set_yscale("symlog", linthresh=1)
    axes.set_ylim(bottom=0)
    ours, fx = point.ours.qparams, point.fx.qparams if point.fx else None
    if ours is not None:
        _mark_qparams(axes, ours, OURS, view, 0.0)
    if fx is not None and (ours is None or not fx.same_qparams(ours)):
        _mark_qparams(axes, fx, FX, view, TICK)
    axes.set_xlim(view)
    axes.set_title(_shortened(point.name.rpartition(".cell.")[2], 34), fontsize=8)
    axes.tick_params(labelsize=7)


def _mark_qparams(
    axes: Axes, qparams: QParamsView, colour: str, view: tuple[float, float], bottom: float
) -> None:
    """Shade what the qparams cover, dash their ends, and draw their steps as ticks at the bottom."""
    for scale, zero_point in zip(qparams.scales, qparams.zero_points, strict=True):
        first, last = (qparams.quant_min - zero_point) * scale, (qparams.quant_max - zero_point) * scale
        axes.axvspan(max(first, view[0]), min(last, view[1]), color=colour, alpha=0.10, linewidth=0)
        for end in (first, last):
            if view[0] <= end <= view[1]:
                axes.axvline(end, color=colour, linewidth=1.0, linestyle="--")
        lowest = max(qparams.quant_min, math.ceil(view[0] / scale) + zero_point)
        highest = min(qparams.quant_max, math.floor(view[1] / scale) + zero_point)
        every = max(1, math.ceil((highest - lowest) / MAX_TICKS))
        ticks = [(q - zero_point) * scale for q in range(lowest, highest + 1, every)]
        axes.vlines(
            ticks, bottom, bottom + TICK, color=colour, linewidth=0.6, transform=axes.get_xaxis_transform()
        )


def cell_chain(cell: CellGraph, capture: Capture) -> str:
    """Return the parts of a cell from left to right, with their q-dq."""
    return _data_uri(draw_cell(cell, {point.name: point for point in capture.points}))


def _shortened(name: str, length: int = MAX_NAME) -> str:
    return name if len(name) <= length else f"...{name[3 - length :]}"


def _data_uri(figure: Figure) -> str:
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "torchq_compat"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode()}"
