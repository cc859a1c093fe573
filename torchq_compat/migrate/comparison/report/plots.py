"""The plots of the page, each an SVG element in the colours of the page around it, light or dark."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from torchq_compat.migrate.comparison.report.cell_drawing import draw_cell
from torchq_compat.migrate.comparison.results import (
    Capture,
    CellGraph,
    Histogram,
    Kind,
    Point,
    QParamsView,
    Series,
)

__all__ = ["cell_chain", "histogram", "histogram_groups", "over_time"]

FLOAT, OURS, FX = "#7f8b97", "#1f77b4", "#d95f02"
#: Replaced by the colour of the text around the picture.
INK = "#010203"
MAX_TICKS = 64
#: The height of a tick, as a share of the axes.
TICK = 0.07
#: Sizes of figures in inches, readable on a telephone.
SERIES, SMALL = (6.4, 3.6), (3.1, 1.9)
MAX_NAME = 44


def over_time(series: Series) -> str:
    """Plot one output channel of all sides, and below it the errors."""
    figure = Figure(figsize=SERIES, layout="constrained")
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
    return _svg(figure, f"{series.output} over {series.axis}")


def histogram_groups(capture: Capture) -> Iterator[tuple[str, list[Point]]]:
    """Yield the places that are drawn together: outputs, modules and ops first, then each cell."""
    outer = [*capture.outputs, *(point for point in capture.points if point.kind is not Kind.PART)]
    yield "outputs, modules and ops", [point for point in outer if point.histogram]
    for cell in capture.cells:
        parts = [p for p in capture.points if p.kind is Kind.PART and p.name.startswith(f"{cell.path}.")]
        yield cell.path, [point for point in parts if point.histogram]


def histogram(alike: Sequence[Point]) -> str:
    """Plot the float values at places with equal values, and the qparams of both sides."""
    figure = Figure(figsize=SMALL, layout="constrained")
    axes = figure.subplots()
    _histogram(axes, alike[0])
    names = [point.name.rpartition(".cell.")[2] for point in alike]
    axes.set_title(_shortened(", ".join(names), 34), fontsize=9)
    return _svg(figure, alike[0].name)


def _histogram(axes: Axes, point: Point) -> None:
    histogram = point.histogram
    assert histogram is not None
    width = (histogram.high - histogram.low) / len(histogram.counts)
    edges = [histogram.low + width * i for i in range(len(histogram.counts) + 1)]
    ours, fx = point.ours.qparams, point.fx.qparams if point.fx else None
    view = _view(histogram, [qparams for qparams in (ours, fx) if qparams is not None])
    axes.stairs(histogram.counts, edges, fill=True, color="#9aa5b1")
    axes.set_yscale("symlog", linthresh=1)
    axes.set_ylim(bottom=0)
    if ours is not None:
        _mark_qparams(axes, ours, OURS, view, 0.0)
    if fx is not None and (ours is None or not fx.same_qparams(ours)):
        _mark_qparams(axes, fx, FX, view, TICK)
    axes.set_xlim(view)
    axes.tick_params(labelsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(5))


def _view(histogram: Histogram, qparams: Sequence[QParamsView]) -> tuple[float, float]:
    """Return the limits of the plot: all values, and both ends of every range."""
    ends = [histogram.low, histogram.high]
    for each in qparams:
        ends += [end for pair in _ends(each) for end in pair]
    margin = 0.05 * (max(ends) - min(ends))
    return min(ends) - margin, max(ends) + margin


def _ends(qparams: QParamsView) -> Iterator[tuple[float, float]]:
    for scale, zero_point in zip(qparams.scales, qparams.zero_points, strict=True):
        yield (qparams.quant_min - zero_point) * scale, (qparams.quant_max - zero_point) * scale


def _mark_qparams(
    axes: Axes, qparams: QParamsView, colour: str, view: tuple[float, float], bottom: float
) -> None:
    """Shade the range of the qparams, dash its ends, and draw its steps as ticks at the bottom."""
    pairs = zip(qparams.scales, qparams.zero_points, _ends(qparams), strict=True)
    for scale, zero_point, (first, last) in pairs:
        axes.axvspan(max(first, view[0]), min(last, view[1]), color=colour, alpha=0.10, linewidth=0)
        for end in (first, last):
            axes.axvline(end, color=colour, linewidth=1.0, linestyle="--")
        lowest = max(qparams.quant_min, math.ceil(view[0] / scale) + zero_point)
        highest = min(qparams.quant_max, math.floor(view[1] / scale) + zero_point)
        every = max(1, math.ceil((highest - lowest) / MAX_TICKS))
        ticks = [(q - zero_point) * scale for q in range(lowest, highest + 1, every)]
        axes.vlines(
            ticks, bottom, bottom + TICK, color=colour, linewidth=0.6, transform=axes.get_xaxis_transform()
        )


def cell_chain(cell: CellGraph, capture: Capture) -> str:
    """Draw the parts of a cell from left to right, with their q-dq."""
    return _svg(draw_cell(cell, {point.name: point for point in capture.points}), cell.path)


def _shortened(name: str, length: int = MAX_NAME) -> str:
    return name if len(name) <= length else f"...{name[3 - length :]}"


def _svg(figure: Figure, salt: str) -> str:
    """Return ``figure`` as an SVG element; ``salt`` makes its ids differ from those of other pictures."""
    figure.patch.set_alpha(0)
    for axes in figure.axes:
        axes.patch.set_alpha(0)
    # INK is replaced by the colour of the text around the picture.
    for axes in figure.axes:
        for spine in axes.spines.values():
            spine.set_color(INK)
        axes.title.set_color(INK)
        axes.tick_params(colors=INK)
        for label in (axes.xaxis.label, axes.yaxis.label):
            label.set_color(INK)
    for legend in figure.legends:
        for label in legend.get_texts():
            label.set_color(INK)
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": salt, "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :].replace(INK, "currentColor")
