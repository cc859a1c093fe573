"""The expectations on this package's speed, and whether the measurements met them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.benchmarks.tables import Table

__all__ = ["Bar", "bars_table", "latency_bars", "lost_table", "stage_bars"]

Row = Mapping[str, Any]
ONNX_RUNTIME = "ONNX Runtime, dynamic int8"
PEERS = ("float", "dynamic quantized", "FX static", "bfloat16", ONNX_RUNTIME, "OpenVINO, int8")
#: Limit for Python loops around recurrent modules, as a multiple of float's time.
LOOP_LIMIT = 1.2


@dataclass(frozen=True)
class Bar:
    """An expectation: ``measured`` has to be at most ``limit``."""

    what: str
    measured: float
    limit: float

    @property
    def is_met(self) -> bool:
        return self.measured <= self.limit


def stage_bars(rows: Sequence[Row]) -> list[Bar]:
    """Return the bars of the stages: prepare and convert do not depend on T, calibration is no slower than
    FX's."""
    ours, fx = _by_length(rows, "ours"), _by_length(rows, "FX")
    if not ours:
        return []
    both = {length: row["prepare"] + row["convert"] for length, row in ours.items()}
    shortest, longest = min(both), max(both)
    return [
        Bar(
            f"prepare + convert at T = {longest}, of that at T = {shortest}",
            both[longest] / both[shortest],
            1.2,
        ),
        Bar("prepare + convert of two bidirectional layers, seconds", max(both.values()), 5.0),
        *(
            Bar(f"calibration at T = {length}, of FX's", row["calibrate"] / fx[length]["calibrate"], 1.0)
            for length, row in ours.items()
            if length in fx
        ),
    ]


def latency_bars(recurrent: Sequence[Row], feedforward: Sequence[Row]) -> list[Bar]:
    """Return the bars of the lowered model against its peers, for cases where it could be built."""
    return [*_recurrent_bars(recurrent), *_feedforward_bars(feedforward)]


def bars_table(bars: Sequence[Bar]) -> Table:
    return Table(
        "Expectations",
        ("what", "measured", "at most", ""),
        tuple((bar.what, f"{bar.measured:.2f}", f"{bar.limit:.2f}", _met(bar)) for bar in bars),
    )


def lost_table(rows: Sequence[Row]) -> Table:
    """Return every peer that is faster than the fastest of ours, case by case."""
    return Table(
        "Where a peer is faster",
        ("case", "our fastest", "peer", "ours takes, of the peer's time"),
        tuple(
            (case, best["contender"], peer["contender"], f"{best['median_ms'] / peer['median_ms']:.2f}")
            for case, by_name in _by_case(rows)
            for best in sorted(_ours(by_name), key=lambda row: row["median_ms"])[:1]
            for peer in (by_name[name] for name in PEERS if name in by_name)
            if peer["median_ms"] < best["median_ms"]
        ),
    )


def _by_length(rows: Sequence[Row], flow: str) -> dict[int, Row]:
    """Return the rows of ``flow`` that stayed within the time limit, by length."""
    return {row["length"]: row for row in rows if row["flow"] == flow and "limit_s" not in row}


def _recurrent_bars(rows: Sequence[Row]) -> Iterator[Bar]:
    for index, (case, by_name) in enumerate(_by_case(rows)):
        lowered = by_name.get("ours, lowered")
        if lowered is None:
            continue
        if lowered["hidden"] is None:
            limits = {"float": LOOP_LIMIT}
        elif ", 1, 1)" in case:  # one step per call
            limits = {"FX static": 1.0, "dynamic quantized": 1.0, ONNX_RUNTIME: 2.0}
        else:
            limits = {"FX static": 1 / 3 if index < 2 else 1.0, ONNX_RUNTIME: 1.0, "bfloat16": 1.0}
            limits |= (
                {"float": 1.0, "dynamic quantized": 1.0} if lowered["hidden"] >= 512 else {"float": 0.75}
            )
        for peer, limit in limits.items():
            if peer in by_name:
                yield _against(case, lowered, by_name[peer], limit)


def _feedforward_bars(rows: Sequence[Row]) -> Iterator[Bar]:
    for case, by_name in _by_case(rows):
        if {"ours, lowered", "FX static"} <= by_name.keys():
            yield _against(case, by_name["ours, lowered"], by_name["FX static"], 1.0)


def _against(case: str, ours: Row, peer: Row, limit: float) -> Bar:
    return Bar(
        f"{case}: {ours['contender'].removeprefix('ours, ')}, of {peer['contender']}",
        ours["median_ms"] / peer["median_ms"],
        limit,
    )


def _by_case(rows: Sequence[Row]) -> Iterator[tuple[str, dict[str, Row]]]:
    """Yield each case with its measured rows by contender."""
    for case in dict.fromkeys(row["case"] for row in rows):
        yield (
            case,
            {row["contender"]: row for row in rows if row["case"] == case and "unavailable" not in row},
        )


def _ours(by_name: Mapping[str, Row]) -> list[Row]:
    return [row for name, row in by_name.items() if name.startswith("ours")]


def _met(bar: Bar) -> str:
    return "met" if bar.is_met else "missed"
