"""The options of the tests; `pytest --smoke` runs one case of each test that takes little time.

What happens around each test is in ``around_tests``.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import pytest

from tests.costs import COSTLY

# Threads that spin at a barrier slow down the threads they wait for; libgomp reads this variable once.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the scripts that tests start
# Rewriting the assertions takes each worker a third of its start, and each script that a test starts imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

LEFT_OUT = pytest.StashKey[int]()
WITHOUT_EXECUTORCH = importlib.util.find_spec("executorch") is None
#: The extra is optional; .ci/run installs it.
collect_ignore_glob = ["lower/executorch/*"] if WITHOUT_EXECUTORCH else []


def pytest_configure(config: pytest.Config) -> None:
    """Import torch where tests run: pytest-xdist's first process only hands them out."""
    if hasattr(config, "workerinput") or config.getoption("dist", "no") == "no":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config.pluginmanager.register(importlib.import_module("tests.around_tests"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--smoke", action="store_true", help="one case of each test that takes little time")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out: set[pytest.Item] = set()
    if WITHOUT_EXECUTORCH:
        left_out.update(item for item in items if item.get_closest_marker("executorch"))
    if config.getoption("--smoke"):
        left_out.update(not_in_smoke(items))
    config.hook.pytest_deselected(items=[*left_out])
    items[:] = [item for item in items if item not in left_out]


def not_in_smoke(items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield the tests in ``costly.txt``, and of each other test all cases but the first."""
    done = set(COSTLY.read_text().split())
    for item in items:
        path, _, rest = item.nodeid.partition(".py::")
        name = f"{path.replace('/', '.')}::{rest.partition('[')[0]}"
        if name in done:
            yield item
        done.add(name)


@pytest.fixture
def engine() -> Iterator[Callable[[str], object]]:
    """Return a function that chooses the quantized engine until the test ends."""
    from torchq_compat.support.quantized_tensors import using_engine

    with ExitStack() as stack:
        yield lambda name: stack.enter_context(using_engine(name))


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    left_out = [item for item in items if item.get_closest_marker("browser")]
    if left_out:
        stash = left_out[0].config.stash
        stash[LEFT_OUT] = stash.get(LEFT_OUT, 0) + len(left_out)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Report the tests that .ci/run runs and this run leaves out."""
    count = config.stash.get(LEFT_OUT, 0)
    if count:
        terminalreporter.write_line(f"{count} test(s) in a browser left out: pytest -m browser runs them")
    if WITHOUT_EXECUTORCH:
        terminalreporter.write_line(
            "tests/lower/executorch, tests marked executorch and its blocks of the guide left out: "
            "pip install -e .[executorch] adds them"
        )
