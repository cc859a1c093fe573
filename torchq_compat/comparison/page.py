"""Comparisons as one self-contained HTML page, and in a notebook."""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torchq_compat.comparison import text as texts
from torchq_compat.comparison.causes import decibel_text
from torchq_compat.comparison.results import ComparedModel, FxOutcome, Point, QParamsView, Side
from torchq_compat.errors import ScriptError, install_extra
from torchq_compat.port.process import package_version
from torchq_compat.support.argument_checks import PATH, checked_arguments
from torchq_compat.support.atomic_files import write_whole
from torchq_compat.support.decisions import data_frame
from torchq_compat.support.report import html_table

if TYPE_CHECKING:
    import pandas as pd

NoisyT = TypeVar("NoisyT", Point, texts.PointGroup)

# The tables and bars of the page; a column that would be empty is left out.


#: The SQNR in dB from which noise is not shown: the bar has no length.
INVISIBLE = 60.0
#: Of more places than this, the page shows bars and histograms for the noisiest.
MOST_BARS, MOST_HISTOGRAMS = 60, 24


def noisiest(items: list[NoisyT], most: int) -> list[NoisyT]:
    """Return the ``most`` points or places with the most noise here, in the order of ``items``."""
    by_noise = sorted(range(len(items)), key=lambda index: items[index].ours.sqnr)
    return [items[index] for index in sorted(by_noise[:most])]


def bar_length(sqnr: float) -> float:
    """Return the length of a bar, which shows the noise, in percent of the place for it."""
    return (INVISIBLE - max(0.0, min(sqnr, INVISIBLE))) / INVISIBLE * 78


def page_table(points: Sequence[Point]) -> list[tuple[list[str], dict[str, str]]]:
    """Return the names and the cells of each place, without the columns that would be empty."""
    places = texts.distinct_places(points)
    kept = {title: of for title, of in PAGE_COLUMNS.items() if any(of(place.point) for place in places)}
    return [(place.names, {title: of(place.point) for title, of in kept.items()}) for place in places]


def _qparams(read: Callable[[QParamsView], str], *, of_fx: bool = False) -> Callable[[Point], str]:
    # Values that are the same here and in FX are shown once.
    otherwise = read is not _dtype

    def cell(point: Point) -> str:
        ours, side = point.ours.qparams, point.fx if of_fx else point.ours
        if side is None or side.qparams is None:
            return "" if side is None or otherwise else "float"
        if of_fx and ours is not None and ours.same_qparams(side.qparams):
            return "" if otherwise else "same"
        shown = read(side.qparams)
        return "" if of_fx and otherwise and ours is not None and shown == read(ours) else shown

    return cell


def _dtype(qparams: QParamsView) -> str:
    limits = "" if qparams.is_full_range else f" in {qparams.quant_min} to {qparams.quant_max}"
    return f"{qparams.dtype}{limits}"


def _scale(qparams: QParamsView) -> str:
    scales = [f"{scale:.4g}" for scale in qparams.scales]
    return ", ".join(scales) if len(scales) <= 2 else f"{len(scales)} scales"


def _zero_point(qparams: QParamsView) -> str:
    return ", ".join(map(str, qparams.zero_points)) if len(qparams.zero_points) <= 2 else ""


def _covers(qparams: QParamsView) -> str:
    if len(qparams.scales) > 1:
        return ""
    (scale,), (zero,) = qparams.scales, qparams.zero_points
    return f"{(qparams.quant_min - zero) * scale:.4g} to {(qparams.quant_max - zero) * scale:.4g}"


def _float_range(point: Point) -> str:
    histogram = point.histogram
    return f"{histogram.low:.4g} to {histogram.high:.4g}" if histogram else ""


def _graded(side: Side | None) -> str:
    if side is None:
        return ""
    word = texts.grade(side.sqnr)
    return "bit-equal" if word == "exact" else f"{side.sqnr:.1f} {word}"


def _outside(side: Side | None) -> str:
    return f"{side.saturated:.2%}" if side is not None and side.saturated else ""


#: The most important columns come first: a narrow screen shows only those.
PAGE_COLUMNS: dict[str, Callable[[Point], str]] = {
    "what": texts.COLUMNS["what"],
    "dB here": lambda point: _graded(point.ours),
    "dB FX": lambda point: _graded(point.fx),
    "differ": texts.COLUMNS["differ"],
    "steps": texts.COLUMNS["steps"],
    "outside": lambda point: _outside(point.ours),
    "outside, FX": lambda point: _outside(point.fx),
    "float from, to": _float_range,
    "dtype": _qparams(_dtype),
    "scale": _qparams(_scale),
    "zero point": _qparams(_zero_point),
    "covers": _qparams(_covers),
    "FX dtype": _qparams(_dtype, of_fx=True),
    "FX scale": _qparams(_scale, of_fx=True),
    "FX zero point": _qparams(_zero_point, of_fx=True),
}
#: The columns that are no numbers.
OF_WORDS = ("what", "dtype", "FX dtype")


