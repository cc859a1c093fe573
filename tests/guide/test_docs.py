"""The documentation runs: every Python block of the README and of the guide, in order, file by file."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "migration").glob("*.md")])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_python_blocks_run(document: Path) -> None:
    blocks = BLOCK.findall(document.read_text())
    assert blocks
    torch.manual_seed(0)
    namespace: dict[str, object] = {"__name__": "documentation"}
    for block in blocks:
        exec(compile(block, document.name, "exec"), namespace)


def test_examples_of_public_functions_run() -> None:
    from torchq_compat import explain, export, quantize_fx, to_executorch, to_onnx
    from torchq_compat.checkpoints import load_fx_state

    names = ("prepare_fx", "prepare_qat_fx", "convert_fx", "convert_to_reference_fx", "fuse_fx")
    others = (explain, export, to_executorch, to_onnx, load_fx_state)
    for function in (*(getattr(quantize_fx, name) for name in names), *others):
        (test,) = doctest.DocTestFinder(recurse=False).find(function, function.__name__, globs={})
        assert test.examples, f"{function.__name__} has no example"
        ran = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test)
        assert (ran.failed, ran.attempted) == (0, len(test.examples)), function.__name__


def test_readme_names_the_commands_that_ci_runs() -> None:
    readme, ci = (ROOT / "README.md").read_text(), (ROOT / ".ci" / "run").read_text()
    for command in (
        "torchq-compat run migration/legacy/char_lm.py",
        "ruff check .",
        "ruff format --check .",
        "mypy",
        "pytest",
    ):
        assert command in readme
        assert command in ci
