"""Comparisons as tables on a terminal."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from torchq_compat.migrate.comparison.causes import qparams_text
from torchq_compat.migrate.comparison.report.summary_sentence import summary_sentence
from torchq_compat.migrate.comparison.results import ComparedModel, Costs, Finding, Kind, Point, Side, Status
from torchq_compat.migrate.comparison.verdict import decibel_text
from torchq_compat.support.showing.rows import counted
from torchq_compat.support.showing.text_table import folded_prefixes, text_table

__all__ = [
    "as_text",
    "cost_rows",
    "findings_by_reason",
    "point_row",
    "print_report",
    "renderable",
    "step_text",
]

STYLES = {Status.WORSE: "bold red", Status.WITHOUT_FX: "bold yellow"}
WIDTH = 200
#: The width from which both sides have columns of their own.
WIDE = 150
COLUMNS = ("where", "what", "here", "FX", "dB here", "dB FX", "differ", "steps", "saturated", "in FX")
#: The maximum number of places shown for one reason.
MAX_ALIKE = 6
NONE, UNSATURATED = "-", "0.00%"


def print_report(comparisons: Iterable[ComparedModel], console: Console) -> None:
    for comparison in comparisons:
        console.print(renderable(comparison, console.width))


def as_text(comparisons: Iterable[ComparedModel]) -> str:
    """Return the tables without colour, each row one line."""
    console = Console(file=io.StringIO(), width=WIDTH, no_color=True)
    print_report(comparisons, console)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def renderable(comparison: ComparedModel, width: int = WIDTH) -> RenderableType:
    verdict, capture = comparison.verdict, comparison.capture
    style = STYLES.get(verdict.status, "bold green")
    parts: list[RenderableType] = [
        Text(f"{capture.model}: {verdict.status.value}", style=style),
        Text(verdict.headline),
        Text(summary_sentence(comparison)),
        Text(),
        _points_table((*capture.outputs, *capture.points), width),
        Text(),
        _costs_table(capture.costs),
    ]
    if verdict.findings:
        parts += [Text(), Text("What differs, and why", style="bold"), *_findings(comparison)]
    return Group(*parts)


def _points_table(points: Iterable[Point], width: int) -> Text:
    rows: list[tuple[str, ...]] = [
        tuple("" if cell == NONE else cell for cell in point_row(point)) for point in points
    ]
    header: tuple[str, ...] = COLUMNS
    if width < WIDE:
        header = ("where", "what", "here", "dB", "")
        rows = [(*row[:2], _one_of_several(row[2]), row[4], _beside(row)) for row in rows]
    else:
        header, rows = (*header, ""), [(*row, "") for row in rows]
    shown: list[tuple[str, ...]] = []
    for (above, name), row in zip(folded_prefixes([row[0] for row in rows]), rows, strict=True):
        if above:
            shown.append((above, *[""] * (len(header) - 1)))
        shown.append((name, *row[1:]))
    return Text(text_table(header, shown, width), no_wrap=True)


def _one_of_several(qparams: str) -> str:
    """Return qparams shortened for a narrow column; the other forms of the report list all pairs."""
    return f"{qparams.split()[0]} {qparams.count('|') + 1} pairs" if "|" in qparams else qparams


def _beside(row: tuple[str, ...]) -> str:
    """Return the note that a narrow table has in place of columns: saturation, and FX."""
    fx, decibels, share, steps, here, there = row[3], row[5], row[6], row[7], row[8], row[9]
    told = [f"FX {fx}" if fx else "", f"{decibels} dB" if decibels else ""]
    if share:
        told.append(f"{share} differ, by {steps} steps at most")
    if there and there != UNSATURATED:
        told.append(f"{there} saturated")
    ours = f"{here} saturated" if here and here != UNSATURATED else ""
    return "; ".join(filter(None, (ours, ", ".join(filter(None, told)))))


def point_row(point: Point) -> tuple[str, ...]:
    """Return the cells of ``COLUMNS``."""
    ours, fx, steps = point.ours, point.fx, point.steps
    same = (
        fx is not None
        and fx.qparams is not None
        and ours.qparams is not None
        and ours.qparams.same_qparams(fx.qparams)
    )
    return (
        point.name,
        "" if point.kind is Kind.OUTPUT else point.operation,
        qparams_text(ours.qparams),
        NONE if fx is None else "same" if same else qparams_text(fx.qparams),
        _decibels(ours),
        NONE if fx is None else _decibels(fx),
        NONE if steps is None else f"{steps.share:.2%}",
        NONE if steps is None else step_text(steps.largest),
        _saturated(ours),
        NONE if fx is None else _saturated(fx),
    )


def step_text(steps: float) -> str:
    return f"{steps:.0f}" if steps >= 10 else f"{steps:.2g}"


def _decibels(side: Side) -> str:
    return decibel_text(side.sqnr).removesuffix(" dB")


def _saturated(side: Side) -> str:
    return NONE if side.saturated is None else f"{side.saturated:.2%}"


def cost_rows(costs: Costs) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield (side, bytes of state, relative to float, ms per call, relative to float)."""
    for side, size, time in (
        ("float", costs.float_bytes, costs.float_ms),
        ("here", costs.our_bytes, costs.our_ms),
        ("FX", costs.fx_bytes, costs.fx_ms),
    ):
        if size is not None and time is not None:
            of_size = f"{size / costs.float_bytes:.2f}x" if costs.float_bytes else NONE
            yield side, f"{size:,}", of_size, f"{time:.3g}", f"{time / costs.float_ms:.2f}x"


def _costs_table(costs: Costs) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(("model", "bytes of state", "of float", "ms per call", "of float")):
        table.add_column(column, justify="right" if index else "left")
    for row in cost_rows(costs):
        table.add_row(*row)
    return table


def findings_by_reason(findings: Iterable[Finding]) -> list[tuple[Finding, ...]]:
    """Return the findings in groups with the same reason, in the order of the first of each group."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.why, finding.link), []).append(finding)
    return list(map(tuple, groups.values()))


def _findings(comparison: ComparedModel) -> Iterator[RenderableType]:
    for alike in findings_by_reason(comparison.verdict.findings):
        for finding in alike[:MAX_ALIKE]:
            yield Text(f"  {finding.where}: {finding.what}")
        if len(alike) > MAX_ALIKE:
            yield Text(f"  and {counted(len(alike) - MAX_ALIKE, 'more place')}; --html and --json have them")
        yield Text(f"    {alike[0].why}")
        if alike[0].link:
            yield Text(f"    {alike[0].link}", style="dim")
