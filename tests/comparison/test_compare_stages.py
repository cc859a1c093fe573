"""The stages of compare, each by itself: what is measured, how it is judged, what a rule says."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import QConfigMapping

from torchq_compat.comparison.cases import Case, read_case
from torchq_compat.comparison.causes import judge
from torchq_compat.comparison.collect import output_series
from torchq_compat.comparison.compare_command import _warnings_without_lines
from torchq_compat.comparison.results import (
    Capture,
    Costs,
    Explained,
    FxOutcome,
    FxRun,
    Kind,
    Point,
    QParamsView,
    Side,
    Status,
    Steps,
)
from torchq_compat.comparison.sides import PlaceMeasures, Reading, state_bytes, tap_nodes
from torchq_compat.errors import QuantizationWarning, ScriptError
from torchq_compat.read.qparams import PerChannelQParams, PerTensorQParams

QPARAMS = PerTensorQParams(0.5, 0, -4, 3, torch.int8)
VIEW = QParamsView("int8", (0.5,), (0,), -4, 3)


def measured(exact: Tensor, ours: Tensor, fx: Tensor | None, qparams: Any = QPARAMS) -> PlaceMeasures:
    measures = PlaceMeasures()
    measures.add(exact, Reading(ours, qparams), None if fx is None else Reading(fx, qparams))
    return measures


def test_sqnr_steps_and_saturation_by_hand() -> None:
    exact = torch.tensor([0.0, 1.0, 1.74, 1.76, -2.26, -2.24])
    ours = torch.tensor([0.0, 1.0, 1.5, 1.5, -2.0, -2.0])
    fx = torch.tensor([0.5, 1.0, 1.5, 0.5, -0.5, -2.0])
    here, there, steps, histogram = measured(exact, ours, fx).sides()
    signal, noise = float((exact**2).sum()), float(((exact - ours) ** 2).sum())
    assert here.sqnr == pytest.approx(10 * math.log10(signal / noise), abs=1e-5)
    # Values beyond 1.5 + 0.25 and -2.0 - 0.25.
    assert here.saturated == pytest.approx(2 / 6)
    assert here.qparams == VIEW
    assert there is not None
    assert there.sqnr < here.sqnr
    assert steps == Steps(0.5, 3 / 6, 1 / 6, 1 / 6, 1 / 6, 3.0, from_range=False)
    assert histogram is not None
    assert sum(histogram.counts) == 6


def test_batches_add_up() -> None:
    exact, ours = torch.randn(8, 3), torch.randn(8, 3)
    apart = PlaceMeasures()
    for half in (slice(0, 4), slice(4, 8)):
        apart.add(exact[half], Reading(ours[half], QPARAMS), None)
    together = measured(exact, ours, None)
    assert apart.sides()[0].sqnr == pytest.approx(together.sides()[0].sqnr)
    assert apart.sides()[0].saturated == pytest.approx(together.sides()[0].saturated)


def test_qparams_for_each_channel() -> None:
    qparams = PerChannelQParams(
        (
            (2, PerTensorQParams(0.5, 0, -4, 3, torch.int8)),
            (1, PerTensorQParams(2.0, 1, -4, 3, torch.int8)),
        ),
        1,
    )
    exact = torch.tensor([[2.0, 0.0, 2.0], [0.0, 0.0, -2.0]])
    here, *_ = measured(exact, exact.clone(), None, qparams).sides()
    assert here.saturated == pytest.approx(1 / 6)  # 2.0 with the first qparams, whose range ends at 1.5
    assert here.qparams == QParamsView("int8", (0.5, 2.0), (0, 1), -4, 3)
    assert here.sqnr == math.inf


def test_a_float_place_counts_in_shares_of_its_range() -> None:
    exact = torch.tensor([0.0, 255.0])
    *_, steps, _ = measured(exact, exact, exact + torch.tensor([0.0, 2.0]), None).sides()
    assert steps == Steps(1.0, 0.5, 0.0, 0.5, 0.0, 2.0, from_range=True)


def test_a_side_of_another_shape_is_left_out() -> None:
    measures = PlaceMeasures()
    measures.add(torch.zeros(2), Reading(torch.zeros(2), None), Reading(torch.zeros(3), None))
    assert measures.sides()[1] is None
    measures = PlaceMeasures()
    measures.add(torch.zeros(2), Reading(torch.zeros(3), None), None)
    assert not measures.seen


def test_bytes_of_packed_and_shared_weights() -> None:
    linear = nn.Linear(16, 4)
    quantized = torch.ao.nn.quantized.dynamic.Linear(16, 4)
    assert state_bytes(linear) == 4 * (16 * 4 + 4)
    assert 16 * 4 + 4 * 4 <= state_bytes(quantized) < 4 * (16 * 4 + 4)
    shared = nn.Sequential(linear, linear)
    assert state_bytes(shared) == state_bytes(linear)
    lstm = torch.ao.nn.quantized.dynamic.LSTM(16, 16)
    assert state_bytes(lstm) >= 2 * 16 * 64


def test_taps_keep_what_later_ops_overwrite() -> None:
    class InPlace(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x + 1).mul_(3)

    graph_module = torch.fx.symbolic_trace(InPlace())
    add = next(node for node in graph_module.graph.nodes if node.op == "call_function")
    taps = tap_nodes({add: (graph_module, add)})
    assert torch.equal(graph_module(torch.ones(2)), torch.full((2,), 6.0))
    (kept,) = taps[add].take()
    assert torch.equal(kept, torch.full((2,), 2.0))
    assert taps[add].take() == []


def test_the_series_is_where_the_error_is_largest() -> None:
    exact = torch.zeros(6, 2, 3)
    ours, fx = exact.clone(), exact.clone()
    fx[4, 1, 2] = 1.0
    series = output_series("output 0", 0, exact, ours, fx)
    assert series is not None
    assert (series.axis, series.where) == ("time", "At [1, 2] of the other dimensions")
    assert series.fx == (0.0, 0.0, 0.0, 0.0, 1.0, 0.0)
    assert output_series("output 0", 0, torch.zeros(()), torch.zeros(()), None) is None


# The verdict, on made-up values.


def place(name: str, here: float, there: float | None, **kwargs: Any) -> Point:
    steps = None if there is None else Steps(0.5, 0.1, 0.05, 0.05, 0.0, 2.0, from_range=False)
    values = {
        "kind": Kind.OUTPUT,
        "operation": "Linear",
        "reason": "qconfig from global",
        "ours": Side(VIEW, here, 0.0),
        "fx": None if there is None else Side(VIEW, there, 0.0),
        "steps": steps,
        "histogram": None,
    }
    return Point(name, **{**values, **kwargs})


def captured(outputs: tuple[Point, ...], points: tuple[Point, ...] = (), **kwargs: Any) -> Capture:
    outcome = FxOutcome.RAN if outputs[0].fx else FxOutcome.NOT_ASKED
    base = Capture("M", outputs, points, (), (), (), 1, (), Costs(8, 4, 4, 1.0, 1.0, 1.0), FxRun(outcome))
    return replace(base, **kwargs)


@pytest.mark.parametrize(
    ("pairs", "status"),
    [
        ([(30.0, 30.0)], Status.SIMILAR),
        ([(30.0, 30.4)], Status.SIMILAR),
        ([(30.0, 30.6)], Status.WORSE),
        ([(31.0, 30.0)], Status.BETTER),
        ([(40.0, 30.0), (29.0, 30.0)], Status.WORSE),
        ([(math.inf, math.inf)], Status.SIMILAR),
        ([(math.inf, 30.0)], Status.BETTER),
        ([(30.0, math.inf)], Status.WORSE),
        ([(30.0, None)], Status.WITHOUT_FX),
    ],
)
def test_verdicts(pairs: list[tuple[float, float | None]], status: Status) -> None:
    verdict = judge(captured(tuple(place(f"output {i}", *pair) for i, pair in enumerate(pairs))))
    assert verdict.status is status
    assert verdict.needs_attention is (status is Status.WORSE)


def test_one_step_apart_is_the_same() -> None:
    near = Steps(0.5, 0.3, 0.3, 0.0005, 0.0005, 3.0, from_range=False)
    assert judge(captured((place("output 0", 29.0, 30.0, steps=near),))).status is Status.SAME
    far = replace(near, by_more=0.0006)
    assert judge(captured((place("output 0", 29.0, 30.0, steps=far),))).status is Status.WORSE


def links(*points: Point, **kwargs: Any) -> dict[str, str]:
    verdict = judge(captured((place("output 0", 30.0, 30.0, steps=None),), points, **kwargs))
    return {finding.where: finding.link.partition("#")[2] for finding in verdict.findings}


OTHER = QParamsView("int8", (0.25,), (0,), -4, 3)


def test_each_rule_names_its_known_difference() -> None:
    of_other = Side(OTHER, 20.0, 0.0)
    two = QParamsView("int8", (0.25, 0.5), (0, 0), -4, 3)
    assert links(
        place("lstm[0]", 30, 5, kind=Kind.RESULT, ours=Side(two, 30.0, 0.0)),
        place("mean", 30, 20, kind=Kind.OP, operation="mean.dim", fx=of_other),
        place("act", 30, 5, kind=Kind.OP, operation="sigmoid.default"),
        place("lstm.cell.input_gate", 30, 5, kind=Kind.PART, operation="i = sigmoid(gates[0])"),
        place("lstm.cell.tanh_cy", 30, 30, kind=Kind.PART, operation="tanh(c')", fx=of_other),
        place("narrow", 30, 30, kind=Kind.MODULE, ours=Side(VIEW, 30.0, 0.02)),
        place("one", 30, 30, kind=Kind.MODULE, fx=Side(None, 30.0, None)),
        place("odd", 30, 20, kind=Kind.MODULE, fx=of_other),
        place("fine", 30, 30, kind=Kind.MODULE),
    ) == {
        "lstm[0]": "same-qparams-for-all-directions",
        "mean": "observer-behind-a-custom-module",
        "act": "input-of-fixed-qparams-ops",
        "lstm.cell.input_gate": "input-of-gates",
        "lstm.cell.tanh_cy": "tanh-of-the-cell-state",
        "narrow": "moving-averages",
        "one": "known-differences-from-fx",
        "odd": "",
    }


def test_a_mean_without_a_custom_module_before_it_is_not_explained_by_one() -> None:
    assert links(place("mean", 30, 20, kind=Kind.OP, operation="mean.dim", fx=Side(OTHER, 20.0, 0.0))) == {
        "mean": ""
    }


def test_what_is_left_at_the_outputs_is_rounding_or_not_explained() -> None:
    def link(ours: float) -> str:
        (finding,) = judge(captured((place("output 0", ours, 30.0),))).findings
        return finding.link.partition("#")[2]

    assert link(29.8) == "rounding"
    assert link(29.0) == ""


def test_modules_left_float_and_a_failed_lowering_are_findings() -> None:
    left = (Explained("gru", "GRU", "not mapped"),)
    found = links(left_float=left, fx=FxRun(FxOutcome.RAN, lowering_error="KeyError: 1"))
    assert found == {"gru": "known-differences-from-fx", "FX": ""}


def test_what_explain_says_of_fx_is_a_finding_where_fx_ran() -> None:
    told = (Explained("sigmoid", "sigmoid.default", "FX cuts its input", "TQ504"),)
    assert links(unlike_fx=told, fx=FxRun(FxOutcome.RAN)) == {"sigmoid": "tq504"}
    assert links(unlike_fx=told, fx=FxRun(FxOutcome.NOT_ASKED)) == {}


# Cases.


@pytest.mark.parametrize(
    "given", [torch.ones(2, 4), [torch.ones(2, 4)], {"input": torch.ones(2, 4)}, (torch.ones(2, 4),)]
)
def test_example_inputs_of_a_case_are_read_as_prepare_fx_reads_them(given: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", QuantizationWarning)
        case = Case(nn.Linear(4, 2), QConfigMapping(), given, []).checked()
    assert isinstance(case.example_inputs, tuple)
    assert [tuple(each.shape) for each in case.example_inputs] == [(2, 4)]
    assert case.model(*case.example_inputs).shape == (2, 2)
    assert [batch[0].shape for batch in case.evaluation_data] == [(2, 4)]


@pytest.mark.parametrize("is_known", [False, True])
def test_warnings_while_comparing_name_no_line_of_the_tool(
    is_known: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with warnings.catch_warnings(record=True) as others:
        warnings.simplefilter("always")
        with _warnings_without_lines(is_known=is_known):
            for _ in range(2):
                warnings.warn("of ours", QuantizationWarning, stacklevel=1)
            warnings.warn("of others", stacklevel=1)
    told = capsys.readouterr().err
    assert told.count("torchq-compat: warning: of ours\n") == (not is_known)
    assert told.count("of ours") == (not is_known)
    assert [str(each.message) for each in others] == ["of others"]


def test_a_case_is_a_dict_or_any_object() -> None:
    class Mine:
        model = nn.Linear(2, 2)
        qconfig_mapping = None
        example_inputs = (torch.zeros(1, 2),)
        calibration_data = (torch.zeros(1, 2),)

    for value in (Mine, {name: getattr(Mine, name) for name in vars(Mine) if name[0] != "_"}):
        case = read_case("it", value)
        assert case.model is Mine.model
        assert [len(batch) for batch in case.calibration_data] == [1]
        assert case.evaluation_data is case.calibration_data


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({}, "it has no 'model'"),
        (3, "it has no 'model'"),
        ({"model": nn.Linear(1, 1), "mapping": 1}, "it has an unknown 'mapping'"),
    ],
)
def test_what_is_no_case(value: Any, problem: str) -> None:
    with pytest.raises(ScriptError, match=f"it is no case: {problem}"):
        read_case("it", value)
