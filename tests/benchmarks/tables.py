"""Measurements as tables: one description for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import table as rich_table

from tests.benchmarks.flows import STAGES

__all__ = ["Table", "latency_tables", "stages_table"]

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Table:
    """A table whose cells are ready to print; the first column is text, the rest numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def for_terminal(self) -> rich_table.Table:
        made = rich_table.Table(title=self.title, title_justify="left")
        for index, column in enumerate(self.columns):
            made.add_column(column, justify="right" if index else "left")
        for row in self.rows:
            made.add_row(*row)
        return made

    def as_markdown(self) -> str:
        lines = [self.columns, ["---", *["---:"] * (len(self.columns) - 1)], *self.rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def stages_table(rows: Sequence[Row]) -> Table:
    """Return seconds and peak memory of each flow at each sequence length, and the ratios to FX's."""
    fx = {row["length"]: row for row in rows if row["flow"] == "FX"}
    return Table(
        "Prepare, calibrate, convert: seconds (ratio to FX)",
        ("T", "flow", *STAGES, "prepare + convert", "peak MiB", "nodes"),
        tuple(_stages_row(row, fx[row["length"]]) for row in rows),
    )


def _stages_row(row: Row, fx: Row) -> tuple[str, ...]:
    name = str(row["length"]), row["flow"]
    if "limit_s" in row:
        return *name, *["-"] * len(STAGES), f"> {row['limit_s']:g} in all", "-", "-"
    stages = [_with_ratio(row[stage], fx.get(stage), ".3f") for stage in STAGES]
    both = row["prepare"] + row["convert"]
    return *name, *stages, f"{both:.3f}", f"{row['peak_mib']:.0f}", f"{row['nodes']:.0f}"


def latency_tables(rows: Sequence[Row]) -> list[Table]:
    """Return one table for each case: milliseconds, ratios to the available peers, size and SQNR."""
    cases = dict.fromkeys(row["case"] for row in rows)
    return [_latency_table(case, [row for row in rows if row["case"] == case]) for case in cases]


def _latency_table(case: str, rows: Sequence[Row]) -> Table:
    by_name = {row["contender"]: row for row in rows}
    peers = [name for name in ("float", "dynamic quantized", "FX static") if name in by_name]
    columns = ("contender", "ms", "spread", *(f"of {peer}" for peer in peers), "size", "SQNR dB", "remark")
    return Table(case, columns, tuple(_latency_row(row, [by_name[peer] for peer in peers]) for row in rows))


def _latency_row(row: Row, peers: Sequence[Row]) -> tuple[str, ...]:
    if "unavailable" in row:
        return row["contender"], *["-"] * (len(peers) + 4), row["unavailable"]
    spread = (row["high_ms"] - row["low_ms"]) / row["median_ms"]
    ratios = (_ratio(row["median_ms"], peer.get("median_ms")) for peer in peers)
    db = row["sqnr_db"]
    return (
        row["contender"],
        f"{row['median_ms']:.3f}",
        f"{spread:.0%}",
        *ratios,
        _ratio(row["size_bytes"], peers[0].get("size_bytes")),
        "equal" if db is None else f"{db:.1f}",
        row["verdict"],
    )


def _with_ratio(value: float, base: float | None, form: str) -> str:
    return f"{value:{form}}" if base is None else f"{value:{form}} ({value / base:.2f})"


def _ratio(value: float, base: float | None) -> str:
    return "-" if base is None else f"{value / base:.2f}"
