"""Comparisons in words, as tables on a terminal, and as JSON."""

import io
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from torchq_compat.comparison import results
from torchq_compat.comparison.causes import decibel_text, qparams_text
from torchq_compat.support.report import counted, folded_table

# A comparison in words and numbers: how near to float, how small, how fast, and the outcome of FX.


#: (least SQNR in dB, grade). At 40 dB the noise is 1% of the signal, at 20 dB 10%.
GRADES = ((30.0, "good"), (20.0, "fair"), (-math.inf, "poor"))
#: From this share of values outside the range on, saturation explains the noise.
MUCH_SATURATED = 0.002
#: A place whose SQNR is less than this many dB below its input's has inherited the noise.
INHERITED = 3.0
#: Below this share, values use little of the range.
LITTLE = 0.35


def grade(sqnr: float) -> str:
    """Return ``exact``, ``good``, ``fair`` or ``poor``."""
    if math.isinf(sqnr) and sqnr > 0:
        return "exact"
    return next((word for least, word in GRADES if sqnr >= least), "poor")


def noise_text(sqnr: float) -> str:
    """Return the noise as a share of the signal, both as root mean square."""
    if math.isinf(sqnr) and sqnr > 0:
        return "0%"
    share = 10 ** (-sqnr / 20)
    return f"{share:.2%}" if share < 0.01 else f"{share:.1%}" if share < 0.1 else f"{share:.0%}"


def summary_sentence(comparison: results.ComparedModel) -> str:
    """Return a sentence such as ``int8 within 0.9% of float; 0.27 of the size; 3.1 times as fast. FX cannot
    run this model because ...``"""
    capture, costs = comparison.capture, comparison.capture.costs
    if comparison.verdict.nothing_quantized:
        return f"Nothing is quantized. {_of_fx(capture)}"
    ours = _numbers([output.ours for output in capture.outputs], costs.our_bytes, costs.our_ms, capture)
    dtypes = {p.ours.qparams.dtype for p in (*capture.outputs, *capture.points) if p.ours.qparams}
    widths = {dtype.lstrip("uint") for dtype in dtypes}
    bits = "int8" if widths == {"8"} else f"{'- and '.join(sorted(widths))}-bit" if widths else "quantized"
    return f"{bits} {ours}. {_of_fx(capture)}"


def _numbers(sides: Sequence[results.Side], size: int, time: float, capture: results.Capture) -> str:
    costs = capture.costs
    lowest = min((side.sqnr for side in sides), default=math.inf)
    texts = ["equal to float" if grade(lowest) == "exact" else f"within {noise_text(lowest)} of float"]
    if costs.float_bytes:
        texts.append(f"{size / costs.float_bytes:.2f} of the size")
    ratio = costs.float_ms / time
    texts.append(f"{ratio:.1f} times as fast" if ratio >= 1 else f"{1 / ratio:.1f} times as slow")
    return "; ".join(texts)


def _of_fx(capture: results.Capture) -> str:
    fx, costs = capture.fx, capture.costs
    if fx.outcome is results.FxOutcome.NOT_ASKED:
        return "FX was not run."
    if fx.outcome is results.FxOutcome.RAISED:
        return f"FX cannot run this model because of {_first_line(fx.error)}"
    sides = [output.fx for output in capture.outputs if output.fx is not None]
    if costs.fx_bytes is None or costs.fx_ms is None or not sides:
        why = f" because of {_first_line(fx.lowering_error)}" if fx.lowering_error else "."
        return f"FX's convert_fx does not work on this model{why}"
    return f"FX: {_numbers(sides, costs.fx_bytes, costs.fx_ms, capture)}."


def _first_line(error: str) -> str:
    line = error.strip().split("\n", 1)[0]
    return line if line.endswith(".") else f"{line}."


@dataclass(frozen=True)
class PointGroup:
    """Points with the same values everywhere, shown once."""

    point: results.Point
    names: list[str]

    @property
    def ours(self) -> results.Side:
        return self.point.ours


def distinct_places(points: Sequence[results.Point]) -> list[PointGroup]:
    """Return the places in order, each value once: a pooling that passes integers on is not a place of its
    own."""

    def values(point: results.Point) -> tuple[object, ...]:
        part = point.name if point.kind is results.Kind.PART else ""
        return point.ours, point.fx, point.histogram, part

    groups = (list(alike) for _, alike in itertools.groupby(points, values))
    return [PointGroup(alike[0], [point.name for point in alike]) for alike in groups]


