"""What happens around each test, in the processes that run tests: all but the one that hands them out.

One thread, or TORCHQ_THREADS: the models are tiny, and synchronizing threads costs more than computing.

Every test module is imported, and every test set up, with its own seed: what a test draws does not depend on
which tests ran before it. `TORCHQ_SEED=2 pytest` draws different numbers for all tests; a test that fails
then asserts more than is true.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import warnings
import zlib
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import once
from tests.helpers.once import SEED, seed_torch
from torchq_compat.codes import CODES
from torchq_compat.errors import QuantizationWarning, TorchQCompatError
from torchq_compat.support.decisions import Decision

# Graphs, symbols and what is imported are millions of objects that live long.
gc.set_threshold(100_000, 50, 100)
torch.set_num_threads(int(os.environ.get("TORCHQ_THREADS", "1")))

with warnings.catch_warnings():
    # A pair of torch and torchao that nobody tested is told at the import, once: its tests run all the same.
    warnings.simplefilter("default", QuantizationWarning)
    import torchq_compat.support.torch_ao  # noqa: F401

#: Of the kernel of recurrent modules; without it the best that the CPU has.
INSTRUCTION_SET = os.environ.get("TORCHQ_INSTRUCTION_SET")
#: Codes that a command prints, or a process raises that a test starts: the test asserts what is printed.
PRINTED = {"TQ420", "TQ421", "TQ429", "TQ801", "TQ971", "TQ984"}

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
    seed_torch(SEED + zlib.crc32(node.nodeid.encode()))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    seed(collector)
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    seed(item)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Function, nextitem: pytest.Function | None) -> None:
    """Let go of what the tests of a file shared.

    Each graph module has a class, and what ``torch.fx`` patches in ``nn.Module`` takes time for all classes
    beneath it.
    """
    if nextitem is None or nextitem.path != item.path:
        for results in once.MADE.get(item.module.__name__, ()):
            results.clear()
        gc.collect()
        gc.freeze()  # What is left lives long, as what was imported.


def pytest_collection_finish() -> None:
    if INSTRUCTION_SET:
        from torchq_compat.recurrent.kernel.build import kernel_build

        kernel = ctypes.CDLL(str(kernel_build().library))
        assert kernel.torchq_compat_use_instruction_set(INSTRUCTION_SET.encode()) == 0, INSTRUCTION_SET
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let the interpreter end without looking through what all tests left."""
    gc.freeze()
