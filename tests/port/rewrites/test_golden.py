"""Golden files: ``golden/<case>/input`` is scanned to ``findings.json`` and rewritten to ``expected``.

``python -m tests.port.rewrites.test_golden`` writes them anew, so that a person can read the difference.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from torchq_compat.cli import main
from torchq_compat.port.constructs import CONSTRUCTS
from torchq_compat.port.scan_command import as_data
from torchq_compat.port.scanner import TOO_LONG, scan_paths

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = sorted(path.parent for path in GOLDEN.glob("*/input"))


def findings(folder: Path) -> object:
    data = json.dumps(as_data(scan_paths([folder])))
    return json.loads(data.replace(json.dumps(str(folder))[1:-1] + "/", ""))


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files of ``folder``, without what Python compiled where another test imports one."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.parent.name != "__pycache__")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_scan(case: Path) -> None:
    assert findings(case / "input") == json.loads((case / "findings.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_rewrite(case: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    shutil.copytree(case / "input", work)
    main(["rewrite", "--write", str(work)])
    assert contents(work) == contents(case / "expected")
    main(["rewrite", "--write", str(work)])
    assert contents(work) == contents(case / "expected"), "rewriting again changes something"


def test_there_are_cases() -> None:
    assert {case.name for case in CASES} >= {"notebook", "without_fx", "re_exported"}


def test_every_code_is_found_somewhere_and_has_a_look_alike() -> None:
    found = {
        finding["code"]
        for case in CASES
        for finding in json.loads((case / "findings.json").read_text())["findings"]
    }
    # What takes too long is in test_scan_command.py.
    assert found == set(CONSTRUCTS) - {TOO_LONG}
    assert json.loads((GOLDEN / "look_alikes" / "findings.json").read_text())["findings"] == []
    source = (GOLDEN / "look_alikes" / "input" / "script.py").read_text()
    assert {code for code in CONSTRUCTS if code not in source} == {TOO_LONG}


def regenerate() -> None:
    for case in CASES:
        (case / "findings.json").write_text(json.dumps(findings(case / "input"), indent=1) + "\n")
        shutil.rmtree(case / "expected", ignore_errors=True)
        shutil.copytree(case / "input", case / "expected")
        main(["rewrite", "--write", str(case / "expected")])


if __name__ == "__main__":
    regenerate()
