"""One thread: the models are tiny, and synchronizing threads costs more than the computation.

Every test module is imported, and every test set up, with its own seed: what a test draws does not depend on
which tests ran before it. `TORCHQ_SEED=2 pytest` draws different numbers for all tests; a test that fails
then asserts more than is true.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
import zlib
from collections.abc import Generator, Sequence

import pytest

# Threads that spin at a barrier slow down the threads they wait for; libgomp reads this variable once.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

from torchq_compat.errors import QuantizationWarning

torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the scripts that tests start

with warnings.catch_warnings():
    # A pair of torch and torchao that nobody tested is told at the import, once: its tests run all the same.
    warnings.simplefilter("default", QuantizationWarning)
    import torchq_compat.support.torch_ao  # noqa: F401

SEED = int(os.environ.get("TORCHQ_SEED", "0"))
LEFT_OUT = pytest.StashKey[int]()
WITHOUT_EXECUTORCH = importlib.util.find_spec("executorch") is None
#: The extra is optional; .ci/run installs it.
collect_ignore_glob = ["lower/executorch/*"] if WITHOUT_EXECUTORCH else []


def seed(node: pytest.Item | pytest.Collector) -> None:
    torch.manual_seed(SEED + zlib.crc32(node.nodeid.encode()))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    seed(collector)
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    seed(item)


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
        terminalreporter.write_line("tests/lower/executorch left out: pip install -e .[executorch] adds them")
