"""The documentation runs: every Python block of the README and of the guide, in order, file by file."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from migration.generate.pages import guide_pages
from torchq_compat.checkpoints import load_fx_state

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
GUIDE = guide_pages(ROOT)
#: Each page of the guide continues the previous one.
FIRST = ROOT / "migration" / "guide" / "ten-minutes.md"
ALONE = [ROOT / "README.md", *(path for path in (ROOT / "migration").glob("*.md") if path not in GUIDE)]
TEXTS = {path.relative_to(ROOT).as_posix(): [path] for path in sorted(ALONE)} | {"guide": GUIDE}
LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]+))?\)")
ANCHOR = re.compile(r'<a id="([^"]+)">')
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


@pytest.mark.parametrize("name", TEXTS)
def test_python_blocks_run(name: str) -> None:
    torch.manual_seed(0)
    begun: dict[str, object] = {"__name__": "documentation"}
    if name == "guide":
        run_blocks(FIRST, begun)
    ran = sum(run_blocks(document, {**begun}) for document in TEXTS[name] if document != FIRST)
    assert ran


def run_blocks(document: Path, namespace: dict[str, object]) -> int:
    blocks = [block for block in BLOCK.findall(document.read_text()) if runs_here(block)]
    for block in blocks:
        exec(compile(block, document.name, "exec"), namespace)
    return len(blocks)


def runs_here(text: str) -> bool:
    """Return whether the extra is there that ``text`` needs."""
    return "to_executorch" not in text or importlib.util.find_spec("executorch") is not None


def anchors_of(page: Path) -> set[str]:
    text = page.read_text()
    headings = {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in HEADING.findall(text)}
    return headings | set(ANCHOR.findall(text))


PAGES = sorted({ROOT / "CONTRIBUTING.md", ROOT / "ARCHITECTURE.md", *ALONE, *GUIDE})


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)):
        if target.startswith(("http:", "https:")):
            continue
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors_of(file), f"{page.name}: {target}#{anchor}"


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
    functions = [each for each in functions if runs_here(each.__name__)]
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
