"""Comparisons as one self-contained HTML page, with the pictures inside."""

from __future__ import annotations

import datetime
import importlib.util
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from torchq_compat.errors import ReportError
from torchq_compat.migrate.comparison.report.page_tables import bars, page_table
from torchq_compat.migrate.comparison.report.summary_sentence import grade, summary_sentence, worst_places
from torchq_compat.migrate.comparison.report.terminal_report import cost_rows, findings_by_reason
from torchq_compat.migrate.comparison.results import ComparedModel, FxOutcome, Point
from torchq_compat.support.atomic_files import write_whole

__all__ = ["check_page", "page", "write_page"]

#: The packages of the ``report`` extra.
PACKAGES = ("jinja2", "matplotlib")
VERSIONS_OF = ("torchq-compat", "torch", "torchao")
TEMPLATE = Path(__file__).with_name("page.html.j2")


@dataclass(frozen=True)
class Picture:
    """One drawing: its label and its SVG."""

    label: str
    svg: str


@dataclass(frozen=True)
class Plots:
    """Pictures under one heading; ``layout`` is the CSS class of their container."""

    heading: str
    caption: str
    layout: str
    pictures: tuple[Picture, ...]


def check_page(path: Path) -> None:
    """Raise a ReportError, before a long run, if a page could not be written to ``path``."""
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise ReportError(
                f"the HTML page needs {package}, which is not installed.",
                hint="pip install 'torchq-compat[report]'; the table and --json need nothing more.",
            )
    if path.is_dir():
        raise _no_place(str(path), "it is a directory")
    if not path.absolute().parent.is_dir():
        raise _no_place(str(path), "its folder does not exist")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise _no_place(str(path), "no permission to write")


def write_page(comparisons: Sequence[ComparedModel], path: Path) -> None:
    """Write the page in one step.

    Raises:
        ReportError: the ``report`` extra is missing, or the page cannot be written.
    """
    check_page(path)
    content = page(comparisons)
    try:
        write_whole(path.absolute(), content)
    except OSError as error:
        raise _no_place(str(path), error.strerror or str(error)) from error


def page(comparisons: Sequence[ComparedModel]) -> str:
    """Return the page as HTML text."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["grade"] = grade
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(sections=list(map(_section, comparisons)), facts=_made_by())


def _section(comparison: ComparedModel) -> dict[str, Any]:
    capture = comparison.capture
    worst = worst_places(capture)
    plots = list(_plots(comparison))
    contents = {
        "worst": ("Worst places", worst),
        "differs": ("What differs", comparison.verdict.findings),
        "error": ("Error", True),
        "outputs": ("Outputs", capture.outputs),
        "places": ("All places", capture.points),
        "costs": ("Size and latency", True),
        "plots": ("Pictures", plots),
    }
    return {
        "capture": capture,
        "verdict": comparison.verdict,
        "sentence": summary_sentence(comparison),
        "findings": findings_by_reason(comparison.verdict.findings),
        "has_fx": any(point.fx is not None for point in (*capture.outputs, *capture.points)),
        "worst": worst,
        "bars": bars(capture, [place for place, _ in worst]),
        "outputs": page_table(capture.outputs),
        "points": page_table(capture.points),
        "costs": list(cost_rows(capture.costs)),
        "plots": plots,
        "contents": [(anchor, title) for anchor, (title, content) in contents.items() if content],
    }


def _plots(comparison: ComparedModel) -> Iterator[Plots]:
    from torchq_compat.migrate.comparison.report import plots

    capture = comparison.capture
    for series in capture.series:
        yield Plots(
            f"Float against quantized: {series.output} over {series.axis}",
            f"{series.where}, where the sides are farthest from float."
            if series.where
            else "The whole output.",
            "one",
            (Picture("", plots.over_time(series)),),
        )
    for title, points in plots.histogram_groups(capture):
        if points:
            yield Plots(
                f"Values against the qparams: {title}",
                "The float model's values; the integers cover the shaded range between the dashed lines, "
                "and ticks are their steps (at most 64 are drawn).",
                "several",
                tuple(
                    Picture(", ".join(point.name for point in alike), plots.histogram(alike))
                    for alike in _alike(points)
                ),
            )
    for cell in capture.cells:
        yield Plots(
            f"Cell {cell.path}",
            "Each part with the quantize and dequantize behind it: dtype, s the scale, z the zero point"
            f"{', and in FX where it differs' if capture.fx.outcome is FxOutcome.RAN else ''}. "
            "Colours are dtypes.",
            "scrolled",
            (Picture("", plots.cell_chain(cell, capture)),),
        )


def _alike(points: Iterable[Point]) -> Iterable[list[Point]]:
    """Return the points in groups that one picture can show."""
    groups: dict[object, list[Point]] = {}
    for point in points:
        fx = point.fx.qparams if point.fx else None
        groups.setdefault((point.histogram, point.ours.qparams, fx), []).append(point)
    return groups.values()


def _no_place(path: str, problem: str) -> ReportError:
    return ReportError(
        f"the page cannot be written to {path!r}: {problem}.", hint="name a file in a folder there is."
    )


def _made_by() -> dict[str, str]:
    """Return label -> text, for the versions and machine of the report."""
    return {
        "versions": ", ".join(
            filter(None, (*map(_version, VERSIONS_OF), f"Python {platform.python_version()}"))
        ),
        "date": datetime.date.today().isoformat(),
        "processor": f"{_processor()}, {os.cpu_count()} cores",
        "command": _command(),
    }


def _version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return ""


def _processor() -> str:
    """Return the name of the processor; Linux has it in a file, elsewhere ``platform`` is used."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def _command() -> str:
    name = Path(sys.argv[0]).name
    if name in ("torchq-compat", "__main__.py") and len(sys.argv) > 1:
        return shlex.join(["torchq-compat", *sys.argv[1:]])
    return "torchq_compat.compare(...)"
