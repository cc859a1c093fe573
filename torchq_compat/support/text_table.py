"""Tables of text that fit a terminal, and progress lines."""

from __future__ import annotations

import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

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
        told = [each[index] if index < len(each) else "" for each in wrapped]
        line = GAP.join(cell.ljust(width) for cell, width in zip(told, widths, strict=True))
        lines.append(f"{line}{GAP}{note}" if note and not index else line)
    return lines


# Progress lines on the terminal for slow stages.


#: Seconds before the first line, and between lines.
PATIENCE = 5.0


def _is_notebook() -> bool:
    """Return whether the standard streams go to the cells of a notebook."""
    return type(sys.stderr).__module__.startswith("ipykernel.")


@contextmanager
def slow_stage(what: str) -> Iterator[None]:
    """Print ``what`` and the elapsed time while a slow stage runs, in a terminal or a notebook only."""
    if not (sys.stderr.isatty() or _is_notebook()):
        yield
        return
    done, start = threading.Event(), time.monotonic()

    def tell() -> None:
        while not done.wait(PATIENCE):
            print(f"torchq_compat: {what}, {time.monotonic() - start:.0f} s", file=sys.stderr)

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()
