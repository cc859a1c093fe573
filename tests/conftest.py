"""One thread, or TORCHQ_THREADS: the models are tiny, and synchronizing threads costs more than computing.

Every test module is imported, and every test set up, with its own seed: what a test draws does not depend on
which tests ran before it. `TORCHQ_SEED=2 pytest` draws different numbers for all tests; a test that fails
then asserts more than is true.

`pytest --smoke` runs one case of each test that takes little time.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import os
import sys
import warnings
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

# Threads that spin at a barrier slow down the threads they wait for; libgomp reads this variable once.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

from tests.costs import COSTLY
from tests.helpers import once
from tests.helpers.once import SEED
from torchq_compat.codes import CODES
from torchq_compat.errors import QuantizationWarning, TorchQCompatError
from torchq_compat.support.decisions import Decision

# Graphs, symbols and what is imported are millions of objects that live long.
gc.set_threshold(100_000, 50, 100)
torch.set_num_threads(int(os.environ.get("TORCHQ_THREADS", "1")))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the scripts that tests start
# Rewriting the assertions takes each worker a third of its start, and each script that a test starts imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

with warnings.catch_warnings():
    # A pair of torch and torchao that nobody tested is told at the import, once: its tests run all the same.
    warnings.simplefilter("default", QuantizationWarning)
    import torchq_compat.support.torch_ao  # noqa: F401

#: Of the kernel of recurrent modules; without it the best that the CPU has.
INSTRUCTION_SET = os.environ.get("TORCHQ_INSTRUCTION_SET")
#: Codes that a command prints, or a process raises that a test starts: the test asserts what is printed.
PRINTED = {"TQ420", "TQ421", "TQ429", "TQ801", "TQ971", "TQ984"}
LEFT_OUT = pytest.StashKey[int]()
WITHOUT_EXECUTORCH = importlib.util.find_spec("executorch") is None
#: The extra is optional; .ci/run installs it.
collect_ignore_glob = ["lower/executorch/*"] if WITHOUT_EXECUTORCH else []


#: Codes that the running test raised itself: models that tests share may be made by another one.
RAISED: set[str] = set()
#: Test, or a case of one -> the codes that the register says it raises.
NAMED: dict[str, set[str]] = {}
for entry in CODES.values():
    NAMED.setdefault(f"tests/{entry.test}", set()).add(entry.code)


def noting(original: Callable[..., None]) -> Callable[..., None]:
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        frame = sys._getframe()
        while frame.f_back is not None and frame.f_code.co_filename != once.__file__:
            frame = frame.f_back
        if frame.f_back is None:
            RAISED.add(self.code)

    return made


TorchQCompatError.__init__ = noting(TorchQCompatError.__init__)  # type: ignore[method-assign]
QuantizationWarning.__init__ = noting(QuantizationWarning.__init__)  # type: ignore[method-assign]
Decision.__init__ = noting(Decision.__init__)  # type: ignore[method-assign]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Fail a test that does not raise the codes for which the register names it."""
    RAISED.clear()
    yield
    named = {code for name in (item.nodeid, item.nodeid.partition("[")[0]) for code in NAMED.get(name, ())}
    if where := os.environ.get("TORCHQ_CODES"):  # the tests that raise a code, for the register
        with Path(where).open("a") as notes:
            notes.writelines(f"{code} {item.nodeid}\n" for code in RAISED)
    assert named <= {*RAISED, *PRINTED}, f"{named - RAISED} not raised: name another test in codes.toml"


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


def pytest_collection_finish() -> None:
    if INSTRUCTION_SET:
        from torchq_compat.recurrent.kernel.build import kernel_build

        kernel = ctypes.CDLL(str(kernel_build().library))
        assert kernel.torchq_compat_use_instruction_set(INSTRUCTION_SET.encode()) == 0, INSTRUCTION_SET
    gc.freeze()


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
