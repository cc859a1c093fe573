"""Where the time of the tests goes: ``python -m tests.costs``, or with arguments of pytest, such as a folder.

Prints seconds by folder and the twenty slowest tests. ``--write`` lists in ``costly.txt`` those whose first
case takes longer than the smoke run has for one; measure with one worker on a quiet machine.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

#: Tests that ``pytest --smoke`` leaves out, without the parameters in brackets.
COSTLY = Path(__file__).with_name("costly.txt")
SECONDS_OF_SMOKE = 0.25
SLOWEST = 20


def seconds_by_test(report: Path) -> dict[str, float]:
    """Return the seconds of each test, with its fixtures, in the order of the run."""
    return {
        f"{case.get('classname')}::{case.get('name')}": float(case.get("time", "0"))
        for case in ET.parse(report).iter("testcase")
    }


def folder_of(test: str) -> str:
    return "/".join(test.partition("::")[0].split(".")[:-1])


def write_costly(seconds: dict[str, float]) -> None:
    first: dict[str, float] = {}
    for test, taken in seconds.items():
        first.setdefault(test.partition("[")[0], taken)
    costly = sorted(test for test, taken in first.items() if taken > SECONDS_OF_SMOKE)
    COSTLY.write_text("".join(f"{test}\n" for test in costly))


def main(arguments: list[str]) -> int:
    writes = "--write" in arguments
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        options = [argument for argument in arguments if argument != "--write"]
        done = subprocess.run([sys.executable, "-m", "pytest", f"--junitxml={report}", *options], check=False)
        seconds = seconds_by_test(report)
    folders: Counter[str] = Counter()
    for test, taken in seconds.items():
        folders[folder_of(test)] += taken  # type: ignore[assignment]
    print(f"{sum(folders.values()):8.1f} s in {len(seconds)} tests, by folder:")
    for name, taken in folders.most_common():
        print(f"{taken:8.1f} s  {name}")
    print(f"the {SLOWEST} slowest tests:")
    for name, taken in Counter(seconds).most_common(SLOWEST):  # type: ignore[arg-type]
        print(f"{taken:8.1f} s  {name}")
    if writes:
        write_costly(seconds)
    return done.returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