# Comparisons as one self-contained HTML page, with the pictures inside.


#: The packages of the ``report`` extra.
PACKAGES = ("jinja2", "matplotlib")
TEMPLATE = Path(__file__).with_name("page.html.j2")


def check_page(path: Path) -> None:
    """Raise a ScriptError, before a long run, if a page could not be written to ``path``."""
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise ScriptError.of("TQ974.page_package", package=package, install=install_extra("report"))
    if path.is_dir():
        raise _no_place(str(path), "it is a directory")
    if not path.absolute().parent.is_dir():
        raise _no_place(str(path), "its folder does not exist")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise _no_place(str(path), "no permission to write")


def write_page(comparisons: Sequence[ComparedModel], path: Path) -> None:
    """Write the page in one step.

    Raises:
        ScriptError: the ``report`` extra is missing, or the page cannot be written.
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
    environment.filters.update(grade=texts.grade, decibels=decibel_text, bar_length=bar_length)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(sections=list(map(_section, comparisons)), facts=_versions(), words=OF_WORDS)


def _section(comparison: ComparedModel) -> dict[str, Any]:
    import matplotlib

    from torchq_compat.comparison import pictures

    capture = comparison.capture
    worst = texts.worst_places(capture)
    with matplotlib.rc_context(pictures.STYLE):
        plots = list(_plots(comparison))
        overview = pictures.overview(capture.points, INVISIBLE) if capture.points else ""
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
        "sentence": texts.summary_sentence(comparison),
        "findings": texts.findings_by_reason(comparison.verdict.findings),
        "has_fx": any(point.fx is not None for point in (*capture.outputs, *capture.points)),
        "worst": worst,
        "overview": overview,
        "bars": noisiest(texts.distinct_places((*capture.outputs, *capture.points)), MOST_BARS),
        "marked": {place.point.name for place, _ in worst},
        "outputs": page_table(capture.outputs),
        "points": page_table(capture.points),
        "costs": list(texts.cost_rows(capture.costs)),
        "plots": plots,
        "contents": [(anchor, title) for anchor, (title, content) in contents.items() if content],
    }


def _plots(comparison: ComparedModel) -> Iterator[dict[str, Any]]:
    """Yield the pictures under one heading, each its label and its SVG; ``layout`` is the CSS class around
    them."""
    from torchq_compat.comparison import pictures

    capture = comparison.capture
    for series in capture.series:
        where = f"{series.where}, where the sides are farthest from float." if series.where else ""
        yield {
            "heading": f"Float against quantized: {series.output} over {series.axis}",
            "caption": where or "The whole output.",
            "layout": "one",
            "pictures": [("", pictures.over_time(series))],
        }
    for title, points in pictures.histogram_groups(capture):
        if points:
            most = f" The {MOST_HISTOGRAMS} noisiest of {len(points)}." * (len(points) > MOST_HISTOGRAMS)
            yield {
                "heading": f"Values against the qparams: {title}",
                "caption": "The float model's values; the integers cover the shaded range between the dashed "
                f"lines, and ticks are their steps (at most 64 are drawn).{most}",
                "layout": "several",
                "pictures": [
                    (", ".join(point.name for point in alike), pictures.histogram(alike))
                    for alike in _alike(noisiest(points, MOST_HISTOGRAMS))
                ],
            }
    also = ", and in FX where it differs" if capture.fx.outcome is FxOutcome.RAN else ""
    for cell in capture.cells:
        yield {
            "heading": f"Cell {cell.path}",
            "caption": "Each part with the quantize and dequantize behind it: dtype, s the scale, z the zero "
            f"point{also}. Colours are dtypes.",
            "layout": "scrolled",
            "pictures": [("", pictures.cell_chain(cell, capture))],
        }


def _alike(points: Iterable[Point]) -> Iterable[list[Point]]:
    """Return the points in groups that one picture can show."""
    groups: dict[object, list[Point]] = {}
    for point in points:
        fx = point.fx.qparams if point.fx else None
        groups.setdefault((point.histogram, point.ours.qparams, fx), []).append(point)
    return groups.values()


def _no_place(path: str, problem: str) -> ScriptError:
    return ScriptError.of("TQ974.page_path", path=path, problem=problem)


def _versions() -> dict[str, str]:
    """Return label -> text, for the versions and machine of the report."""
    packages = [f"torchq-compat {package_version()}", f"Python {platform.python_version()}"]
    packages[1:1] = [f"{package} {version(package)}" for package in ("torch", "torchao")]
    return {
        "versions": ", ".join(packages),
        "date": datetime.date.today().isoformat(),
        "processor": f"{_processor()}, {os.cpu_count()} cores",
        "command": _command(),
    }


def _processor() -> str:
    """Return the name of the processor; Linux has it in a file, elsewhere ``platform`` is used."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def _command() -> str:
    if Path(sys.argv[0]).name in ("torchq-compat", "__main__.py") and len(sys.argv) > 1:
        return shlex.join(["torchq-compat", *sys.argv[1:]])
    return "torchq_compat.compare(...)"


