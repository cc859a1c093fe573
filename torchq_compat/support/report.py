"""The rows of ``explain``, as text for a terminal and as HTML for a notebook."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Tables of text that fit a terminal: empty columns are left out, and a common prefix is shown once.


#: The least width of a table, and the width if the output is not a terminal.
LEAST, ELSEWHERE = 80, 100
GAP, BELOW = "  ", "      "
#: A column is not made narrower than this.
NARROWEST = 12
#: The number of consecutive rows below one path from which the path gets a line of its own.
WORTH_FOLDING = 3


def fitted_width() -> int:
    """Return the width of the terminal, at least 80; 100 if there is no terminal."""
    return max(LEAST, shutil.get_terminal_size((ELSEWHERE, 24)).columns)


def columns_with_content(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[int]:
    """Return the indices of the columns that are not empty in every row."""
    rows = list(rows)
    return [index for index in range(len(header)) if any(row[index] for row in rows)]


def folded_prefixes(paths: Sequence[str]) -> list[tuple[str, str]]:
    """Return, for each path, the line to put before it and the text to show.

    If three or more consecutive paths begin with the same module path, that path gets a line of its own, and
    the paths below that line are shown without it.
    """
    shown: list[tuple[str, str]] = []
    parents = [path.rpartition(".")[0] for path in paths]
    start = 0
    while start < len(paths):
        parent, end = parents[start], start
        while parent and end < len(paths) and _is_near(paths[end], parent):
            end += 1
        if end - start < WORTH_FOLDING:
            shown.append(("", paths[start]))
            start += 1
            continue
        for index in range(start, end):
            leaf = paths[index].removeprefix(f"{parent}.")
            shown.append((parent if index == start else "", f"  .{leaf}"))
        start = end
    return shown


def _is_near(path: str, parent: str) -> bool:
    """Return whether ``path`` is a name directly below ``parent``, or the weight or input of such a name."""
    return path.startswith(f"{parent}.") and path.removeprefix(parent).count(".") <= 2


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> str:
    """Return a table without rules that fits ``width``.

    The last column holds sentences; if they do not fit beside the other columns, they follow on their own
    lines. A row with only its first cell is a line of its own.
    """
    kept = columns_with_content(header[:-1], rows)
    widths = [max(len(row[index]) for row in (header, *rows) if _is_row(row)) for index in kept]
    for column in (1, 0):
        over = sum(widths) + len(GAP) * (len(widths) - 1) - width
        if over > 0 and column < len(widths):
            widths[column] = max(NARROWEST, widths[column] - over)
    notes = [row[-1] for row in rows]
    behind = width - sum(widths) - len(GAP) * len(widths)
    beside = max(map(len, notes), default=0) <= behind
    lines = _cells([header[index] for index in kept], widths, header[-1] if beside and any(notes) else "")
    for row in rows:
        if not _is_row(row):
            lines += textwrap.wrap(row[0], width)
            continue
        lines += _cells([row[index] for index in kept], widths, row[-1] if beside else "")
        if row[-1] and not beside:
            lines += textwrap.wrap(row[-1], width, initial_indent=BELOW, subsequent_indent=BELOW)
    return "\n".join(line.rstrip() for line in lines)


def _is_row(row: Sequence[str]) -> bool:
    return any(row[1:])


def _wrapped(cell: str, width: int) -> list[str]:
    """Return the lines of ``cell``, each with the indent of ``cell``."""
    indent = cell[: len(cell) - len(cell.lstrip())]
    return textwrap.wrap(cell.lstrip(), width, initial_indent=indent, subsequent_indent=indent) or [""]


def _cells(cells: Sequence[str], widths: Sequence[int], note: str) -> list[str]:
    wrapped = [_wrapped(cell, width) for cell, width in zip(cells, widths, strict=True)]
    lines = []
    for index in range(max(map(len, wrapped))):
        texts = [item[index] if index < len(item) else "" for item in wrapped]
        line = GAP.join(cell.ljust(width) for cell, width in zip(texts, widths, strict=True))
        lines.append(f"{line}{GAP}{note}" if note and not index else line)
    return lines


# Progress lines on the terminal for slow stages.


#: Seconds before the first line; each later wait is half as long again.
PATIENCE = 2.0
#: Set by ``--quiet``, also for the processes that a command starts.
QUIET = "TORCHQ_COMPAT_QUIET"
_is_inside: ContextVar[bool] = ContextVar("is_inside", default=False)


def shows_progress() -> bool:
    """Return whether standard error is a terminal or a notebook's cell, and progress is not switched off."""
    is_watched = sys.stderr.isatty() or type(sys.stderr).__module__.startswith("ipykernel.")
    return is_watched and not os.environ.get(QUIET)


