"""What many tests start from is made once a session, and copied for each: preparing costs thirty copies."""

from __future__ import annotations

import copy
import functools
import inspect
import os
import zlib
from collections.abc import Callable, Hashable
from typing import Any, Generic, ParamSpec, TypeVar

import torch

__all__ = ["SEED", "made_once", "seed_torch"]

#: `TORCHQ_SEED=2 pytest` draws different numbers for all tests.
SEED = int(os.environ.get("TORCHQ_SEED", "0"))
#: `TORCHQ_SHARE=0 pytest` makes everything anew for each test, with the same numbers.
SHARED = os.environ.get("TORCHQ_SHARE", "1") != "0"

#: ``torch.manual_seed`` also queues a call, with the text of its stack, for devices that are not there.
seed_torch: Callable[[int], object] = (
    torch.manual_seed if torch.backends.cuda.is_built() else torch.default_generator.manual_seed
)

#: Module -> what its functions under ``made_once`` remember.
MADE: dict[str, list[dict[Hashable, Any]]] = {}

P = ParamSpec("P")
Made = TypeVar("Made")


class MadeOnce(Generic[P, Made]):
    """A function with a memory: for equal arguments it hands out deep copies of one result.

    A copy costs up to a third of what preparing costs: tests that only call and read take ``itself``.
    """

    def __init__(self, make: Callable[P, Made]) -> None:
        functools.update_wrapper(self, make)
        self.__wrapped__ = make
        self._results: dict[Hashable, Made] = {}
        MADE.setdefault(make.__module__, []).append(self._results)
        self._signature = inspect.signature(make)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Made:
        return copy.deepcopy(self.itself(*args, **kwargs))

    def itself(self, *args: P.args, **kwargs: P.kwargs) -> Made:
        """Return what the copies are made of; nothing of it may be changed, nor may an observer see data."""
        given = self._signature.bind(*args, **kwargs)
        given.apply_defaults()
        key = (given.args, tuple(sorted(given.kwargs.items())))
        if key not in self._results or not SHARED:
            make = self.__wrapped__
            with torch.random.fork_rng(devices=()):
                seed_torch(SEED + zlib.crc32(f"{make.__module__}.{make.__qualname__}{key}".encode()))
                self._results[key] = make(*args, **kwargs)
        return self._results[key]


def made_once(make: Callable[P, Made]) -> MadeOnce[P, Made]:
    """Return ``make`` with a memory, which hands out copies.

    Arguments are hashable, and their repr is the same in every process.
    ``make`` draws from a seed of its own, and leaves the caller's as it was: neither the result nor what a
    test draws next depends on which test asks first. Its warnings are seen by that test alone, so tests of
    warnings call ``__wrapped__``. Models that share tensors, or a model and its inputs, are one tuple.
    """
    return MadeOnce(make)
