"""FX, plain PT2E, dynamic quantization and this package, side by side in one run.

    python -m tests.benchmarks [--only a|b|c] [--quick] [--threads N [N ...]] [--output DIR] [--page [FILE]]

Parts: (a) time and peak memory of prepare, calibrate and convert at several sequence lengths; (b) latency,
size and accuracy of converted recurrent modules, with one and with two threads, and of Python loops around
them; (c) the same for a Linear model and a CNN. Prints tables, writes benchmarks.json and benchmarks.svg into
DIR and, with --page, writes the results into FILE and both files beside it. Only the ratios mean anything:
contenders are measured in turns, on any machine.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from tests.benchmarks import cases
from tests.benchmarks.contenders import (
    FEEDFORWARD_CONTENDERS,
    LOOP_CONTENDERS,
    RECURRENT_CONTENDERS,
    Contender,
)
from tests.benchmarks.environment import environment
from tests.benchmarks.latency import Effort, measure_latency
from tests.benchmarks.page import PAGE, prose_around, write_page
from tests.benchmarks.plot import save_plot
from tests.benchmarks.results import read_results, tables_of, write_results
from tests.benchmarks.stages import measure_stages

__all__ = ["main"]

JSON_NAME, PLOT_NAME = "benchmarks.json", "benchmarks.svg"


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    results = measure(options) if options.results is None else read_results(options.results)
    write_results(results, options.output / JSON_NAME)
    save_plot(results, options.output / PLOT_NAME)
    console = Console(width=max(140, Console().width))
    for table in tables_of(results):
        console.print(table.for_terminal())
    if options.page is not None:
        write_page(results, options.page, PLOT_NAME)
        if options.output.resolve() != options.page.parent.resolve():
            for name in (JSON_NAME, PLOT_NAME):
                shutil.copy(options.output / name, options.page.with_name(name))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the parts that ``options`` selects."""
    tell = Console(stderr=True, highlight=False).print
    results: dict[str, Any] = {"format": 1, "environment": environment(max(options.threads))}
    quick, parts = options.quick, options.only or "abc"
    if "a" in parts:
        lengths, rounds, repeats = ((2,), 1, 1) if quick else ((8, 128, 2048), 3, 2)
        results["stages"] = measure_stages(
            lengths, rounds=rounds, repeats=repeats, limit=options.limit, tell=tell
        )
    rounds, turn_seconds = (2, 0.001) if quick else (9, 0.05)
    asked: dict[str, list[tuple[Sequence[cases.Recipe], Sequence[Contender]]]] = {}
    if "b" in parts:
        recipes, loops = (
            (cases.QUICK_RECURRENT, cases.QUICK_LOOPS) if quick else (cases.RECURRENT, cases.LOOPS)
        )
        asked["recurrent"] = [(recipes, RECURRENT_CONTENDERS), (loops, LOOP_CONTENDERS)]
    if "c" in parts:
        recipes = cases.QUICK_FEEDFORWARD if quick else cases.FEEDFORWARD
        asked["feedforward"] = [(recipes, FEEDFORWARD_CONTENDERS)]
    for name, groups in asked.items():
        results[name] = []
        for threads in options.threads:
            effort = Effort(rounds, turn_seconds, options.limit, threads)
            for of_group, contenders in groups:
                rows = measure_latency(of_group, contenders, effort, tell)
                results[name] += rows if len(options.threads) == 1 else [_at(threads, row) for row in rows]
    return results


def _at(threads: int, row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "case": f"{row['case']}, {threads} thread{'s' if threads > 1 else ''}"}


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse ``arguments``; reject what cannot be done before anything is measured."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.page is not None:
        if options.only is not None:
            parser.error("--page needs all three parts; leave --only out")
        try:
            prose_around(options.page)
        except (OSError, ValueError) as problem:
            parser.error(f"--page: {problem}")
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", choices=("a", "b", "c"), help="measure one part; default: all three")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, few turns: does the command work?")
    parser.add_argument(
        "--threads",
        type=_positive,
        nargs="+",
        default=sorted({1, min(2, os.cpu_count() or 1)}),
        help="of every engine, for latency, one run for each; set whatever OMP_NUM_THREADS says "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=180.0,
        help="seconds a flow, or building one contender, may take (default: %(default)s)",
    )
    parser.add_argument(
        "--output", type=Path, default=Path(".benchmarks"), help="folder to write to (default: %(default)s)"
    )
    parser.add_argument(
        "--page",
        type=Path,
        nargs="?",
        const=PAGE,
        help="also write the results page (default file: %(const)s)",
    )
    parser.add_argument(
        "--results", type=Path, help="measure nothing: show, plot and page what this JSON file holds"
    )
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value


if __name__ == "__main__":
    main()
