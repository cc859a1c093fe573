"""Findings as SARIF 2.1.0, the format that code-scanning services read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from urllib.parse import quote

from torchq_compat.port.constructs import CONSTRUCTS, Construct
from torchq_compat.port.process import project_address
from torchq_compat.port.scanner import Finding
from torchq_compat.port.source.files import Problem

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
RULES = tuple(CONSTRUCTS.values())


def sarif_log(findings: Iterable[Finding], problems: Iterable[Problem]) -> dict[str, Any]:
    """Return the SARIF log of one ``torchq-compat scan``; problems are notifications of its invocation."""
    notifications = [_notification(problem) for problem in problems]
    run = {
        "tool": {"driver": _driver()},
        "columnKind": "unicodeCodePoints",
        "results": [_result(finding) for finding in findings],
        "invocations": [{"executionSuccessful": True, "toolExecutionNotifications": notifications}],
    }
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def _driver() -> dict[str, Any]:
    driver: dict[str, Any] = {"name": "torchq-compat", "rules": [_rule(construct) for construct in RULES]}
    with contextlib.suppress(PackageNotFoundError):  # run from a source tree
        driver["version"] = version("torchq-compat")
    if address := project_address():
        driver["informationUri"] = address
    return driver


def _rule(construct: Construct) -> dict[str, Any]:
    return {
        "id": construct.code,
        "name": construct.title,
        "shortDescription": {"text": f"FX graph mode: {construct.title}"},
        "help": {"text": f"becomes {construct.becomes}; see {construct.link}"},
    }


def _result(finding: Finding) -> dict[str, Any]:
    remark = f" ({finding.remark})" if finding.remark else ""
    return {
        "ruleId": finding.construct.code,
        "ruleIndex": RULES.index(finding.construct),
        "level": "warning" if finding.by == "manual review" else "note",
        "message": {"text": f"{finding.site.what} becomes {finding.construct.becomes}{remark}."},
        "locations": [_location(finding)],
        "properties": {"by": finding.by},
    }


def _location(finding: Finding) -> dict[str, Any]:
    physical: dict[str, Any] = {"artifactLocation": {"uri": _uri(finding.path)}}
    if finding.place.cell is None:
        return {"physicalLocation": {**physical, "region": {"startLine": finding.place.line}}}
    # A line in a cell is not that line of the notebook file, so no region is given.
    return {"physicalLocation": physical, "logicalLocations": [{"name": f"cell {finding.place.cell}"}]}


def _notification(problem: Problem) -> Mapping[str, Any]:
    location = {"physicalLocation": {"artifactLocation": {"uri": _uri(problem.path)}}}
    return {"level": "error", "message": {"text": problem.reason}, "locations": [location]}


def _uri(path: Path) -> str:
    return path.as_uri() if path.is_absolute() else quote(path.as_posix())
