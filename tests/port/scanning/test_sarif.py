"""The SARIF log against the parts of the 2.1.0 schema that it uses."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from torchq_compat.cli import main
from torchq_compat.port.constructs import CONSTRUCTS

GOLDEN = Path(__file__).parents[1] / "golden"
#: Both levels, most codes, cells.
CASES = ("before_and_after", "for_manual_review", "notebook")

#: After the SARIF 2.1.0 specification, sections 3.13 to 3.59; the log may contain nothing else.
MESSAGE = {"type": "object", "required": ["text"], "properties": {"text": {"type": "string", "minLength": 1}}}
LOCATION = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "physicalLocation": {
            "type": "object",
            "additionalProperties": False,
            "required": ["artifactLocation"],
            "properties": {
                "artifactLocation": {
                    "type": "object",
                    "required": ["uri"],
                    "properties": {"uri": {"type": "string", "pattern": "^[^ \\\\]+$"}},
                },
                "region": {
                    "type": "object",
                    "required": ["startLine"],
                    "properties": {"startLine": {"type": "integer", "minimum": 1}},
                },
            },
        },
        "logicalLocations": {"type": "array", "items": {"type": "object", "required": ["name"]}},
    },
}
LEVEL = {"enum": ["none", "note", "warning", "error"]}
SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["version", "runs"],
    "properties": {
        "$schema": {"type": "string", "format": "uri"},
        "version": {"const": "2.1.0"},
        "runs": {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["tool"],
                "properties": {
                    "columnKind": {"enum": ["utf16CodeUnits", "unicodeCodePoints"]},
                    "tool": {
                        "type": "object",
                        "additionalProperties": False,
                        "required": ["driver"],
                        "properties": {
                            "driver": {
                                "type": "object",
                                "additionalProperties": False,
                                "required": ["name"],
                                "properties": {
                                    "name": {"type": "string"},
                                    "version": {"type": "string"},
                                    "informationUri": {"type": "string", "format": "uri"},
                                    "rules": {
                                        "type": "array",
                                        "uniqueItems": True,
                                        "items": {
                                            "type": "object",
                                            "additionalProperties": False,
                                            "required": ["id"],
                                            "properties": {
                                                "id": {"type": "string"},
                                                "name": {"type": "string"},
                                                "shortDescription": MESSAGE,
                                                "help": MESSAGE,
                                            },
                                        },
                                    },
                                },
                            }
                        },
                    },
                    "results": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "additionalProperties": False,
                            "required": ["message"],
                            "properties": {
                                "ruleId": {"type": "string"},
                                "ruleIndex": {"type": "integer", "minimum": -1},
                                "level": LEVEL,
                                "message": MESSAGE,
                                "locations": {"type": "array", "items": LOCATION},
                                "properties": {"type": "object"},
                            },
                        },
                    },
                    "invocations": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "additionalProperties": False,
                            "required": ["executionSuccessful"],
                            "properties": {
                                "executionSuccessful": {"type": "boolean"},
                                "toolExecutionNotifications": {
                                    "type": "array",
                                    "items": {
                                        "type": "object",
                                        "additionalProperties": False,
                                        "required": ["message"],
                                        "properties": {
                                            "level": LEVEL,
                                            "message": MESSAGE,
                                            "locations": {"type": "array", "items": LOCATION},
                                        },
                                    },
                                },
                            },
                        },
                    },
                },
            },
        },
    },
}


def test_sarif(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "with space.py"
    broken.write_text("prepare_fx (:\n")
    folders = [str(GOLDEN / case / "input") for case in CASES]
    assert main(["scan", *folders, str(broken), "--format", "sarif"]) == 2
    log = json.loads(capsys.readouterr().out)
    jsonschema.validate(log, SCHEMA)
    (run,) = log["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == list(CONSTRUCTS)
    assert {result["ruleId"] for result in run["results"]} >= {"TQ101", "TQ105", "TQ203"}
    assert {result["level"] for result in run["results"]} == {"note", "warning"}
    assert any("logicalLocations" in each for result in run["results"] for each in result["locations"])
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["level"] == ("warning" if result["properties"]["by"] == "manual review" else "note")
    notified = run["invocations"][0]["toolExecutionNotifications"]
    uris = [note["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for note in notified]
    assert any(uri.endswith("with%20space.py") for uri in uris)
    assert all(note["message"]["text"].endswith(" [TQ984]") for note in notified)
