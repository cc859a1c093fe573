"""The pictures of the page: plots, and the drawing of a cell."""

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.ticker import MaxNLocator

from torchq_compat.comparison import results

# The picture of a cell: its parts as boxes in the order of computation, each with its q-dq.


WIDTH, HEIGHT = 2.05, 0.9
COLUMN, ROW = 2.6, 1.3
#: Font size in points; a text that is too long gets the size WIDE divided by its length.
FONT, WIDE = 6.8, 200.0
DTYPE_COLOURS = {
    "uint8": "#cfe3f5",
    "int8": "#c9ead0",
    "int16": "#fde7b5",
    "uint16": "#fde7b5",
    "int32": "#f7cfc2",
}
OTHER_COLOUR, FLOAT_COLOUR = "#e2d4ef", "#eeeeee"
ARROW: Any = {"arrowstyle": "-|>", "mutation_scale": 9, "linewidth": 0.9, "color": "#7f8b97"}
BOX: Any = {"boxstyle": "round,pad=0,rounding_size=0.08", "edgecolor": "#444444", "linewidth": 0.9}

Places = dict[str, tuple[float, float]]


def draw_cell(cell: results.CellGraph, points: Mapping[str, results.Point]) -> Figure:
    """Draw ``cell``; ``points`` are by name, and those of the cell's parts have the qparams."""
    places = _places(cell)
    columns = max(x for x, _ in places.values()) / COLUMN + 1
    bottom, top = _limits(cell, places)
    figure = Figure(figsize=(1.85 * columns, 0.82 * (top - bottom)), layout="constrained")
    axes = figure.subplots()
    axes.set_axis_off()
    for node in cell.nodes:
        for source in node.inputs:
            start, end = places[source], places[node.name]
            ends = (start[0] + WIDTH / 2, start[1]), (end[0] - WIDTH / 2, end[1])
            bend = f"arc3,rad={-_bend(start, end)}"
            axes.add_patch(FancyArrowPatch(*ends, connectionstyle=bend, **ARROW))
    for node in cell.nodes:
        _box(axes, node, places[node.name], points.get(f"{cell.path}.{node.name}"))
    axes.set_xlim(-WIDTH * 0.6, (columns - 1) * COLUMN + WIDTH * 0.6)
    axes.set_ylim(bottom, top)
    return figure


def _places(cell: results.CellGraph) -> Places:
    """Return the centres of the parts: one column per depth in the computation, near the mean row of a part's
    inputs."""
    depth = _depths(cell)
    columns: dict[int, list[results.CellNode]] = {}
    for node in cell.nodes:
        columns.setdefault(depth[node.name], []).append(node)
    places: Places = {}
    for column, nodes in sorted(columns.items()):
        expected = [_ideal_row(node, places) for node in nodes]
        order = sorted(range(len(nodes)), key=lambda i: (-expected[i], i))
        top = (len(nodes) - 1) / 2 * ROW + sum(expected) / len(expected)
        for rank, index in enumerate(order):
            places[nodes[index].name] = column * COLUMN, top - rank * ROW
    return places


def _depths(cell: results.CellGraph) -> dict[str, int]:
    """Return the column of each part: after its last input; for an input of the cell, just before the first
    part that reads it."""
    depth: dict[str, int] = {}
    for node in cell.nodes:
        depth[node.name] = 1 + max((depth[name] for name in node.inputs), default=-1)
    for node in cell.nodes:
        readers = [depth[other.name] for other in cell.nodes if node.name in other.inputs]
        if not node.inputs and readers:
            depth[node.name] = min(readers) - 1
    return depth


def _ideal_row(node: results.CellNode, places: Places) -> float:
    rows = [places[name][1] for name in node.inputs if name in places]
    return sum(rows) / len(rows) if rows else 0.0


def _limits(cell: results.CellGraph, places: Places) -> tuple[float, float]:
    """Return the lowest and highest y of boxes and bent arrows."""
    highest = [y + HEIGHT * 0.75 for _, y in places.values()]
    for node in cell.nodes:
        for source in node.inputs:
            (x, y), end = places[source], places[node.name]
            highest.append(max(y, end[1]) + HEIGHT / 2 + _bend((x, y), end) / 2 * (end[0] - x))
    return min(y for _, y in places.values()) - HEIGHT * 0.75, max(highest)


def _bend(start: tuple[float, float], end: tuple[float, float]) -> float:
    """Return the bend of an arrow: a long one is bent upwards, so that it does not run behind the boxes
    between."""
    is_short = end[0] - start[0] <= COLUMN * 1.1
    return 0.0 if is_short or abs(end[1] - start[1]) > ROW / 2 else 0.22


def _box(
    axes: Axes, node: results.CellNode, centre: tuple[float, float], point: results.Point | None
) -> None:
    x, y = centre
    qparams = point.ours.qparams if point else None
    colour = FLOAT_COLOUR if qparams is None else DTYPE_COLOURS.get(qparams.dtype, OTHER_COLOUR)
    corner = (x - WIDTH / 2, y - HEIGHT / 2)
    axes.add_patch(FancyBboxPatch(corner, WIDTH, HEIGHT, facecolor=colour, **BOX))
    lines = [(node.name, "bold", "#111111"), *((text, "normal", c) for text, c in _details(node, point))]
    for index, (text, weight, text_colour) in enumerate(lines):
        row = y + HEIGHT * (0.30 - 0.6 * index / max(1, len(lines) - 1)) if len(lines) > 1 else y
        style: Any = {"fontsize": min(FONT, WIDE / len(text)), "fontweight": weight, "color": text_colour}
        axes.text(x, row, text, ha="center", va="center", **style)


