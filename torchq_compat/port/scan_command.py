"""The command ``torchq-compat scan PATH...``: the FX constructs of a code base, and what replaces each.

Source code is read, never executed. Exit code: 0 nothing found, 1 something found, 2 an error of usage or a
file that could not be read.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from torchq_compat.port.process import add_limits, print_finding, print_problems, progress
from torchq_compat.port.sarif import sarif_log
from torchq_compat.port.scanner import Finding, Scan, scan_paths
from torchq_compat.support.report import counted

NOTHING_FOUND, FOUND, PROBLEM = 0, 1, 2
FORMAT_VERSION = 1
EXAMPLES = """\
examples:
  torchq-compat scan .
  torchq-compat scan train.py notebooks/
  torchq-compat scan src --json > findings.json
  torchq-compat scan src --format sarif > findings.sarif

exit code: 0 nothing found, 1 something found, 2 an error of usage or a file that could not be read
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "scan",
        help="list the FX constructs in Python files and notebooks",
        description="List the FX constructs in Python files and notebooks: where each is, what replaces it, "
        "and whether 'rewrite' does it or it needs manual review. Nothing is executed and nothing is "
        "changed.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "paths", metavar="PATH", nargs="+", type=Path, help="a file, or a folder to search recursively"
    )
    add_limits(parser)
    output = parser.add_mutually_exclusive_group()
    output.add_argument(
        "--format", choices=("table", "json", "sarif"), default="table", help="default: table"
    )
    output.add_argument(
        "--json", dest="format", action="store_const", const="json", help="the same as --format json"
    )
    parser.set_defaults(command=scan_command)


def scan_command(args: argparse.Namespace) -> int:
    """Scan, print and return the exit code.

    Raises:
        PathError: a path does not exist.
    """
    scan = scan_paths(args.paths, progress, jobs=args.jobs, seconds=args.timeout)
    if args.format == "sarif":
        print(json.dumps(sarif_log(scan.findings, scan.problems), indent=2))
    elif args.format == "json":
        print(json.dumps(as_data(scan), indent=2))
    else:
        print_report(scan)
    print_problems(scan.problems)
    return exit_code(scan)


def exit_code(scan: Scan) -> int:
    if scan.problems:
        return PROBLEM
    return FOUND if scan.findings else NOTHING_FOUND


def as_data(scan: Scan) -> dict[str, Any]:
    """Return the scan as plain values; ``version`` is increased when this format changes."""
    return {
        "version": FORMAT_VERSION,
        "files": scan.files,
        "findings": [_finding_data(finding) for finding in scan.findings],
        "problems": [{"file": str(problem.path), "reason": problem.reason} for problem in scan.problems],
    }


def _finding_data(finding: Finding) -> dict[str, Any]:
    construct = finding.construct
    return {
        "file": str(finding.path),
        "line": finding.place.line,
        "cell": finding.place.cell,
        "code": construct.code,
        "construct": construct.title,
        "found": finding.site.what,
        "becomes": construct.becomes,
        "by": finding.by,
        "remark": finding.remark,
        "guide": construct.link,
    }


def print_report(scan: Scan) -> None:
    for finding in scan.findings:
        print_finding(finding.line)
    by = Counter(finding.by for finding in scan.findings)
    counts = f"{counted(scan.files, 'file')}, {counted(by.total(), 'finding')}"
    print(f"{counts}: {by['rewrite']} for rewrite, {by['manual review']} for manual review")
    codes = sorted({finding.construct.code for finding in scan.findings})
    if codes:
        print(f"  torchq-compat explain {' '.join(codes)}")
    if by["rewrite"]:
        print("  torchq-compat rewrite shows these changes, torchq-compat rewrite --write makes them")
