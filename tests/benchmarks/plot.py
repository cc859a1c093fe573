"""The measurements as one picture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from tests.benchmarks.contenders import FEEDFORWARD_CONTENDERS, RECURRENT_CONTENDERS
from tests.benchmarks.flows import FLOWS, STAGES

__all__ = ["save_plot"]

CONTENDERS = dict.fromkeys(contender.name for contender in (*RECURRENT_CONTENDERS, *FEEDFORWARD_CONTENDERS))
#: The same markers in every panel.
COLORS = {name: f"C{index}" for index, name in enumerate(CONTENDERS)}
MARKERS = {name: "osD^vPX<>*"[index % 10] for index, name in enumerate(CONTENDERS)}
#: Our lowered model and all contenders that are not ours; our models for other targets are in the tables.
OURS = "ours, lowered"
SHOWN = (OURS, *(name for name in CONTENDERS if not name.startswith("ours")))

Row = Mapping[str, Any]


def save_plot(results: Mapping[str, Any], path: Path) -> None:
    """Draw one panel for each measured part of ``results``; the suffix of ``path`` sets the format."""
    drawings: list[Callable[[Axes], None]] = []
    if "stages" in results:
        drawings.append(partial(_draw_stages, rows=results["stages"]))
    for name in ("recurrent", "feedforward"):
        for title, rows in _by_threads(results.get(name, ())):
            drawings.append(partial(_draw_latency, rows=rows, title=title))
    figure, axes = plt.subplots(
        len(drawings), 1, figsize=(12, 4.5 * len(drawings)), squeeze=False, layout="constrained"
    )
    for draw, axis in zip(drawings, axes[:, 0], strict=True):
        draw(axis)
    _save(figure, path)


def _by_threads(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Yield a title and rows for each number of threads (which ends the case names if there are several)."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        case, _, threads = row["case"].rpartition(", ")
        name, short = (threads, case) if "thread" in threads else ("", row["case"])
        groups.setdefault(name, []).append({**row, "case": short})
    for name, group in groups.items():
        yield f"Latency, {name}" if name else "Latency", group


def _draw_stages(axis: Axes, rows: Sequence[Row]) -> None:
    for flow in FLOWS:
        measured = [row for row in rows if row["flow"] == flow and "limit_s" not in row]
        total = [sum(row[stage] for stage in STAGES) for row in measured]
        color = COLORS.get({"ours": OURS, "FX": "FX static"}.get(flow, ""), "0.5")
        (line,) = axis.loglog([row["length"] for row in measured], total, marker="o", label=flow, color=color)
        ended = [row for row in rows if row["flow"] == flow and "limit_s" in row]
        limits = [row["limit_s"] for row in ended]
        axis.loglog([row["length"] for row in ended], limits, "^", mfc="none", color=line.get_color())
    axis.set(
        title="Prepare + calibrate + convert (triangle: ended at the limit)",
        xlabel="sequence length",
        ylabel="seconds",
    )
    axis.legend()


def _draw_latency(axis: Axes, rows: Sequence[Row], title: str) -> None:
    """Draw the time of each peer relative to our lowered model, a row for each case; right of 1 is slower."""
    measured = {(row["case"], row["contender"]): row for row in rows if "unavailable" not in row}
    cases = [case for case in dict.fromkeys(row["case"] for row in rows) if (case, OURS) in measured]
    contenders = [name for name in SHOWN[1:] if any((case, name) in measured for case in cases)]
    axis.axvline(1, color=COLORS[OURS], linewidth=2, label=OURS)
    for index, contender in enumerate(contenders):
        pairs = [(at, measured.get((case, contender)), measured[case, OURS]) for at, case in enumerate(cases)]
        found = [(at, row, ours["median_ms"]) for at, row, ours in pairs if row is not None]
        # Side by side, so that no point hides another.
        places = [at + (index + 1) / (len(contenders) + 1) - 0.5 for at, _, _ in found]
        ratios = [row["median_ms"] / ours for _, row, ours in found]
        errors = [
            [(row["median_ms"] - row["low_ms"]) / ours for _, row, ours in found],
            [(row["high_ms"] - row["median_ms"]) / ours for _, row, ours in found],
        ]
        axis.errorbar(
            ratios,
            places,
            xerr=errors,
            fmt=MARKERS[contender],
            label=contender,
            color=COLORS[contender],
            markersize=7,
            ecolor="0.4",
        )
    for at in range(1, len(cases)):
        axis.axhline(at - 0.5, color="0.85", linewidth=0.8)
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.xaxis.set_major_formatter("{x:g}x")
    axis.xaxis.set_minor_locator(NullLocator())
    axis.grid(axis="x", color="0.9")
    axis.set_axisbelow(True)
    axis.set_yticks(range(len(cases)), cases)
    axis.set_ylim(len(cases) - 0.5, -0.5)
    axis.set(title=title, xlabel="time, of ours: left of the line is faster than ours, right of it slower")
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def _save(figure: Figure, path: Path) -> None:
    # The same numbers give the same file.
    with plt.rc_context({"svg.hashsalt": "benchmarks", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
