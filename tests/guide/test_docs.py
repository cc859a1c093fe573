"""The documentation runs: every Python block of the README and of the guide, in order, file by file."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from torchq_compat.checkpoints import load_fx_state

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


PUBLIC = (
    "torchq_compat",
    "torchq_compat.lstm_utils",
    "torchq_compat.recurrent_parts",
    "torchq_compat.profiles",
)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_function_has_an_example_that_runs(name: str) -> None:
    module = importlib.import_module(name)
    functions = [value for each in module.__all__ if inspect.isfunction(value := getattr(module, each))]
    assert len(functions) >= 1
    run_examples(functions)


def test_the_example_of_loading_a_state_of_fx_runs() -> None:
    run_examples([load_fx_state])


def run_examples(functions: Iterable[Callable[..., Any]]) -> None:
    for function in functions:
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
