"""``torchq_compat.compare``: its numbers are those of the oracle, and it says why FX and we differ."""

from __future__ import annotations

import inspect
import json
import math
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.ao.quantization.fx.lstm_utils as fx_lstm_utils
from torch import Tensor, nn
from torch.ao.quantization import (
    MinMaxObserver,
    QConfig,
    QConfigMapping,
    default_dynamic_qconfig,
    default_weight_observer,
    get_default_qat_qconfig_mapping,
    get_default_qconfig_mapping,
)
from torch.ao.quantization.fx.custom_config import ConvertCustomConfig, PrepareCustomConfig

import torchq_compat as tc
from tests.helpers.once import made_once
from tests.helpers.oracle import MAP_LSTM, by_fx, by_us, fx_activation_qparams, leaves, sqnr
from torchq_compat import lstm_utils
from torchq_compat.comparison import causes
from torchq_compat.comparison.page import Comparison
from torchq_compat.comparison.results import FxOutcome, Kind, Point, Status
from torchq_compat.errors import QuantizationWarning, ScriptError
from torchq_compat.nn import quantizable
from torchq_compat.port.running.redirections import fx_is_called
from torchq_compat.support.quantized_tensors import sums_saturate

INPUTS, HIDDEN = 8, 16
#: Exact minima and maxima: errors come from the graph, not from a histogram's clipping.
EXACT = QConfigMapping().set_global(QConfig(MinMaxObserver, default_weight_observer))
GUIDE = "migration/guide/differences.md#"


def build(cls: type[nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
    torch.manual_seed(0)
    return cls(*args, **kwargs).eval()


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(INPUTS, 12), nn.ReLU())
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.head(self.body(x)) + 1.0)


