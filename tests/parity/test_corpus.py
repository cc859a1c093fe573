"""Every case of the corpus gives FX's result, except for the differences that are listed with their reason.

FX's results are stored (``fx_results``); a few are compared with a live run each time, all in the slow run.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

import torchq_compat as tc
from tests.parity import comparison
from tests.parity.cases import CASES, Case
from tests.parity.comparison import differences, differences_of_fx, fx_result
from tests.parity.configs import MAPPINGS
from tests.parity.fx_results import CORPUS, as_data, from_data, stored
from tests.parity.known_differences import KNOWN_DIFFERENCES

STORED = {case: from_data(data) for case, data in stored(CORPUS).items()}
#: Static, dynamic, weight-only and training.
LIVE = (
    Case("conv_front", "x86", "default"),
    Case("linear_relu", "dynamic", "default"),
    Case("embedding", "weight_only_embeddings", "default"),
    Case("linear_relu", "qat_fbgemm", "default"),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_as_fx_has_it(case: Case) -> None:
    """The same ops are quantized, according to ``explain``; activation qparams are equal; outputs are within
    one step in 99.9% of the elements; a case that FX refuses is refused. A listed case differs exactly as the
    list says."""
    assert differences(case, STORED[case.id]) == KNOWN_DIFFERENCES.get(case.id, set())


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case in LIVE else [pytest.mark.slow]) for case in CASES],
    ids=lambda case: case.id,
)
def test_as_live_fx_has_it(case: Case) -> None:
    """The stored result is that of a live run; every element of the outputs is compared."""
    live = fx_result(case)
    assert differences_of_fx(case, live, STORED[case.id]) == set()
    assert differences(case, live) == KNOWN_DIFFERENCES.get(case.id, set())


def test_a_result_is_stored_for_every_case() -> None:
    assert list(STORED) == [case.id for case in CASES]
    ran = [result for result in STORED.values() if result is not None]
    assert len(ran) > 0.9 * len(CASES)
    assert all(result.outputs for result in ran)
    assert CORPUS.stat().st_size < 300_000


def test_what_is_stored_is_read_again() -> None:
    result = fx_result(LIVE[0])
    again = from_data(json.loads(json.dumps(as_data(result))))
    assert result is not None
    assert again is not None
    assert again.ops == result.ops
    assert again.outputs[0].shape == result.outputs[0].shape
    assert [qparams[1] for qparams in again.qparams] == [qparams[1] for qparams in result.qparams]
    scales = [scale for scale, _ in result.qparams]
    assert [scale for scale, _ in again.qparams] == pytest.approx(scales, rel=1e-6)
    assert differences_of_fx(LIVE[0], result, again) == set()
    (output,) = result.outputs
    for steps, seen in ((0.4, set()), (2.0, {"outputs"})):
        moved = replace(output, values=tuple(value + steps * output.step for value in output.values))
        assert differences_of_fx(LIVE[0], replace(result, outputs=(moved,)), again) == seen


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
    case = Case("embedding", "x86", "default")
    assert comparison.differences(case, STORED[case.id]) >= seen
