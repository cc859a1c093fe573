"""Short runs of the fuzzers; ``python -m tests.fuzz`` runs all of their cases."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import pytest

from tests.fuzz import bad_arguments, bad_calls, bad_settings, structures
from tests.fuzz.outcomes import Case, Outcome, attempt
from torchq_compat.errors import QuantizationWarning

FINE = (Outcome.OURS, Outcome.WARNED, Outcome.ACCEPTED)


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def check(cases: Iterable[Case], at_least: int = 20) -> None:
    results = [attempt(case) for case in cases]
    assert len(results) >= at_least
    assert [str(result) for result in results if result.outcome not in FINE] == []


def some(cases: Iterable[Case], start: int, step: int) -> Iterator[Case]:
    return islice(cases, start, None, step)


def test_every_public_function_is_known_to_the_fuzzer() -> None:
    entry_points = bad_arguments.entry_points()
    assert len(entry_points) > 35
    assert [entry_point.name for entry_point in entry_points if entry_point.good is None] == []


def test_what_is_good_is_taken() -> None:
    """Otherwise every wrong call would be refused for the same reason."""
    for entry_point in bad_arguments.entry_points():
        assert entry_point.good is not None
        if entry_point.name not in ("compare", "compare_case", "to_executorch"):
            with warnings.catch_warnings():
                # For such a small model suggest warns that nothing helps.
                warnings.filterwarnings("ignore", "suggest: leaving out", QuantizationWarning)
                entry_point.function(**entry_point.good())


def test_wrong_arguments() -> None:
    slow = ("compare", "to_executorch", "prepare_qat_fx")
    check(some((case for case in bad_arguments.cases() if not case.name.startswith(slow)), 3, 13))


def test_wrong_settings() -> None:
    check(some(bad_settings.cases(), 5, 17))


def test_wrong_calls() -> None:
    cheap = ("Linear", "LSTM:", "Embedding", "nested")
    check(some((case for case in bad_calls.cases() if any(name in case.name for name in cheap)), 1, 4))


def test_nested_structures() -> None:
    check(structures.cases(6), at_least=6)


@pytest.mark.slow
def test_all_wrong_arguments() -> None:
    check(bad_arguments.cases())


@pytest.mark.slow
def test_all_wrong_settings() -> None:
    check(bad_settings.cases())


@pytest.mark.slow
def test_all_wrong_calls() -> None:
    check(bad_calls.cases())


@pytest.mark.slow
def test_a_thousand_nested_structures() -> None:
    check(structures.cases(1000, seed=1000))
