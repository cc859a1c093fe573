"""The outcome of a wrong call: an error of this package with a hint, or something users should not get."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torchq_compat.codes import CODES
from torchq_compat.errors import QuantizationWarning, TorchQCompatError

__all__ = ["OF_USER", "Case", "Outcome", "Result", "attempt", "counted", "summary"]


#: Why a call may raise any error: it comes through, as it is.
OF_USER = "what the user's function raises"


class Outcome(Enum):
    OURS = "ours"
    NO_HINT = "ours without a hint"
    RAW = "raw"
    SILENT = "silent"
    WARNED = "done with a warning of ours"
    ACCEPTED = "accepted, with a reason"


@dataclass(frozen=True)
class Case:
    """A wrong call.

    Attributes:
        name: what is called, and what is wrong with it.
        named: texts that the message has to contain.
        accepted: why this call may succeed; empty if it may not.
    """

    name: str
    call: Callable[[], Any]
    named: tuple[str, ...] = ()
    accepted: str = ""


@dataclass(frozen=True)
class Result:
    case: Case
    outcome: Outcome
    message: str

    def __str__(self) -> str:
        return f"{self.outcome.value}: {self.case.name}: {self.message}"


def attempt(case: Case) -> Result:
    """Make the call."""
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            value = case.call()
    except TorchQCompatError as error:
        problem, _, hint = str(error).partition("\nHint: ")
        fits = (
            len(problem) > 20 and len(hint) > 20 and hint.endswith(f"[{error.code}]") and error.code in CODES
        )
        missing = [text for text in case.named if text not in problem]
        if missing:
            return Result(case, Outcome.NO_HINT, f"{missing} not named in: {error}")
        return Result(case, Outcome.OURS if fits else Outcome.NO_HINT, str(error))
    except Exception as error:  # raw errors are what the fuzzer searches for
        if case.accepted == OF_USER:
            return Result(case, Outcome.ACCEPTED, case.accepted)
        return Result(case, Outcome.RAW, f"{type(error).__name__}: {error}"[:300])
    if case.accepted:
        return Result(case, Outcome.ACCEPTED, case.accepted)
    told = [str(each.message) for each in caught if issubclass(each.category, QuantizationWarning)]
    if told:
        return Result(case, Outcome.WARNED, told[0])
    return Result(case, Outcome.SILENT, f"returned {type(value).__name__}")


def counted(results: Iterable[Result]) -> Counter[Outcome]:
    return Counter(result.outcome for result in results)


def summary(results: list[Result]) -> str:
    counts = counted(results)
    parts = ", ".join(f"{counts[outcome]} {outcome.value}" for outcome in Outcome)
    return f"{len(results)} calls: {parts}"
