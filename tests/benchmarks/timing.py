"""Wall-clock time of several calls in turns, so that disturbances of the machine affect all of them."""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

__all__ = ["LimitReachedError", "Timing", "measure_in_turns", "time_limit"]

Call = Callable[[], Any]


@dataclass(frozen=True)
class Timing:
    """Milliseconds per call: median of the turns, first and third quartile, and the number of turns."""

    median_ms: float
    low_ms: float
    high_ms: float
    turns: int

    @classmethod
    def of(cls, seconds: list[float]) -> Timing:
        low, median, high = (
            statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
        )
        return cls(median * 1e3, low * 1e3, high * 1e3, len(seconds))


def measure_in_turns(calls: Mapping[str, Call], *, rounds: int, turn_seconds: float) -> dict[str, Timing]:
    """Time warm ``calls``: in each round every call has one turn of about ``turn_seconds``, but at least one
    call.

    Every round starts with a different call, so that no call always follows the same neighbour.
    """
    repeats = {name: max(1, round(turn_seconds / _seconds(call, 1))) for name, call in calls.items()}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for start in range(rounds):
        turn = start % len(names) if names else 0
        for name in names[turn:] + names[:turn]:
            seconds[name].append(_seconds(calls[name], repeats[name]))
    return {name: Timing.of(taken) for name, taken in seconds.items()}


class LimitReachedError(BaseException):
    """Not an Exception, so that no measured code catches it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise LimitReachedError in the body after ``seconds``; works only in the main thread."""

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise LimitReachedError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _seconds(call: Call, repeats: int) -> float:
    started = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - started) / repeats