class Tagger(nn.Module):
    """Two directions of very different size: the backward one has values up to ten times as large."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(INPUTS, HIDDEN, bidirectional=True)
        with torch.no_grad():
            for name, parameter in self.lstm.named_parameters():
                parameter.mul_(4.0 if name.endswith("_reverse") else 0.3)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        output, (h, c) = self.lstm(x, (h, c))
        return output, h


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(INPUTS, HIDDEN)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Tensor:
        output, state = self.lstm(x, (h, c))
        again, _ = self.lstm(0.5 * x, state)
        return output + again


class WithGRU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(INPUTS, HIDDEN), nn.Linear(HIDDEN, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x)[0])


def plain_batches(count: int = 3) -> list[tuple[Tensor, ...]]:
    return [(torch.randn(16, INPUTS),) for _ in range(count)]


def recurrent_batches(rows: int) -> list[tuple[Tensor, ...]]:
    state = torch.zeros(rows, 4, HIDDEN)
    return [(torch.randn(12, 4, INPUTS), state, state.clone()) for _ in range(3)]


def point(comparison: Comparison, name: str) -> Point:
    (found,) = [p for p in (*comparison.capture.outputs, *comparison.capture.points) if p.name == name]
    return found


def same_qparams(place: Point) -> bool:
    ours, fx = place.ours.qparams, place.fx.qparams if place.fx else None
    return ours is not None and fx is not None and ours.same_qparams(fx)


@made_once
def plain() -> tuple[nn.Module, list[tuple[Tensor, ...]], Comparison]:
    model, batches = build(Plain), plain_batches()
    return model, batches, tc.compare(model, EXACT, batches[0], batches)


@pytest.fixture(scope="module")
def uneven() -> tuple[nn.Module, list[tuple[Tensor, ...]], Comparison]:
    model = build(Tagger)
    batches = recurrent_batches(2)
    return model, batches, tc.compare(model, EXACT, batches[0], batches, prepare_custom_config=MAP_LSTM)


def test_numbers_agree_with_the_oracle() -> None:
    model, batches, comparison = plain()
    _, ours = by_us(model, EXACT, batches)
    _, theirs = by_fx(model, EXACT, batches)
    exact = torch.cat([model(*batch) for batch in batches])
    output = point(comparison, "output 0")
    assert output.ours.sqnr == pytest.approx(sqnr(exact, torch.cat([ours(*b) for b in batches])), abs=1e-6)
    assert output.fx is not None
    assert output.fx.sqnr == pytest.approx(sqnr(exact, torch.cat([theirs(*b) for b in batches])), abs=1e-6)
    assert 25 < output.ours.sqnr < 60
    found = {
        (round(p.fx.qparams.scales[0], 9), p.fx.qparams.zero_points[0])
        for p in comparison.capture.points
        if p.fx is not None and p.fx.qparams is not None
    }
    x_scale = {q for q in fx_activation_qparams(theirs) if q not in found}
    assert len(x_scale) == 1  # the input's own qparams, which belong to no place of the model
    assert found | x_scale == fx_activation_qparams(theirs)
    assert [p.name for p in comparison.capture.points] == ["body.0", "head", "add", "sigmoid"]
    assert [p.name for p in comparison.capture.points if not same_qparams(p)] == ["sigmoid"]
    sigmoid = point(comparison, "sigmoid")
    assert sigmoid.fx is not None
    assert (sigmoid.ours.qparams, sigmoid.fx.qparams) == (None, None)  # sigmoid requires fixed ones
    assert comparison.verdict.status is Status.SAME


def test_values_inside_are_those_of_the_float_model() -> None:
    model, batches = build(Plain), plain_batches(1)
    comparison = tc.compare(model, EXACT, batches[0], batches)
    exact = model.body(*batches[0])
    scale = float(exact.max()) / 255
    quantized = (exact / scale).round().clamp(0, 255) * scale
    body = point(comparison, "body.0")
    assert body.ours.qparams is not None
    assert body.ours.qparams.scales[0] == pytest.approx(scale, rel=1e-5)
    # x and the weights are quantized too, so the SQNR at the place is a little below that of its own qparams.
    assert sqnr(exact, quantized) - 12 < body.ours.sqnr < sqnr(exact, quantized)
    assert body.histogram is not None
    assert sum(body.histogram.counts) == exact.numel()
    assert (body.histogram.low, body.histogram.high) == (float(exact.min()), float(exact.max()))


def test_a_backward_direction_that_saturates_in_fx(
    uneven: tuple[nn.Module, list[tuple[Tensor, ...]], Comparison],
) -> None:
    model, batches, comparison = uneven
    _, theirs = by_fx(model, EXACT, batches, MAP_LSTM)
    exact = [leaves(model(*batch)) for batch in batches]
    of_fx = [leaves(theirs(*batch)) for batch in batches]
    for index in range(2):
        output = point(comparison, f"output {index}")
        assert output.fx is not None
        together = [torch.cat([result[index].flatten() for result in each]) for each in (exact, of_fx)]
        assert output.fx.sqnr == pytest.approx(sqnr(*together), abs=0.05 if sums_saturate() else 1e-6)
        assert output.fx.sqnr < 10 < 23 < output.ours.sqnr < 60
        assert output.fx.saturated is not None
        assert output.fx.saturated > 0.05
        assert output.ours.saturated == 0.0
    assert comparison.verdict.status is Status.BETTER
    findings = {finding.where: finding for finding in comparison.verdict.findings}
    assert set(findings) == {"lstm[0]", "lstm[1]"}
    for finding in findings.values():
        assert "FX quantizes all of it with the qparams of lstm.layers.0.layer_fw" in finding.what
        assert "here 2 sets of qparams, 0.0% saturated" in finding.what
        assert "saturates" in finding.why
        assert finding.link == f"{GUIDE}same-qparams-for-all-directions"
        assert finding.code == "TQ520"


def test_both_cells_part_by_part(uneven: tuple[nn.Module, list[tuple[Tensor, ...]], Comparison]) -> None:
    model, batches, comparison = uneven
    _, ours = by_us(model, EXACT, batches, MAP_LSTM)
    parts = {decision.path: decision for decision in tc.explain(ours) if ".cell." in decision.path}
    found = {p.name: p for p in comparison.capture.points if p.kind is Kind.PART}
    assert found.keys() == parts.keys()
    for name, part in found.items():
        qparams = part.ours.qparams
        assert qparams is not None
        assert qparams.scales == (parts[name].details["scale"],)
        assert 15 < part.ours.sqnr < 60
        # The cells are bit-equal: only the concatenation of their outputs differs. Where x86's kernels
        # saturate, FX's side has qnnpack's, which round the bias.
        assert part.fx is not None
        assert part.fx.qparams is not None
        assert part.fx.qparams.same_qparams(qparams)
        assert part.steps is not None
        apart = 0.02 if sums_saturate() else 0.0
        assert part.steps.share + part.steps.by_two + part.steps.by_more <= apart, part.steps
    assert [cell.path for cell in comparison.capture.cells] == [
        f"lstm.layers.0.layer_{direction}.cell" for direction in ("fw", "bw")
    ]
    reads = {node.name: node.inputs for node in comparison.capture.cells[0].nodes}
    assert reads["fgate_cx_igate_cgate"] == ("fgate_cx", "igate_cgate")
    assert reads["ogate_cy"] == ("output_gate", "tanh_cy")
    assert reads["igates"] == ("x",)


def test_individually_observed_parts_in_both_engines() -> None:
    """FX's cell is then a traced graph, whose functions have no names; one is tanh of the cell state."""

    class Observed(torch.ao.nn.quantizable.LSTM):
        @classmethod
        def from_float(cls, other: nn.LSTM) -> Any:
            examples = torch.rand(4, INPUTS), (torch.rand(4, HIDDEN), torch.rand(4, HIDDEN))
            return utils()._get_lstm_with_individually_observed_parts(other, example_inputs=examples)

    class Quantized(torch.ao.nn.quantized.LSTM):
        @classmethod
        def from_observed(cls, other: torch.ao.nn.quantizable.LSTM) -> Any:
            return utils()._get_reference_quantized_lstm_module(other)

    def utils() -> ModuleType:
        """Return the helpers; a script imports only one of these modules, and ``compare`` redirects it."""
        return fx_lstm_utils if fx_is_called() else lstm_utils

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(INPUTS, HIDDEN)

        def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Tensor:
            return self.lstm(x, (h, c))[0]

    batches = recurrent_batches(1)
    comparison = tc.compare(
        build(Model),
        get_default_qconfig_mapping("qnnpack"),
        batches[0],
        batches,
        prepare_custom_config=PrepareCustomConfig().set_float_to_observed_mapping(nn.LSTM, Observed),
        convert_custom_config=ConvertCustomConfig().set_observed_to_quantized_mapping(
            torch.ao.nn.quantizable.LSTM, Quantized
        ),
        fx=True,
    )
    parts = [p for p in comparison.capture.points if p.kind is Kind.PART]
    assert len(parts) == 12
    assert all(part.fx is not None and part.fx.qparams is not None for part in parts)
    (finding,) = [f for f in comparison.verdict.findings if f.where.endswith("tanh_cy")]
    assert finding.link == f"{GUIDE}tanh-of-the-cell-state"
    tanh = point(comparison, "lstm.layers.0.layer_fw.cell.tanh_cy")
    assert tanh.ours.qparams is not None
    assert (tanh.ours.qparams.scales, tanh.ours.qparams.zero_points) == ((2 / 256,), (128,))
    same = {p.name.rpartition(".")[2] for p in parts if same_qparams(p)}
    assert {"igates", "hgates", "gates", "fgate_cx"} <= same


