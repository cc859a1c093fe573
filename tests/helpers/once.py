"""What many tests start from is made once a session, and copied for each: preparing costs thirty copies."""

from __future__ import annotations

import copy
import functools
import inspect
import os
import zlib
from collections.abc import Callable, Hashable
from typing import ParamSpec, TypeVar

import torch

__all__ = ["SEED", "made_once"]

#: `TORCHQ_SEED=2 pytest` draws different numbers for all tests.
SEED = int(os.environ.get("TORCHQ_SEED", "0"))
#: `TORCHQ_SHARE=0 pytest` makes everything anew for each test, with the same numbers.
SHARED = os.environ.get("TORCHQ_SHARE", "1") != "0"

P = ParamSpec("P")
Made = TypeVar("Made")


def made_once(make: Callable[P, Made]) -> Callable[P, Made]:
    """Return ``make`` with a memory: for equal arguments it hands out deep copies of one result.

    Arguments are hashable, and their repr is the same in every process.
    ``make`` draws from a seed of its own, and leaves the caller's as it was: neither the result nor what a
    test draws next depends on which test asks first. Its warnings are seen by that test alone, so tests of
    warnings call ``__wrapped__``. Models that share tensors, or a model and its inputs, are one tuple.
    """
    results: dict[Hashable, Made] = {}
    signature = inspect.signature(make)

    @functools.wraps(make)
    def copy_of(*args: P.args, **kwargs: P.kwargs) -> Made:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        key = (given.args, tuple(sorted(given.kwargs.items())))
        if key not in results or not SHARED:
            with torch.random.fork_rng(devices=()):
                torch.manual_seed(SEED + zlib.crc32(f"{make.__module__}.{make.__qualname__}{key}".encode()))
                results[key] = make(*args, **kwargs)
        return copy.deepcopy(results[key])

    return copy_of