# A comparison for a notebook cell, and as rows of plain values.


#: The columns for one side.
OF_SIDE = ("dtype", "scale", "zero_point", "sqnr", "saturated")
PLACE_COLUMNS = (
    *("name", "kind", "operation", "grade"),
    *OF_SIDE,
    *(f"fx_{name}" for name in OF_SIDE),
    *("differ", "largest_steps"),
)


def _side(side: Side | None, prefix: str) -> dict[str, Any]:
    if side is None:
        return dict.fromkeys(f"{prefix}{name}" for name in OF_SIDE)
    qparams, one = side.qparams, (None, None)
    if qparams is not None and len(qparams.scales) == 1:
        one = qparams.scales[0], qparams.zero_points[0]  # type: ignore[assignment]
    cells = (qparams.dtype if qparams else "float", *one, side.sqnr, side.saturated)
    return {f"{prefix}{name}": cell for name, cell in zip(OF_SIDE, cells, strict=True)}


# A compared model that shows itself as tables, as JSON and as a page. This module does not need torch.


class Comparison(ComparedModel):
    """FX and this package on one model; ``print`` shows the tables."""

    def __str__(self) -> str:
        return texts.as_text((self,))

    def __repr__(self) -> str:
        return f"<Comparison of {self.capture.model}: {self.verdict.status}. {texts.summary_sentence(self)}>"

    def _repr_html_(self) -> str:
        """Return the verdict, the worst places, and all places in a ``<details>``."""
        capture, verdict = self.capture, self.verdict
        worst = "".join(
            f"<li><code>{escape(', '.join(place.names))}</code>: {place.point.ours.sqnr:.1f} dB, "
            f"{texts.grade(place.point.ours.sqnr)}. {escape(why)}</li>"
            for place, why in texts.worst_places(capture)
        )
        rows = texts.point_rows((*capture.outputs, *capture.points))
        table = html_table(tuple(texts.COLUMNS), rows)
        return (
            f"<div><p><b>{escape(capture.model)}: {verdict.status}</b>. "
            f"{escape(texts.summary_sentence(self))}</p><ol>{worst}</ol>"
            f"<details><summary>{len(rows)} places</summary>{table}</details></div>"
        )

    @property
    def summary(self) -> str:
        """One sentence: how near to float, how small and how fast."""
        return texts.summary_sentence(self)

    def to_dict(self) -> dict[str, Any]:
        """Return ``as_dict()``, under the name used by other reports."""
        return self.as_dict()

    def to_pandas(self) -> pd.DataFrame:
        """Return a pandas table with one line for each output, module, op and part.

        Raises:
            ScriptError: pandas is not installed.
        """
        rows = [
            {
                "name": point.name,
                "kind": point.kind.value,
                "operation": point.operation,
                "grade": texts.grade(point.ours.sqnr),
                **_side(point.ours, ""),
                **_side(point.fx, "fx_"),
                "differ": point.steps.share if point.steps else None,
                "largest_steps": point.steps.largest if point.steps else None,
            }
            for point in (*self.capture.outputs, *self.capture.points)
        ]
        return data_frame(rows, PLACE_COLUMNS)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, as ``torchq-compat compare --json`` prints them for each model."""
        return texts.as_data(self)

    def to_json(self) -> str:
        """Return ``as_dict()`` as indented JSON."""
        return json.dumps(self.as_dict(), indent=2)

    @checked_arguments(path=PATH)
    def write_html(self, path: str | Path) -> None:
        """Write one self-contained page, in one step: an existing file is replaced once the page is complete.

        Args:
            path: the file to write.

        Raises:
            ArgumentError: ``path`` is no path.
            ScriptError: the ``report`` extra is not installed, or ``path`` cannot be written.
        """
        write_page((self,), Path(path))
