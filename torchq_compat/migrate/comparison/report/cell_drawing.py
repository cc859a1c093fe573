"""The picture of a cell: its parts as boxes in the order of computation, each with its q-dq."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from torchq_compat.migrate.comparison.results import CellGraph, CellNode, Point, QParamsView

__all__ = ["draw_cell"]

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

Places = dict[str, tuple[float, float]]


def draw_cell(cell: CellGraph, points: Mapping[str, Point]) -> Figure:
    """Draw ``cell``; ``points`` are by name, and those of the cell's parts have the qparams."""
    places = _places(cell)
    columns = max(x for x, _ in places.values()) / COLUMN + 1
    bottom, top = _limits(cell, places)
    figure = Figure(figsize=(1.85 * columns, 0.82 * (top - bottom)), layout="constrained")
    axes = figure.subplots()
    axes.set_axis_off()
    for node in cell.nodes:
        for source in node.inputs:
            _arrow(axes, places[source], places[node.name])
    for node in cell.nodes:
        _box(axes, node, places[node.name], points.get(f"{cell.path}.{node.name}"))
    axes.set_xlim(-WIDTH * 0.6, (columns - 1) * COLUMN + WIDTH * 0.6)
    axes.set_ylim(bottom, top)
    return figure


def _places(cell: CellGraph) -> Places:
    """Return the centres of the parts: one column per depth in the computation, near the mean row of a part's
    inputs."""
    depth = _depths(cell)
    columns: dict[int, list[CellNode]] = {}
    for node in cell.nodes:
        columns.setdefault(depth[node.name], []).append(node)
    places: Places = {}
    for column, nodes in sorted(columns.items()):
        wanted = [_wanted_row(node, places) for node in nodes]
        order = sorted(range(len(nodes)), key=lambda i: (-wanted[i], i))
        top = (len(nodes) - 1) / 2 * ROW + sum(wanted) / len(wanted)
        for rank, index in enumerate(order):
            places[nodes[index].name] = column * COLUMN, top - rank * ROW
    return places


def _depths(cell: CellGraph) -> dict[str, int]:
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


def _wanted_row(node: CellNode, places: Places) -> float:
    rows = [places[name][1] for name in node.inputs if name in places]
    return sum(rows) / len(rows) if rows else 0.0


def _limits(cell: CellGraph, places: Places) -> tuple[float, float]:
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


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.add_patch(
        FancyArrowPatch(
            (start[0] + WIDTH / 2, start[1]),
            (end[0] - WIDTH / 2, end[1]),
            arrowstyle="-|>",
            mutation_scale=9,
            linewidth=0.9,
            color="#7f8b97",
            connectionstyle=f"arc3,rad={-_bend(start, end)}",
        )
    )


def _box(axes: Axes, node: CellNode, centre: tuple[float, float], point: Point | None) -> None:
    x, y = centre
    qparams = point.ours.qparams if point else None
    colour = FLOAT_COLOUR if qparams is None else DTYPE_COLOURS.get(qparams.dtype, OTHER_COLOUR)
    axes.add_patch(
        FancyBboxPatch(
            (x - WIDTH / 2, y - HEIGHT / 2),
            WIDTH,
            HEIGHT,
            boxstyle="round,pad=0,rounding_size=0.08",
            facecolor=colour,
            edgecolor="#444444",
            linewidth=0.9,
        )
    )
    lines = [(node.name, "bold", "#111111"), *((text, "normal", c) for text, c in _details(node, point))]
    for index, (text, weight, text_colour) in enumerate(lines):
        row = y + HEIGHT * (0.30 - 0.6 * index / max(1, len(lines) - 1)) if len(lines) > 1 else y
        axes.text(
            x,
            row,
            text,
            ha="center",
            va="center",
            fontsize=min(FONT, WIDE / len(text)),
            fontweight=weight,
            color=text_colour,
        )


def _details(node: CellNode, point: Point | None) -> list[tuple[str, str]]:
    if point is None:
        return [(node.formula, "#333333")]
    ours, fx = point.ours.qparams, point.fx.qparams if point.fx else None
    lines = [(node.formula, "#333333"), (_chain(ours), "#111111")]
    if fx is not None and (ours is None or not ours.same_qparams(fx)):
        lines.append((f"FX: {_chain(fx)}", "#b04a00"))
    return lines


def _chain(qparams: QParamsView | None) -> str:
    if qparams is None:
        return "float"
    return f"q→dq {qparams.dtype} s={qparams.scales[0]:.3g} z={qparams.zero_points[0]}"
