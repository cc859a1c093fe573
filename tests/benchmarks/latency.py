"""Latency, size and accuracy of converted models: every contender on every case."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from tests.benchmarks.cases import Case, Recipe
from tests.benchmarks.contenders import Built, Contender, UnavailableError
from tests.benchmarks.timing import LimitReachedError, measure_in_turns, time_limit
from tests.helpers.oracle import leaves, sqnr

__all__ = ["Effort", "measure_latency", "verdict"]

#: In dB. The int8 noise of a quantized model keeps its SQNR below the first; below the second it is useless.
TOO_GOOD, TOO_BAD = 60.0, 12.0


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    Attributes:
        rounds: turns of every contender.
        turn_seconds: length of a turn.
        build_limit: seconds a contender may take to be built and called for the first time.
        threads: threads of torch while measuring; models are built with one, so that torch.export is not
            disturbed.
    """

    rounds: int
    turn_seconds: float
    build_limit: float
    threads: int


def measure_latency(
    recipes: Sequence[Recipe],
    contenders: Sequence[Contender],
    effort: Effort,
    tell: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Return one row for each case and contender: the measurements, or why there are none."""
    rows: list[dict[str, Any]] = []
    for recipe in recipes:
        tell(recipe.name)
        case = recipe.make()
        case.threads = effort.threads
        measured = _measure_case(case, contenders, effort, tell)
        rows += [{**row, "hidden": recipe.hidden} for row in measured]
    return rows


def verdict(db: float, *, is_quantized: bool) -> str:
    """Return what an SQNR of ``db`` says about whether the right thing was measured."""
    if not is_quantized:
        return "float"
    if db > TOO_GOOD:
        return "too good: nothing was quantized"
    return "too bad" if db < TOO_BAD else "quantized"


def _measure_case(
    case: Case, contenders: Sequence[Contender], effort: Effort, tell: Callable[[str], None]
) -> list[dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    calls = {}
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for contender in contenders:
            row = {"case": case.name, "contender": contender.name}
            try:
                built, facts = _build(case, contender, effort)
            except UnavailableError as reason:
                rows[contender.name] = {**row, "unavailable": str(reason)}
                tell(f"  {contender.name}: {reason}")
            else:
                rows[contender.name] = {**row, "size_bytes": built.size, **facts}
                calls[contender.name] = partial(built.run, *case.inputs)
        with _threads(effort.threads):
            timings = measure_in_turns(calls, rounds=effort.rounds, turn_seconds=effort.turn_seconds)
    for name, timing in timings.items():
        rows[name].update(asdict(timing))
    return list(rows.values())


def _build(case: Case, contender: Contender, effort: Effort) -> tuple[Built, dict[str, Any]]:
    """Return the contender, warm, and its accuracy."""
    try:
        with time_limit(effort.build_limit):
            # Outside inference mode: parameters made inside it could not be exported.
            with torch.inference_mode(False), torch.no_grad(), _threads(1):
                built = contender.build(case)
            with _threads(effort.threads):
                first = built.run(*case.inputs)
                built.run(*case.inputs)
    except LimitReachedError:
        raise UnavailableError(f"not ready after {effort.build_limit:g} s") from None
    except UnavailableError:
        raise
    except Exception as problem:
        line = str(problem).strip().partition("\n")[0]
        raise UnavailableError(f"{type(problem).__name__}: {line}") from problem
    db = sqnr(leaves(case.expected)[0], leaves(first)[0])
    # JSON has no infinity.
    known = round(db, 1) if math.isfinite(db) else None
    return built, {"sqnr_db": known, "verdict": verdict(db, is_quantized=contender.is_quantized)}


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