def worst_places(capture: results.Capture) -> list[tuple[PointGroup, str]]:
    """Return the three places farthest from float, with the reason for each."""
    places = distinct_places(capture.points)
    noisy = [place for place in places if grade(place.point.ours.sqnr) != "exact"]
    worst = sorted(noisy, key=lambda place: place.point.ours.sqnr)[:3]
    return [(place, " ".join(_reasons(place.point, capture))) for place in worst]


def _reasons(point: results.Point, capture: results.Capture) -> Iterator[str]:
    side, qparams, histogram = point.ours, point.ours.qparams, point.histogram
    if qparams is None:
        yield "It is computed in float: the noise comes from its input."
        return
    if side.saturated is not None and side.saturated > MUCH_SATURATED:
        yield (
            f"{side.saturated:.1%} of float's values lie outside the range that it covers; calibrate with "
            "data that has them, or take an observer with a wider range."
        )
    if histogram is not None and len(qparams.scales) == 1:
        width = (qparams.quant_max - qparams.quant_min) * qparams.scales[0]
        used = (histogram.high - histogram.low) / width
        if used < LITTLE:
            yield f"Float's values fill {used:.0%} of the range that it covers: few steps are left for them."
    before = _before(point, capture)
    if before is not None and side.sqnr > before.ours.sqnr - INHERITED:
        yield f"The noise comes from its input: {before.name} has {before.ours.sqnr:.1f} dB."
    elif len(qparams.scales) == 1:
        yield f"The noise is its own: one step is {qparams.scales[0]:.3g}."
    else:
        yield f"It has {len(qparams.scales)} sets of qparams; the noise comes from the parts they belong to."


def _before(point: results.Point, capture: results.Capture) -> results.Point | None:
    """Return the noisiest of the parts that a part reads, or the quantized place before an op; None if there
    is none."""
    for cell in capture.cells:
        for node in cell.nodes:
            if f"{cell.path}.{node.name}" == point.name:
                read = {f"{cell.path}.{name}" for name in node.inputs}
                result = [p for p in capture.points if p.name in read]
                return min(result, key=lambda p: p.ours.sqnr, default=None)
    earlier = capture.points[: capture.points.index(point)]
    return next((p for p in reversed(earlier) if p.kind is not results.Kind.PART and p.ours.qparams), None)


# Comparisons as tables on a terminal.


STYLES = {results.Status.WORSE: "bold red", results.Status.WITHOUT_FX: "bold yellow"}
WIDTH = 200
#: The width from which both sides have columns of their own.
WIDE = 150
#: The maximum number of places shown for one reason.
MAX_ALIKE = 6
UNSATURATED = "0.00%"


def _decibels(side: results.Side | None) -> str:
    return decibel_text(side.sqnr).removesuffix(" dB") if side else ""


def _saturated(side: results.Side | None) -> str:
    return "" if side is None or side.saturated is None else f"{side.saturated:.2%}"


def _steps(steps: float) -> str:
    return f"{steps:.0f}" if steps >= 10 else f"{steps:.2g}"


def _fx_qparams(point: results.Point) -> str:
    if point.fx is None:
        return ""
    ours, fx = point.ours.qparams, point.fx.qparams
    return "same" if ours is not None and fx is not None and ours.same_qparams(fx) else qparams_text(fx)


#: Column -> its cell for a point, empty where there is nothing.
COLUMNS: dict[str, Callable[[results.Point], str]] = {
    "where": lambda point: point.name,
    "what": lambda point: "" if point.kind is results.Kind.OUTPUT else point.operation,
    "here": lambda point: qparams_text(point.ours.qparams),
    "FX": _fx_qparams,
    "dB here": lambda point: _decibels(point.ours),
    "dB FX": lambda point: _decibels(point.fx),
    "differ": lambda point: f"{point.steps.share:.2%}" if point.steps else "",
    "steps": lambda point: _steps(point.steps.largest) if point.steps else "",
    "saturated": lambda point: _saturated(point.ours),
    "in FX": lambda point: _saturated(point.fx),
}


def as_text(comparisons: Iterable[results.ComparedModel]) -> str:
    """Return the tables without colour, each row one line."""
    console = Console(file=io.StringIO(), width=WIDTH, record=True)
    print_report(comparisons, console)
    return "\n".join(line.rstrip() for line in console.export_text().splitlines())


