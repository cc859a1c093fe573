"""One thread: the models are tiny, and threads that wait for each other cost more than they do."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence

import pytest

# Threads that spin at a barrier take the time of those that they wait for; libgomp reads it once.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the scripts that tests start

LEFT_OUT = pytest.StashKey[int]()
WITHOUT_EXECUTORCH = importlib.util.find_spec("executorch") is None
#: The extra is optional; .ci/run installs it.
collect_ignore_glob = ["lower/executorch/*"] if WITHOUT_EXECUTORCH else []


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    left_out = [item for item in items if item.get_closest_marker("browser")]
    if left_out:
        stash = left_out[0].config.stash
        stash[LEFT_OUT] = stash.get(LEFT_OUT, 0) + len(left_out)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say which tests are left out that .ci/run runs."""
    count = config.stash.get(LEFT_OUT, 0)
    if count:
        terminalreporter.write_line(f"{count} test(s) in a browser left out: pytest -m browser runs them")
    if WITHOUT_EXECUTORCH:
        terminalreporter.write_line("tests/lower/executorch left out: pip install -e .[executorch] adds them")
