"""Run the tests against mutants: ``python -m tests.mutants --count 60 --seed 1``, an hour or two.

A copy of the checkout gets all the mutants at once, each behind a switch. One run of the default tests
notes which test files reach which mutant; then every mutant is switched on for the files that mirror its
folder, and, if they pass, for every other file that reaches it. ``--reached`` reads notes of an earlier run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .sites import Mutant, draw

ROOT = Path(__file__).parents[2]
SWITCH = "_torchq_mutant"
#: Seconds after which a run of tests counts as hung, and its mutant as noticed.
PATIENCE = 1800
Reached = dict[int, set[str]]


def instrument(checkout: Path, mutants: Iterable[tuple[int, Mutant]]) -> None:
    """Write the mutants into the files of a checkout, and the switch beside its package."""
    shutil.copy(Path(__file__).with_name("switch.py"), checkout / f"{SWITCH}.py")
    for number, mutant in mutants:
        path = checkout / mutant.path
        source = path.read_bytes()
        chosen = f"(({mutant.replacement}) if __import__('{SWITCH}').on('{number}') else ({mutant.original}))"
        path.write_bytes(source[: mutant.start] + chosen.encode() + source[mutant.end :])


def run_tests(
    checkout: Path, *arguments: str, timeout: int = PATIENCE, **switches: str
) -> subprocess.CompletedProcess[str]:
    """Run pytest in the checkout, with its package before the one that is installed."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=line", "-p", "no:cacheprovider", *arguments]
    environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"} | switches
    return subprocess.run(
        command, cwd=checkout, env=environment, text=True, capture_output=True, timeout=timeout, check=False
    )


def note_reached(checkout: Path, workers: int, folder: Path) -> str:
    """Run the default tests with no mutant on; return the last line of the run."""
    folder.mkdir(parents=True, exist_ok=True)
    done = run_tests(checkout, "-n", str(workers), timeout=4 * PATIENCE, TORCHQ_REACHED=str(folder.resolve()))
    return done.stdout.strip().splitlines()[-1]


def read_reached(folder: Path) -> Reached:
    """Return the test files that reached each mutant."""
    reached: Reached = defaultdict(set)
    for notes in folder.iterdir():
        for line in notes.read_text().splitlines():
            number, _, file = line.partition("\t")
            if file:
                reached[int(number)].add(file)
    return reached


def mirrors(mutant: Mutant, files: Iterable[str]) -> list[str]:
    """Return those of the test files that mirror the folder of a mutant: the deepest folder that has any."""
    parts = Path(mutant.path).parent.parts[1:] or ("pipeline",)
    for depth in range(len(parts), 0, -1):
        folder = "/".join(("tests", *parts[:depth], ""))
        if inside := sorted(file for file in files if file.startswith(folder)):
            return inside
    return []


def verdict(checkout: Path, number: int, files: list[str]) -> str | None:
    """Return the first test that fails with a mutant on, or None."""
    if not files:
        return None
    try:
        done = run_tests(checkout, "-x", *files, TORCHQ_MUTANT=str(number))
    except subprocess.TimeoutExpired:
        return f"no end after {PATIENCE} s"
    if done.returncode in (0, 5):
        return None
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].partition(" - ")[0] if failed else done.stdout.strip()[-200:]


def judge(checkout: Path, number: int, mutant: Mutant, files: set[str], whole: bool) -> dict[str, object]:
    """Return what noticed a mutant: the tests that mirror its folder, else any other test that reaches it."""
    near = mirrors(mutant, files)
    noticed = verdict(checkout, number, near)
    by = "mirror" if noticed else None
    if noticed is None and whole:
        noticed = verdict(checkout, number, sorted(files - set(near)))
        by = "suite" if noticed else None
    row = {
        "number": number,
        "mutant": str(mutant),
        "room": mutant.room,
        "files": len(files),
        "by": by,
        "test": noticed,
    }
    print(
        f"{number:3} {by or 'SURVIVED':8} {mutant}  [{noticed or f'{len(files)} files reach it'}]", flush=True
    )
    return row


def summary(rows: Iterable[Mapping[str, object]]) -> str:
    counts: dict[str, int] = defaultdict(int)
    for row in rows:
        counts[str(row["by"] or "survived")] += 1
    return ", ".join(f"{kind}: {count}" for kind, count in sorted(counts.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of mutants; without it all")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--checkout", type=Path, default=ROOT, help="whose package and tests they are")
    parser.add_argument("--reached", type=Path, help="folder of notes, written if it is not there")
    parser.add_argument("--mirror-only", action="store_true", help="leave the rest of the suite out")
    parser.add_argument("--json", type=Path, help="where the rows go")
    options = parser.parse_args()
    mutants = draw(options.checkout, options.seed, options.count)
    with tempfile.TemporaryDirectory() as directory:
        checkout = Path(directory) / "checkout"
        shutil.copytree(
            options.checkout, checkout, ignore=shutil.ignore_patterns(".git", "build", "*.egg-info")
        )
        instrument(checkout, enumerate(mutants))
        notes = options.reached or Path(directory) / "reached"
        if not notes.exists():
            print(note_reached(checkout, options.workers, notes), flush=True)
        reached = read_reached(notes)
        numbers = options.only if options.only is not None else range(len(mutants))
        with ThreadPoolExecutor(options.workers) as pool:
            rows = list(
                pool.map(
                    lambda number: judge(
                        checkout, number, mutants[number], reached[number], not options.mirror_only
                    ),
                    numbers,
                )
            )
    print(summary(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