@contextmanager
def slow_stages(what: str) -> Iterator[Callable[[str], None]]:
    """Yield a function that names the stage that begins.

    Where progress is shown, a long run prints its stage and time so far, and at the end the time of each
    stage; a run inside another prints nothing of its own.
    """
    if _is_inside.get() or not shows_progress():
        yield lambda stage: None
        return
    stages = [("", time.monotonic())]
    token, done = _is_inside.set(True), threading.Event()

    def begin(stage: str) -> None:
        stages.append((stage, time.monotonic()))

    def print_stages() -> None:
        wait = PATIENCE
        while not done.wait(wait):
            seconds = time.monotonic() - stages[0][1]
            where = ": ".join(filter(None, (what, stages[-1][0])))
            print(f"torchq_compat: {where}, {seconds:.0f} s", file=sys.stderr)
            wait *= 1.5

    printer = threading.Thread(target=print_stages, daemon=True)
    printer.start()
    try:
        yield begin
    finally:
        done.set()
        printer.join()
        _is_inside.reset(token)
    begin("")
    seconds = stages[-1][1] - stages[0][1]
    longest = sorted(((end - start, stage) for (stage, start), (_, end) in pairwise(stages)), reverse=True)
    times = ", ".join(f"{stage} {taken:.1f} s" for taken, stage in longest[:3] if stage)
    if seconds >= PATIENCE:
        print(f"torchq_compat: {what} took {seconds:.1f} s" + (times and f": {times}"), file=sys.stderr)


# The rows of ``explain``: decisions, their weights and inputs, and the counts of all rows.


Role = Literal["op", "part", "input", "weight", "batch norm", "size", "setting", "lowering"]

#: The roles of rows that are counted as ops of the model.
OPS: tuple[Role, ...] = ("op",)


@dataclass(frozen=True)
class Row:
    """One row of a report.

    Attributes:
        path: module path; ``scope/node`` for a function; ``path.weight`` and ``path.input`` for the values
            that an op reads as integers.
        role: what the row is about.
        kind: module class, operator, or a part's formula.
        action: ``quantized``, ``shared``, ``float``, ``dropped``, ``folded``, ``free``, ``fixed``,
            ``lowered`` or ``reference``.
        dtype: the integer dtype, without ``torch.``; empty if there is none.
        scale: the scale per tensor; None if it is per channel, chosen at run time or not known yet.
        zero_point: the zero point, or None as for ``scale``.
        channels: the number of scales; None if there is one.
        runs_as: what the op runs as after ``convert_fx``; empty if this is not known.
        on_integers: whether the op runs on an integer kernel; None if this is not known.
        reason: why; it names the setting that decided.
        code: the code in the register, of a decision that matters.
    """

    path: str
    role: Role
    kind: str
    action: str
    dtype: str = ""
    scale: float | None = None
    zero_point: int | None = None
    channels: int | None = None
    runs_as: str = ""
    on_integers: bool | None = None
    reason: str = ""
    code: str = ""

    @property
    def note(self) -> str:
        """The reason with the code behind it."""
        return f"{self.reason} [{self.code}]" if self.code else self.reason

    def as_dict(self) -> dict[str, Any]:
        """Return the row as plain values."""
        return dict(vars(self))


def counted(count: int, what: str, plural: str = "") -> str:
    """Return ``1 file`` or ``2 files``."""
    return f"{count} {what if count == 1 else plural or what + 's'}"


def headline(rows: Sequence[Row]) -> str:
    """Return the counts of ``rows``: ``14 quantized, 0 float, 1 batch norm folded``."""
    ops = Counter(row.action for row in rows if row.role in OPS)
    parts = sum(row.role == "part" for row in rows)
    folded = sum(row.role == "batch norm" for row in rows)
    in_floats = sum(row.on_integers is False for row in rows if row.role in OPS)
    texts = [f"{ops['quantized']} quantized"]
    if parts:
        texts[0] += f" ({counted(parts, 'part')} inside)"
    if ops["shared"]:
        texts.append(f"{ops['shared']} on {'its' if ops['shared'] == 1 else 'their'} input's qparams")
    texts.append(f"{ops['float']} float")
    if folded:
        texts.append(f"{counted(folded, 'batch norm')} folded")
    if dropped := sum(row.role == "setting" for row in rows):
        texts.append(f"{counted(dropped, 'setting')} without effect")
    if in_floats:
        texts.append(f"{in_floats} between q-dq without an integer kernel")
    return ", ".join(texts)


