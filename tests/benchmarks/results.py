"""The measurements together: written as JSON, and read back to make the page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema

from tests.benchmarks.bars import Bar, bars_table, latency_bars, lost_table, stage_bars
from tests.benchmarks.tables import Table, latency_tables, stages_table

__all__ = ["SCHEMA", "bars_of", "read_results", "tables_of", "write_results"]

SCHEMA: dict[str, Any] = json.loads(Path(__file__).with_name("results.schema.json").read_text())

Results = Mapping[str, Any]


def write_results(results: Results, path: Path) -> None:
    jsonschema.validate(results, SCHEMA)
    path.write_text(json.dumps(results, indent=1) + "\n")


def read_results(path: Path) -> dict[str, Any]:
    results: dict[str, Any] = json.loads(path.read_text())
    jsonschema.validate(results, SCHEMA)
    return results


def bars_of(results: Results) -> list[Bar]:
    """Return every expectation that was measured."""
    stages = stage_bars(results["stages"]) if "stages" in results else []
    return [*stages, *latency_bars(results.get("recurrent", ()), results.get("feedforward", ()))]


def tables_of(results: Results) -> list[Table]:
    """Return every table that has measurements."""
    tables = [stages_table(results["stages"])] if "stages" in results else []
    latency = [*results.get("recurrent", ()), *results.get("feedforward", ())]
    if latency:
        tables += [*latency_tables(latency), lost_table(latency)]
    return [*tables, bars_table(bars_of(results))]
