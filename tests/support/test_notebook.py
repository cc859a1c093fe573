"""A notebook runs cell by cell: a report shows itself as HTML, once, and nothing is printed."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

import torchq_compat as tc

NOTEBOOK = Path(tc.__file__).parents[1] / "migration" / "notebook.ipynb"


def displayed(source: str, namespace: dict[str, Any]) -> str:
    """Run a cell as Jupyter does; return the HTML of its last expression, empty if it has none."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), namespace)
    if last is None:
        return ""
    assert isinstance(last, ast.Expr)
    value = eval(compile(ast.Expression(last.value), "cell", "eval"), namespace)
    html: str = value._repr_html_()
    return html


def test_every_cell_runs_and_shows_itself_once(capsys: pytest.CaptureFixture[str]) -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    namespace: dict[str, Any] = {"__name__": "__main__"}
    shown = [displayed(sources[0], namespace)]
    capsys.readouterr()  # the output of torch and torchao when they are imported
    shown += [displayed(source, namespace) for source in sources[1:]]
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")
    _, prepared, report, weights, comparison, worst = shown
    assert "qconfig from global" in prepared
    assert "int8" in prepared
    assert "2 quantized (12 parts inside), 0 float" in report
    assert report.count("igates.weight") == 1
    assert weights.count("weight</td>") == 3
    assert namespace["found"].summary in comparison
    assert worst.count("<tr") == 4