def print_report(comparisons: Iterable[results.ComparedModel], console: Console) -> None:
    """Print the tables; each row of the narrow one is folded to the width."""
    for comparison in comparisons:
        verdict, capture = comparison.verdict, comparison.capture
        costs = Table(box=None, pad_edge=False, header_style="bold")
        for index, column in enumerate(("model", "bytes of state", "of float", "ms per call", "of float")):
            costs.add_column(column, justify="right" if index else "left")
        for row in cost_rows(capture.costs):
            costs.add_row(*row)
        parts: list[RenderableType] = [
            Text(f"{capture.model}: {verdict.status.value}", style=STYLES.get(verdict.status, "bold green")),
            Text(verdict.headline),
            Text(summary_sentence(comparison)),
            Text(),
            _points_table((*capture.outputs, *capture.points), console.width),
            Text(),
            costs,
        ]
        if verdict.findings:
            parts += [Text(), Text("What differs, and why", style="bold"), *_findings(comparison)]
        console.print(Group(*parts))


def _points_table(points: Sequence[results.Point], width: int) -> Text:
    rows = point_rows(points)
    if width >= WIDE:
        return Text(folded_table((*COLUMNS, ""), [(*row, "") for row in rows], width), no_wrap=True)
    narrow = []
    for point, (where, what, here, _, decibels, *_) in zip(points, rows, strict=True):
        # The other forms of the report list all pairs of qparams.
        pairs = f"{here.split()[0]} {here.count('|') + 1} pairs" if "|" in here else here
        narrow.append((where, what, pairs, decibels, _beside(point)))
    return Text(folded_table(("where", "what", "here", "dB", ""), narrow, width), no_wrap=True)


def _beside(point: results.Point) -> str:
    """Return the note that a narrow table has in place of columns: saturation, and FX."""
    cells = {name: cell(point) for name, cell in COLUMNS.items()}
    texts = [f"FX {cells['FX']}" if point.fx else "", f"{cells['dB FX']} dB" if point.fx else ""]
    if point.steps:
        texts.append(f"{cells['differ']} differ, by {cells['steps']} steps at most")
    if cells["in FX"] not in ("", UNSATURATED):
        texts.append(f"{cells['in FX']} saturated")
    ours = f"{cells['saturated']} saturated" if cells["saturated"] not in ("", UNSATURATED) else ""
    return "; ".join(filter(None, (ours, ", ".join(filter(None, texts)))))


def point_rows(points: Iterable[results.Point]) -> list[tuple[str, ...]]:
    """Return the cells of ``COLUMNS`` for each of ``points``."""
    return [tuple(cell(point) for cell in COLUMNS.values()) for point in points]


def cost_rows(costs: results.Costs) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield (side, bytes of state, relative to float, ms per call, relative to float)."""
    for side, size, time in (
        ("float", costs.float_bytes, costs.float_ms),
        ("here", costs.our_bytes, costs.our_ms),
        ("FX", costs.fx_bytes, costs.fx_ms),
    ):
        if size is not None and time is not None:
            of_size = f"{size / costs.float_bytes:.2f}x" if costs.float_bytes else "-"
            yield side, f"{size:,}", of_size, f"{time:.3g}", f"{time / costs.float_ms:.2f}x"


def findings_by_reason(findings: Iterable[results.Finding]) -> list[tuple[results.Finding, ...]]:
    """Return the findings in groups with the same reason, in the order of the first of each group."""
    groups: dict[tuple[str, str], list[results.Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.why, finding.link), []).append(finding)
    return list(map(tuple, groups.values()))


def _findings(comparison: results.ComparedModel) -> Iterator[RenderableType]:
    for alike in findings_by_reason(comparison.verdict.findings):
        for finding in alike[:MAX_ALIKE]:
            yield Text(f"  {finding.where}: {finding.what}")
        if len(alike) > MAX_ALIKE:
            yield Text(f"  and {counted(len(alike) - MAX_ALIKE, 'more place')}; --html and --json have them")
        yield Text(f"    {alike[0].why}")
        if alike[0].link:
            yield Text(f"    {alike[0].link}", style="dim")


# Comparisons as JSON.


#: Increased when this format changes.
FORMAT_VERSION = 1


def report_data(comparisons: Iterable[results.ComparedModel]) -> dict[str, Any]:
    """Return the data that ``torchq-compat compare --json`` prints."""
    return {"version": FORMAT_VERSION, "comparisons": [as_data(comparison) for comparison in comparisons]}


def as_data(comparison: results.ComparedModel) -> dict[str, Any]:
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
            "unlike_fx": [asdict(place) for place in capture.unlike_fx],
            "costs": asdict(capture.costs),
            "fx": {**asdict(capture.fx), "outcome": capture.fx.outcome.value},
        }
    )
    return data


def _point(point: results.Point) -> dict[str, Any]:
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