def default_reason(rows: Iterable[Row]) -> str:
    """Return the reason that most quantized ops have, to be shown once; empty if no two ops share it."""
    plain = (row for row in rows if row.role == "op" and row.action == "quantized" and not row.code)
    reasons = Counter(row.reason for row in plain)
    (reason, count), *_ = reasons.most_common(1) or [("", 0)]
    return reason if count > 1 else ""


# A report of ``explain`` as text: the counts, then the model in its order, then the sizes of the inputs.


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
        blocks.append(folded_table(HEADER, [cells(row, common) for row in model], width))
    if common:
        blocks.append(f"Reason, unless noted otherwise: {common}.")
    if sizes:
        blocks.append(
            folded_table(SIZES, [(row.path, row.kind, row.action, row.note) for row in sizes], width)
        )
    return "\n\n".join(blocks)


def cells(row: Row, common: str) -> tuple[str, ...]:
    """Return the cells of the table for ``row``; a reason equal to ``common`` is left out."""
    reason = "" if row.note in (common, OF_PARTS) else row.note.removeprefix(f"{OF_PARTS}; ")
    if row.action == "shared" and not row.code:
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


def folded_table(header: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> str:
    """Return ``text_table`` with the paths in the first column folded."""
    lines: list[tuple[str, ...]] = []
    for (above, path), row in zip(folded_prefixes([row[0] for row in rows]), rows, strict=True):
        if above:
            lines.append((above, *[""] * (len(header) - 1)))
        lines.append((path, *row[1:]))
    return text_table(header, lines, width)


# A report of ``explain`` as HTML for a notebook cell, without scripts or styles that affect other cells.


CELL = "text-align:left;vertical-align:top;padding:2px 10px 2px 0"


def report_html(rows: Sequence[Row]) -> str:
    """Return the headline, and the table in a ``<details>`` that is open if the table is short."""
    common = default_reason(rows)
    shown = [
        cells(row, common) if row.role != "size" else (row.path, row.kind, row.action, "", "", row.note)
        for row in rows
    ]
    state = " open" if len(shown) <= 40 else ""
    why = f"<p>Reason, unless noted otherwise: {escape(common)}.</p>" if common else ""
    return (
        f"<div><p><b>{escape(headline(rows))}</b></p><details{state}><summary>{len(rows)} rows</summary>"
        f"{html_table(HEADER, shown)}{why}</details></div>"
    )


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of ``rows`` without the empty columns."""
    kept = columns_with_content(header, rows)
    head = "".join(f'<th style="{CELL}">{escape(header[index])}</th>' for index in kept)
    lines = [
        "<tr>" + "".join(f'<td style="{CELL}">{escape(row[index])}</td>' for index in kept) + "</tr>"
        for row in rows
    ]
    return (
        f'<div style="overflow-x:auto"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


# The ranges of a calibrated model, as a plot.


@dataclass(frozen=True)
class ObservedRange:
    """What an observer has seen, and what its qparams cover; minima and maxima in units of the value.

    Attributes:
        path: the place of the value, as in the report.
        dtype: the integer dtype, without ``torch.``.
        least: the least value seen; ``largest`` the largest.
        first: the least value that an integer stands for; ``last`` the largest.
        clipped: the share of the values seen that is beyond, by the observer's histogram; None without one.
    """

    path: str
    dtype: str
    least: float
    largest: float
    first: float
    last: float
    clipped: float | None = None


def range_plot(ranges: Sequence[ObservedRange]) -> Figure:
    """Return a figure with a line for each range: what was seen, what is covered, what is clipped."""
    # A Figure of its own needs no window system, and leaves pyplot's figures alone.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1 + 0.22 * len(ranges)), layout="constrained")
    axes = figure.subplots()
    for row, place in enumerate(ranges):
        # In shares of the largest magnitude, so that layers of any size are seen beside each other.
        unit = max(map(abs, (place.least, place.largest, place.first, place.last))) or 1.0
        seen, covered = (place.least, place.largest), (place.first, place.last)
        axes.plot([value / unit for value in covered], [row, row], color="#9ecae1", linewidth=7)
        axes.plot([value / unit for value in seen], [row, row], color="#08519c", linewidth=2)
        if place.clipped:
            axes.annotate(
                f"{place.clipped:.2%} clipped", (1.02, row), va="center", fontsize=7, color="#a50f15"
            )
    axes.set_yticks(range(len(ranges)), [f"{place.path} ({place.dtype})" for place in ranges], fontsize=7)
    axes.set(ylim=(len(ranges) - 0.5, -0.5), xlim=(-1.05, 1.3), xlabel="share of the largest magnitude")
    axes.set_title("dark: values seen; light: values that the integers cover", fontsize=9)
    return figure
