"""Notebooks: cells joined into one text; lines of IPython and the file's layout kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from torchq_compat.cli import main
from torchq_compat.port.scanner import scan_paths
from torchq_compat.port.source.files import Position, read_document

IMPORT = "from torch.ao.quantization.quantize_fx import prepare_fx"
REWRITTEN = "from torchq_compat.quantize_fx import prepare_fx"


def notebook(*cells: str | list[str]) -> dict[str, Any]:
    code = [{"cell_type": "code", "metadata": {}, "outputs": [], "source": source} for source in cells]
    return {"cells": code, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}


def sources(path: Path) -> list[str | list[str]]:
    return [cell["source"] for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]]


@pytest.mark.parametrize("options", [{"indent": 1}, {"indent": 2}, {}, {"indent": 1, "ensure_ascii": False}])
@pytest.mark.parametrize("end", ["", "\n"])
def test_layout_and_other_cells_stay(tmp_path: Path, options: dict[str, Any], end: str) -> None:
    path = tmp_path / "a.ipynb"
    cells = [f"# é\n{IMPORT}", [f"%time {IMPORT}\n", "x = !ls\n", "    \n"], "%%html\n<p>prepare_fx"]
    path.write_text(json.dumps(notebook(*cells), **options) + end, encoding="utf-8")
    assert main(["rewrite", "--write", str(path)]) == 0
    cells[0] = f"# é\n{REWRITTEN}"
    assert path.read_text(encoding="utf-8") == json.dumps(notebook(*cells), **options) + end


def test_a_name_of_one_cell_is_known_in_the_next(tmp_path: Path) -> None:
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps(notebook(["import os\n", IMPORT], "", "d = {'': q}", "prepare_fx(m, d, x)")))
    found = [(finding.construct.code, finding.place) for finding in scan_paths([path]).findings]
    assert found == [("TQ101", Position(2, cell=1, column=47)), ("TQ105", Position(1, cell=3, column=5))]


@pytest.mark.parametrize(
    "code",
    [
        "x = (1\n% 2)",
        "text = '''\n%s\n!x\nname?\n'''",
        "for x in y:\n    %time 1\n    !ls {x}",
        "await thing\nasync with a as b:\n    pass",
        "?name\nname.other??\n%load_ext x",
    ],
)
def test_lines_that_look_like_magics(tmp_path: Path, code: str) -> None:
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps(notebook(code, IMPORT)))
    document = read_document(path)
    assert document.problems == ()
    assert main(["rewrite", "--write", str(path)]) == 0
    assert sources(path) == [code, REWRITTEN]
