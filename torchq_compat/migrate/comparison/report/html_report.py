"""Comparisons as one HTML page that needs nothing from anywhere: plots are inside it, as data."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchq_compat.errors import ReportError
from torchq_compat.migrate.comparison.causes import qparams_text
from torchq_compat.migrate.comparison.report.terminal_report import COLUMNS, cost_rows, point_row
from torchq_compat.migrate.comparison.results import ComparedModel
from torchq_compat.support.atomic_files import write_whole

__all__ = ["check_page", "page", "write_page"]

#: The packages of the ``report`` extra.
PACKAGES = ("jinja2", "matplotlib")
TEMPLATE = Path(__file__).with_name("page.html.j2")


@dataclass(frozen=True)
class Plot:
    """A picture: its heading, what it shows in a sentence, and its data URI."""

    heading: str
    caption: str
    image: str


def check_page(path: Path) -> None:
    """Raise a ReportError unless a page could be written to ``path``: before a long run, not after."""
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise ReportError(
                f"the HTML page needs {package}, which is not installed.",
                hint="pip install 'torchq-compat[report]'; the table and --json need nothing more.",
            )
    if path.is_dir():
        raise _no_place(str(path), "it is a directory")
    if not path.absolute().parent.is_dir():
        raise _no_place(str(path), "its folder is not there")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise _no_place(str(path), "no permission to write")


def write_page(comparisons: Sequence[ComparedModel], path: Path) -> None:
    """Write the page in one step.

    Raises:
        ReportError: the ``report`` extra is missing, or the page has no place.
    """
    check_page(path)
    content = page(comparisons)
    try:
        write_whole(path.absolute(), content)
    except OSError as error:
        raise _no_place(str(path), error.strerror or str(error)) from error


def page(comparisons: Sequence[ComparedModel]) -> str:
    """Return the page as text."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["qparams"] = qparams_text
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        columns=COLUMNS,
        sections=[
            {
                "capture": comparison.capture,
                "verdict": comparison.verdict,
                "outputs": [point_row(point) for point in comparison.capture.outputs],
                "points": [point_row(point) for point in comparison.capture.points],
                "costs": list(cost_rows(comparison.capture.costs)),
                "plots": list(_plots(comparison)),
            }
            for comparison in comparisons
        ],
    )


def _plots(comparison: ComparedModel) -> Iterator[Plot]:
    from torchq_compat.migrate.comparison.report import plots

    capture = comparison.capture
    yield Plot(
        "Error per layer",
        "SQNR against the float model at every place, in the order of computation; higher is nearer to "
        "float.",
        plots.error_per_place(capture),
    )
    for series in capture.series:
        yield Plot(
            f"Float against quantized: {series.output} over {series.axis}",
            f"{series.where}, where the sides are farthest from float."
            if series.where
            else "The whole output.",
            plots.over_time(series),
        )
    for title, points in plots.histogram_groups(capture):
        yield Plot(
            f"Values against the qparams: {title}",
            "The float model's values; shaded is what the qparams cover, dashed their ends, ticks are their "
            "steps (at most 64 drawn).",
            plots.histograms(points),
        )
    for cell in capture.cells:
        yield Plot(
            f"Cell {cell.path}",
            "Each part with the quantize and dequantize behind it: dtype, scale/zero point here, and in FX "
            "where it differs. Colours are dtypes.",
            plots.cell_chain(cell, capture),
        )


def _no_place(path: str, problem: str) -> ReportError:
    return ReportError(
        f"the page cannot be written to {path!r}: {problem}.", hint="name a file in a folder there is."
    )
