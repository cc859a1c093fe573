"""The differences from FX that the migration guide lists, by case."""

from __future__ import annotations

import tomllib
from pathlib import Path

__all__ = ["KNOWN_DIFFERENCES"]

FILE = Path(__file__).parents[2] / "migration" / "known_differences.toml"
#: Case id -> the kinds of difference.
KNOWN_DIFFERENCES: dict[str, set[str]] = {
    entry["id"]: set(entry["in"]) for entry in tomllib.loads(FILE.read_text())["difference"]
}