@pytest.mark.parametrize("kind", ["called twice", "GRU"])
def test_a_model_fx_cannot_run(kind: str) -> None:
    if kind == "GRU":
        model, config = build(WithGRU), PrepareCustomConfig()
        config.set_float_to_observed_mapping(nn.GRU, quantizable.GRU)
        batches = [batch[:1] for batch in recurrent_batches(1)]
    else:
        model, config, batches = build(CalledTwice), MAP_LSTM, recurrent_batches(1)
    comparison = tc.compare(model, EXACT, batches[0], batches, prepare_custom_config=config)
    fx = comparison.capture.fx
    assert fx.outcome is FxOutcome.RAISED
    assert fx.error == "AttributeError: 'tuple' object has no attribute 'numel'"
    assert comparison.verdict.status is Status.WITHOUT_FX
    assert not comparison.verdict.needs_attention
    assert comparison.verdict.headline.startswith(
        "FX cannot run this model. Against the float model: output 0 "
    )
    assert comparison.verdict.findings[0].what == f"raised {fx.error}"
    assert all(p.fx is None and p.steps is None for p in comparison.capture.points)
    assert 25 < point(comparison, "output 0").ours.sqnr < 60
    assert comparison.capture.costs.fx_bytes is None
    if kind == "called twice":
        with pytest.raises(ScriptError, match="FX cannot run this model: AttributeError"):
            tc.compare(model, EXACT, batches[0], batches, prepare_custom_config=config, fx=True)


