"""The measurements as one picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.benchmarks.contenders import FEEDFORWARD_CONTENDERS, RECURRENT_CONTENDERS
from tests.benchmarks.flows import FLOWS, STAGES

__all__ = ["save_plot"]

CONTENDERS = dict.fromkeys(contender.name for contender in (*RECURRENT_CONTENDERS, *FEEDFORWARD_CONTENDERS))
#: The same in every panel.
COLORS = {name: f"C{index}" for index, name in enumerate(CONTENDERS)}

Row = Mapping[str, Any]


def save_plot(results: Mapping[str, Any], path: Path) -> None:
    """One panel for each part of ``results`` that was measured; the ending of ``path`` says the format."""
    panels = [name for name in ("stages", "recurrent", "feedforward") if name in results]
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(10, 4.5 * len(panels)), squeeze=False, layout="constrained"
    )
    for name, axis in zip(panels, axes[:, 0], strict=True):
        if name == "stages":
            _draw_stages(axis, results[name])
        else:
            _draw_latency(axis, results[name])
    _save(figure, path)


def _draw_stages(axis: Axes, rows: Sequence[Row]) -> None:
    for flow in FLOWS:
        measured = [row for row in rows if row["flow"] == flow and "limit_s" not in row]
        total = [sum(row[stage] for stage in STAGES) for row in measured]
        (line,) = axis.loglog([row["length"] for row in measured], total, marker="o", label=flow)
        ended = [row for row in rows if row["flow"] == flow and "limit_s" in row]
        limits = [row["limit_s"] for row in ended]
        axis.loglog([row["length"] for row in ended], limits, "^", mfc="none", color=line.get_color())
    axis.set(
        title="Prepare + calibrate + convert (triangle: ended at the limit)",
        xlabel="sequence length",
        ylabel="seconds",
    )
    axis.legend()


def _draw_latency(axis: Axes, rows: Sequence[Row]) -> None:
    measured = [row for row in rows if "unavailable" not in row]
    cases = list(dict.fromkeys(row["case"] for row in rows))
    contenders = list(dict.fromkeys(row["contender"] for row in measured if row["contender"] != "FX static"))
    base = {row["case"]: row["median_ms"] for row in measured if row["contender"] == "FX static"}
    width = 0.8 / len(contenders)
    for index, contender in enumerate(contenders):
        mine = [row for row in measured if row["contender"] == contender and row["case"] in base]
        places = [cases.index(row["case"]) + (index - len(contenders) / 2 + 0.5) * width for row in mine]
        # Up from the line: slower than FX; down: faster.
        heights = [row["median_ms"] / base[row["case"]] - 1 for row in mine]
        axis.bar(places, heights, width, bottom=1, label=contender, color=COLORS[contender])
    axis.axhline(1, color="black", linewidth=1)
    axis.set_yscale("log")
    axis.set_xticks(
        range(len(cases)), [case.replace(" bidir", "\nbidir") for case in cases], fontsize="small"
    )
    axis.set(title="Latency, of FX static (the line at 1)", ylabel="ratio, less is faster")
    axis.legend(ncols=3, fontsize="small")


def _save(figure: Figure, path: Path) -> None:
    # The same numbers give the same file.
    with plt.rc_context({"svg.hashsalt": "benchmarks", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
