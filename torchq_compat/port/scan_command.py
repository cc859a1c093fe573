"""The command ``torchq-compat scan PATH...``: the FX constructs of a code base, and what replaces each.
Source code is read, never executed.

examples:
  torchq-compat scan .
  torchq-compat scan train.py notebooks/
  torchq-compat scan src --json > findings.json
  torchq-compat scan src --format sarif > findings.sarif

exit code: 0 nothing found, 1 something found, 2 an error of usage or a file that could not be read
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from torchq_compat.port import process
from torchq_compat.port.constructs import CONSTRUCTS
from torchq_compat.port.scanner import Finding, Scan, scan_paths
from torchq_compat.port.source.files import Problem
from torchq_compat.support.report import counted

# Findings as SARIF 2.1.0, the format that code-scanning services read.


SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
RULES = tuple(CONSTRUCTS.values())


def sarif_log(findings: Iterable[Finding], problems: Iterable[Problem]) -> dict[str, Any]:
    """Return the SARIF log of one ``torchq-compat scan``; problems are notifications of its invocation."""
    rules = [
        {
            "id": construct.code,
            "name": construct.title,
            "shortDescription": {"text": f"FX graph mode: {construct.title}"},
            "help": {"text": f"becomes {construct.becomes}; see {construct.link}"},
        }
        for construct in RULES
    ]
    driver = {"name": "torchq-compat", "version": process.package_version(), "rules": rules}
    if address := process.project_address():
        driver["informationUri"] = address
    notifications = [
        {
            "level": "error",
            "message": {"text": f"{problem.reason} [{problem.code}]"},
            "locations": [{"physicalLocation": {"artifactLocation": {"uri": _uri(problem.path)}}}],
        }
        for problem in problems
    ]
    run = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "results": [_result(finding) for finding in findings],
        "invocations": [{"executionSuccessful": True, "toolExecutionNotifications": notifications}],
    }
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def _result(finding: Finding) -> dict[str, Any]:
    remark, cell = f" ({finding.remark})" if finding.remark else "", finding.place.cell
    location: dict[str, Any] = {"physicalLocation": {"artifactLocation": {"uri": _uri(finding.path)}}}
    if cell is None:
        location["physicalLocation"]["region"] = {"startLine": finding.place.line}
    else:  # A line in a cell is not that line of the notebook file.
        location["logicalLocations"] = [{"name": f"cell {cell}"}]
    return {
        "ruleId": finding.construct.code,
        "ruleIndex": RULES.index(finding.construct),
        "level": "warning" if finding.by == "manual review" else "note",
        "message": {"text": f"{finding.site.what} becomes {finding.construct.becomes}{remark}."},
        "locations": [location],
        "properties": {"by": finding.by},
    }


def _uri(path: Path) -> str:
    return path.as_uri() if path.is_absolute() else quote(path.as_posix())


# The command ``torchq-compat scan PATH...``: the FX constructs of a code base, and what replaces each.
#
# Source code is read, never executed. Exit code: 0 nothing found, 1 something found, 2 an error of usage or a
# file that could not be read.


CLEAN, FINDINGS, PROBLEM = 0, 1, 2
FORMAT_VERSION = 1


def add_parser(subparsers: process.Subparsers) -> None:
    parser = process.add_command(
        subparsers,
        scan_command,
        __doc__,
        help="list the FX constructs in Python files and notebooks",
        description="List the FX constructs in Python files and notebooks: where each is, what replaces it, "
        "and whether 'rewrite' does it or it needs manual review. Nothing is executed and nothing is "
        "changed.",
    )
    parser.add_argument(
        "paths", metavar="PATH", nargs="+", type=Path, help="a file, or a folder to search recursively"
    )
    process.add_limits(parser)
    output = parser.add_mutually_exclusive_group()
    output.add_argument(
        "--format", choices=("table", "json", "sarif"), default="table", help="default: table"
    )
    output.add_argument(
        "--json", dest="format", action="store_const", const="json", help="the same as --format json"
    )


def scan_command(args: argparse.Namespace) -> int:
    """Scan, print and return the exit code.

    Raises:
        PathError: a path does not exist.
    """
    scan = scan_paths(args.paths, jobs=args.jobs, seconds=args.timeout)
    if args.format == "sarif":
        print(json.dumps(sarif_log(scan.findings, scan.problems), indent=2))
    elif args.format == "json":
        print(json.dumps(as_data(scan), indent=2))
    else:
        print_report(scan)
    process.print_problems(scan.problems)
    return PROBLEM if scan.problems else FINDINGS if scan.findings else CLEAN


def as_data(scan: Scan) -> dict[str, Any]:
    """Return the scan as plain values; ``version`` is increased when this format changes."""
    findings = [
        {
            "file": str(finding.path),
            "line": finding.place.line,
            "cell": finding.place.cell,
            "code": finding.construct.code,
            "construct": finding.construct.title,
            "found": finding.site.what,
            "becomes": finding.construct.becomes,
            "by": finding.by,
            "remark": finding.remark,
            "guide": finding.construct.link,
        }
        for finding in scan.findings
    ]
    problems = [
        {"file": str(problem.path), "reason": problem.reason, "code": problem.code}
        for problem in scan.problems
    ]
    return {"version": FORMAT_VERSION, "files": scan.files, "findings": findings, "problems": problems}


def print_report(scan: Scan) -> None:
    for finding in scan.findings:
        process.print_finding(finding.line)
    by = Counter(finding.by for finding in scan.findings)
    counts = f"{counted(scan.files, 'file')}, {counted(by.total(), 'finding')}"
    print(f"{counts}: {by['rewrite']} for rewrite, {by['manual review']} for manual review")
    if codes := sorted({finding.construct.code for finding in scan.findings}):
        print(f"  torchq-compat explain {' '.join(codes)}")
    if by["rewrite"]:
        print("  torchq-compat rewrite shows these changes, torchq-compat rewrite --write makes them")