def _details(node: results.CellNode, point: results.Point | None) -> list[tuple[str, str]]:
    if point is None:
        return [(node.formula, "#333333")]
    ours, fx = point.ours.qparams, point.fx.qparams if point.fx else None
    lines = [(node.formula, "#333333"), (_chain(ours), "#111111")]
    if fx is not None and (ours is None or not ours.same_qparams(fx)):
        lines.append((f"FX: {_chain(fx)}", "#b04a00"))
    return lines


def _chain(qparams: results.QParamsView | None) -> str:
    if qparams is None:
        return "float"
    return f"q→dq {qparams.dtype} s={qparams.scales[0]:.3g} z={qparams.zero_points[0]}"


# The plots of the page, each an SVG element in the colours of the page around it, light or dark.


FLOAT, OURS, FX = "#7f8b97", "#1f77b4", "#d95f02"
#: Replaced by the colour of the text around the picture.
INK = "#010203"
#: The settings with which the pictures are drawn.
STYLE: Any = {
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none"),
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    "svg.fonttype": "none",
}
MAX_TICKS = 64
#: The height of a tick, as a share of the axes.
TICK = 0.07
#: Sizes of figures in inches, readable on a telephone.
SERIES, SMALL, OVERVIEW = (6.4, 3.6), (3.1, 1.9), (9.6, 3.8)
MAX_NAME = 44


def over_time(series: results.Series) -> str:
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


def overview(points: Sequence[results.Point], ceiling: float) -> str:
    """Plot the SQNR of the points in the order of computation, and below it the dtypes of their values."""
    figure = Figure(figsize=OVERVIEW, layout="constrained")
    sqnr, dtypes = figure.subplots(2, 1, sharex=True, height_ratios=(8, 1))
    for label, marker, colour in (("FX", "o", FX), ("here", ".", OURS)):
        sides = [point.fx if label == "FX" else point.ours for point in points]
        heights = [min(side.sqnr, ceiling) if side else math.nan for side in sides]
        if any(sides):
            style = "none" if label == "FX" else colour
            sqnr.plot(heights, marker, color=colour, markerfacecolor=style, markersize=6, label=label)
    worst = min(range(len(points)), key=lambda index: points[index].ours.sqnr)
    place = (worst, max(0.0, min(points[worst].ours.sqnr, ceiling)))
    align = "right" if worst > len(points) / 2 else "left"
    sqnr.annotate(f" {_shortened(points[worst].name)} ", place, ha=align, va="top", fontsize=8)
    sqnr.set_ylabel(f"SQNR in dB, {ceiling:.0f} and more at the top")
    sqnr.grid(alpha=0.3)
    used = [point.ours.qparams.dtype if point.ours.qparams else "float" for point in points]
    for dtype in dict.fromkeys(used):
        colour = FLOAT if dtype == "float" else DTYPE_COLOURS.get(dtype, OTHER_COLOUR)
        spans = [(index - 0.5, 1.0) for index, name in enumerate(used) if name == dtype]
        dtypes.broken_barh(spans, (0, 1), color=colour, label=f"{dtype} ({len(spans)})")
    dtypes.set_yticks([])
    dtypes.set_xlabel("places in the order of computation")
    figure.legend(loc="outside upper right", ncols=5, frameon=False)
    return _svg(figure, "overview")


def histogram_groups(capture: results.Capture) -> Iterator[tuple[str, list[results.Point]]]:
    """Yield the places that are drawn together: outputs, modules and ops first, then each cell."""
    outer = [*capture.outputs, *(point for point in capture.points if point.kind is not results.Kind.PART)]
    yield "outputs, modules and ops", [point for point in outer if point.histogram]
    for cell in capture.cells:
        parts = [
            p for p in capture.points if p.kind is results.Kind.PART and p.name.startswith(f"{cell.path}.")
        ]
        yield cell.path, [point for point in parts if point.histogram]


def histogram(alike: Sequence[results.Point]) -> str:
    """Plot the float values at places with equal values, and the qparams of both sides."""
    figure = Figure(figsize=SMALL, layout="constrained")
    axes, point = figure.subplots(), alike[0]
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
    names = [item.name.rpartition(".cell.")[2] for item in alike]
    axes.set_title(_shortened(", ".join(names), 34), fontsize=9)
    return _svg(figure, point.name)


def _view(histogram: results.Histogram, qparams: Sequence[results.QParamsView]) -> tuple[float, float]:
    """Return the limits of the plot: all values, and both ends of every range."""
    ends = [histogram.low, histogram.high]
    for qparam in qparams:
        ends += [end for pair in _ends(qparam) for end in pair]
    margin = 0.05 * (max(ends) - min(ends))
    return min(ends) - margin, max(ends) + margin


def _ends(qparams: results.QParamsView) -> Iterator[tuple[float, float]]:
    for scale, zero_point in zip(qparams.scales, qparams.zero_points, strict=True):
        yield (qparams.quant_min - zero_point) * scale, (qparams.quant_max - zero_point) * scale


def _mark_qparams(
    axes: Axes, qparams: results.QParamsView, colour: str, view: tuple[float, float], bottom: float
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


def cell_chain(cell: results.CellGraph, capture: results.Capture) -> str:
    """Draw the parts of a cell from left to right, with their q-dq."""
    return _svg(draw_cell(cell, {point.name: point for point in capture.points}), cell.path)


def _shortened(name: str, length: int = MAX_NAME) -> str:
    return name if len(name) <= length else f"...{name[3 - length :]}"


def _svg(figure: Figure, salt: str) -> str:
    """Return ``figure`` as an SVG element; ``salt`` makes its ids differ from those of other pictures."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": salt}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :].replace(INK, "currentColor")