def test_without_fx_when_not_asked() -> None:
    batches = plain_batches()
    comparison = tc.compare(build(Plain), EXACT, batches[0], batches, fx=False)
    assert comparison.capture.fx.outcome is FxOutcome.NOT_ASKED
    assert "FX was not run" in comparison.verdict.headline


def test_the_model_is_not_touched() -> None:
    before = build(Plain).state_dict()
    model, _, _ = plain()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(hasattr(module, "qconfig") for module in model.modules())


def test_evaluation_data_are_what_is_measured() -> None:
    model, batches = build(Plain), plain_batches()
    other = [(torch.randn(64, INPUTS),)]
    comparison = tc.compare(model, EXACT, batches[0], batches, evaluation_data=other)
    _, ours = by_us(model, EXACT, batches)
    assert point(comparison, "output 0").ours.sqnr == pytest.approx(
        sqnr(model(*other[0]), ours(*other[0])), abs=1e-6
    )


def test_sizes_and_latency() -> None:
    model, _, comparison = plain()
    costs = comparison.capture.costs
    assert costs.float_bytes == 4 * sum(parameter.numel() for parameter in model.parameters())
    assert costs.fx_bytes is not None
    weights = sum(p.numel() for name, p in model.named_parameters() if name.endswith("weight"))
    biases = 4 * sum(p.numel() for name, p in model.named_parameters() if name.endswith("bias"))
    assert weights + biases < costs.fx_bytes < costs.float_bytes
    assert weights + biases < costs.our_bytes < costs.float_bytes
    assert min(costs.float_ms, costs.our_ms, costs.fx_ms or 0.0) > 0


def test_dynamic_quantization_needs_no_calibration() -> None:
    model = build(Plain)
    mapping = QConfigMapping().set_global(default_dynamic_qconfig)
    comparison = tc.compare(model, mapping, (torch.randn(16, INPUTS),), [])
    assert comparison.verdict.status in (Status.SAME, Status.SIMILAR)
    assert not comparison.verdict.nothing_quantized
    assert 25 < point(comparison, "output 0").ours.sqnr < 70


