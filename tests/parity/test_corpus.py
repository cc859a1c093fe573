"""Every case of the corpus as FX has it, but for the differences that are listed with their reason."""

from __future__ import annotations

from typing import Any

import pytest

import torchq_compat as tc
from tests.parity import comparison
from tests.parity.cases import CASES, Case
from tests.parity.comparison import differences
from tests.parity.configs import MAPPINGS
from tests.parity.known_differences import KNOWN_DIFFERENCES


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_as_fx_has_it(case: Case) -> None:
    """The same ops quantized, as ``explain`` tells it; equal activation qparams; outputs within one step in
    99.9% of the elements; refused where FX refuses. A listed case differs exactly as the list says."""
    assert differences(case) == KNOWN_DIFFERENCES.get(case.id, set())


def test_listed_differences_are_about_cases_of_the_corpus() -> None:
    assert KNOWN_DIFFERENCES.keys() <= {case.id for case in CASES}
    assert len(CASES) >= 80


@pytest.mark.parametrize(
    ("mapping", "seen"), [("fc_off", {"ops", "qparams"}), ("fixed", {"qparams", "outputs"})]
)
def test_comparison_sees_a_difference(mapping: str, seen: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison is not vacuous: with another mapping on our side it fails."""
    run = comparison._run

    def with_other_mapping(engine: Any, model: Any, batches: Any, given: Any, *rest: Any) -> Any:
        return run(engine, model, batches, MAPPINGS[mapping]() if engine is tc else given, *rest)

    monkeypatch.setattr(comparison, "_run", with_other_mapping)
    assert comparison.differences(Case("embedding", "x86", "default")) >= seen
