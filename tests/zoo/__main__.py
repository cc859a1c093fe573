"""Public models on FX and here, each in a process of its own.

    python -m tests.zoo [--only NAME ...] [--jobs N] [--limit SECONDS] [--results FILE] [--page [FILE]]

Writes the numbers as JSON and, with --page, the table as Markdown. Exits with 1 if a model misses its bar
without a reason (tests/zoo/verdict.py, explained.py). Needs the extra ``zoo``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.zoo.page import write_page
from tests.zoo.processes import row_of
from tests.zoo.registry import ZOO
from tests.zoo.verdict import is_good, verdict

__all__ = ["main"]

PACKAGES = ("torch", "torchao", "torchvision", "timm", "transformers")


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    unknown = sorted(set(options.only) - set(ZOO))
    if unknown:
        _parser().error(f"no such model: {', '.join(unknown)}; there are {', '.join(ZOO)}")
    rows = _kept_rows(options)
    names = options.only or list(ZOO)
    if not options.show:
        with ThreadPoolExecutor(options.jobs) as pool:
            for row in pool.map(lambda name: row_of(name, options.limit), names):
                rows[row["model"]] = {**row, "commit": _commit()}
                _write(rows, options.results)
                print(f"{row['model']}: {verdict(row)}", flush=True)
    if options.page is not None:
        write_page(_results(rows), options.page)
    return 0 if all(is_good(row) for row in rows.values()) else 1


def _kept_rows(options: argparse.Namespace) -> dict[str, Any]:
    """Return the rows of the last run with --only or --show, otherwise none."""
    if not (options.only or options.show) or not options.results.exists():
        return {}
    return {
        row["model"]: row for row in json.loads(options.results.read_text())["rows"] if row["model"] in ZOO
    }


def _commit() -> str:
    """Return the commit that was measured, with ``-dirty`` if the tree differs from it."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    root = Path(__file__).parents[2]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False).stdout.strip()


def _write(rows: dict[str, Any], path: Path) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(_results(rows), indent=1) + "\n")
    os.replace(draft, path)


def _results(rows: dict[str, Any]) -> dict[str, Any]:
    return {
        "format": 1,
        "versions": {name: version(name) for name in PACKAGES},
        "rows": [rows[name] for name in ZOO if name in rows],
        "not_measured": [name for name in ZOO if name not in rows],
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.zoo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="these models; keeps the others' rows"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time (default: %(default)s)")
    parser.add_argument(
        "--limit", type=float, default=600.0, help="seconds a model may take (default: %(default)s)"
    )
    parser.add_argument(
        "--results", type=Path, default=Path("migration/zoo.json"), help="JSON (default: %(default)s)"
    )
    parser.add_argument(
        "--show", action="store_true", help="measure nothing: judge and page the last results"
    )
    parser.add_argument(
        "--page", type=Path, nargs="?", const=Path("migration/zoo.md"), help="also write the page (%(const)s)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