class Mixed(nn.Module):
    """Fused chains, an op with two outputs, a result that is a dict with an integer in it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.again, self.head = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        x = torch.relu(self.norm(self.conv(x)))
        x = torch.relu(x + self.again(x))
        first, second = x.chunk(2, 1)
        return {"count": x.shape[0], "logits": self.head(torch.cat([second, first], 1).mean((2, 3)))}


def test_fused_chains_and_nested_results() -> None:
    batches = [(torch.randn(2, 3, 8, 8),) for _ in range(2)]
    comparison = tc.compare(build(Mixed), get_default_qconfig_mapping("x86"), batches[0], batches)
    assert comparison.verdict.status is Status.SAME
    (output,) = comparison.capture.outputs
    assert same_qparams(output)
    for name in ("conv", "again", "add", "cat", "mean", "head"):
        assert same_qparams(point(comparison, name)), name


def test_a_fake_quantize_of_a_reduced_range() -> None:
    """If calibrated and not trained, both have the range of the dtype. The scales differ a little: FX
    calibrates with float weights, regardless of the qconfig."""
    batches = plain_batches()
    mapping = get_default_qat_qconfig_mapping("fbgemm")
    with pytest.warns(QuantizationWarning, match="has fake-quantizes, which are for training"):
        comparison = tc.compare(build(Plain), mapping, batches[0], batches)
    head = point(comparison, "head")
    assert head.fx is not None
    assert head.ours.qparams is not None
    assert head.fx.qparams is not None
    assert head.ours.qparams.is_full_range
    assert head.fx.qparams.is_full_range
    assert head.ours.sqnr == pytest.approx(head.fx.sqnr, abs=1.0)


def test_nothing_quantized_is_said() -> None:
    batches = plain_batches()
    comparison = tc.compare(build(Plain), QConfigMapping(), batches[0], batches)
    assert comparison.verdict.headline == "Nothing in Plain is quantized here."
    assert comparison.verdict.needs_attention
    assert math.isinf(point(comparison, "output 0").ours.sqnr)


def test_a_module_left_float_is_a_finding() -> None:
    batches = [batch[:1] for batch in recurrent_batches(1)]
    with pytest.warns(match="gru"):
        comparison = tc.compare(build(WithGRU), EXACT, batches[0], batches)
    (finding,) = [f for f in comparison.verdict.findings if f.where == "gru"]
    assert finding.what == "GRU stays float here"
    assert "map it" in finding.why


def test_bad_data() -> None:
    model, batches = build(Plain), plain_batches()
    with pytest.raises(ScriptError, match=r"calibration_data is a Tensor and no list of batches"):
        tc.compare(model, EXACT, batches[0], batches[0][0])
    with pytest.raises(ScriptError, match="the model is a str"):
        tc.compare("model", EXACT, batches[0], batches)  # type: ignore[arg-type]
    # A DataLoader yields lists or single tensors.
    assert tc.compare(model, EXACT, batches[0], [list(batches[0]), batches[1][0]], fx=False)


KEYS = {"model", "verdict", "headline", "needs_attention", "findings", "outputs", "points", "costs", "fx"}
POINT_KEYS = {"name", "kind", "operation", "reason", "ours", "fx", "steps"}
STEP_KEYS = {"size", "share", "by_one", "by_two", "by_more", "largest", "from_range"}


def test_json_has_a_stable_form(uneven: tuple[nn.Module, list[tuple[Tensor, ...]], Comparison]) -> None:
    comparison = uneven[2]
    data = json.loads(comparison.to_json())
    assert data == comparison.as_dict()
    assert data.keys() == {*KEYS, "left_float", "unlike_fx"}
    assert data["verdict"] == "better"
    for entry in (*data["outputs"], *data["points"]):
        assert entry.keys() == POINT_KEYS
        for side in filter(None, (entry["ours"], entry["fx"])):
            assert side.keys() == {"qparams", "sqnr", "saturated"}
            qparams_keys = {"dtype", "scales", "zero_points", "quant_min", "quant_max"}
            assert side["qparams"] is None or side["qparams"].keys() == qparams_keys
        assert entry["steps"] is None or entry["steps"].keys() == STEP_KEYS
    assert data["findings"][0].keys() == {"where", "what", "why", "link", "code"}
    assert data["costs"].keys() == {"float_bytes", "our_bytes", "fx_bytes", "float_ms", "our_ms", "fx_ms"}
    assert data["fx"] == {"outcome": "ran", "error": "", "lowering_error": ""}


def test_json_says_bit_equal_in_a_word() -> None:
    batches = plain_batches()
    text = tc.compare(build(Plain), QConfigMapping(), batches[0], batches).to_json()
    assert json.loads(text)["outputs"][0]["ours"]["sqnr"] == "inf"
    assert "Infinity" not in text


def test_the_printed_tables(uneven: tuple[nn.Module, list[tuple[Tensor, ...]], Comparison]) -> None:
    lines = str(uneven[2]).splitlines()
    assert lines[0] == "Tagger: better"
    assert lines[1] == uneven[2].verdict.headline
    (row,) = [line for line in lines if line.startswith("lstm[0] ")]
    output = point(uneven[2], "lstm[0]")
    assert output.fx is not None
    assert f"{output.ours.sqnr:.1f}" in row.split()
    assert f"{output.fx.saturated:.2%}" in row.split()


def test_every_link_leads_into_the_guide() -> None:
    guide = (Path(tc.__file__).parents[1] / "migration" / "guide" / "differences.md").read_text()
    headings = [line.lstrip("# ").lower().replace(" ", "-") for line in guide.splitlines() if line[:1] == "#"]
    anchors = {*re.findall(r'<a id="([\w-]+)"></a>', guide), *headings}
    named = {*re.findall(r'"([a-z]+(?:-[a-z]+)*)"', inspect.getsource(causes))} & {*causes.WHY}
    assert len(named) > 8
    assert named <= anchors
