"""Generate README's table of results from the measured numbers in ``migration/benchmarks.json``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

#: Contender of the benchmarks -> its column; a contender that was not measured has no column.
COLUMNS = {
    "ours, lowered": "here",
    "FX static": "FX",
    "ONNX Runtime, dynamic int8": "ONNX Runtime, dynamic",
}
OURS = "ours, lowered"
FLOAT = "float"
PARTS = ("feedforward", "recurrent")
#: Cases with sizes only.
SIZES = "("
RECURRENT = "LSTM {case}"


def results_table(file: Path) -> str:
    """Return the table; each cell has a number for every contender that was measured."""
    data = json.loads(file.read_text())
    cases: dict[str, dict[str, Mapping[str, Any]]] = {}
    for part in PARTS:
        for row in data[part]:
            case: str = row["case"]
            name = RECURRENT.format(case=case) if case.startswith(SIZES) else case
            cases.setdefault(name, {})[row["contender"]] = row
    shown = [column for column in COLUMNS if any(column in rows for rows in cases.values())]
    names = " / ".join(COLUMNS[column] for column in shown)
    heads = (f"{what} ({names})" for what in ("SQNR in dB", "size, of float", "latency, of float"))
    lines = [f"| model | {' | '.join(heads)} |", "|---|---|---|---|"]
    lines += [_line(name, rows, shown) for name, rows in cases.items()]
    lost = list(_lost(cases, shown))
    told = "Slower than the fastest of them here: " + "; ".join(lost) + "." if lost else ""
    return "\n".join(lines) + f"\n\n{_environment(data)}{' ' + told if told else ''}\n"


def _line(name: str, rows: Mapping[str, Mapping[str, Any]], shown: list[str]) -> str:
    base = rows[FLOAT]
    cells = []
    for key, form in (("sqnr_db", "{:.1f}"), ("size_bytes", "{:.2f}"), ("median_ms", "{:.2f}")):
        values = []
        for contender in shown:
            value = rows.get(contender, {}).get(key)
            share = value if value is None or key == "sqnr_db" else value / base[key]
            values.append("none" if share is None else form.format(share))
        cells.append(" / ".join(values))
    return f"| {name} | {' | '.join(cells)} |"


def _lost(cases: Mapping[str, Mapping[str, Mapping[str, Any]]], shown: list[str]) -> Iterator[str]:
    """Yield the cases in which another contender, or float, is faster by more than a twentieth."""
    for name, rows in cases.items():
        times = {c: rows[c]["median_ms"] for c in (FLOAT, *shown) if rows.get(c, {}).get("median_ms")}
        fastest = min(times, key=lambda contender: times[contender])
        if OURS in times and times[OURS] > 1.05 * times[fastest]:
            winner = COLUMNS.get(fastest, fastest)
            yield f"{name} ({winner}, {times[OURS] / times[fastest]:.1f} times as fast)"


def _environment(data: Mapping[str, Any]) -> str:
    environment = data["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    return (
        f"One run on {environment['cores']} cores of {environment['architecture']} "
        f"({environment['torch_capability']}), {versions}. "
        "LSTM sizes are (input, hidden, layers, steps, batch)."
    )
