"""Custom modules in quantize_eager: LSTM, MultiheadAttention and users' own, and the states of them all."""

from __future__ import annotations

import copy
import functools
import re
import warnings
from typing import Any

import pytest
import torch
import torch.ao.quantization as legacy
from torch import Tensor, nn
from torch.ao.quantization import DeQuantStub, QuantStub

import torchq_compat as tc
from tests.eager.eager_models import ConvBNReLU, both, calibrated, sane
from tests.helpers.oracle import sqnr
from torchq_compat import quantize_eager
from torchq_compat.checkpoints import load_fx_state
from torchq_compat.errors import CheckpointError, ConvertError

FBGEMM = legacy.get_default_qconfig("fbgemm")


@pytest.fixture(autouse=True)
def no_warnings_of_torch() -> Any:
    """torch warns that eager mode, its observers and quantized tensors are deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.")
        yield


class Recurrent(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.lstm, self.fc = nn.LSTM(6, 8, **options), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.lstm(self.quant(x))
        return self.dequant(self.fc(y))  # type: ignore[no-any-return]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.attention, self.fc = nn.MultiheadAttention(6, 2), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        y, _ = self.attention(x, x, x)
        return self.dequant(self.fc(y))  # type: ignore[no-any-return]


class OfQuantizable(Attention):
    """torch.ao's quantizable modules, written into the model by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.quantizable.MultiheadAttention(6, 2)
        self.lstm = nn.quantizable.LSTM(6, 6, bidirectional=True)
        self.fc = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        y, _ = self.attention(x, x, x)
        return self.dequant(self.fc(self.lstm(y)[0]))  # type: ignore[no-any-return]


def test_quantizable_modules_in_the_float_model() -> None:
    torch.manual_seed(0)
    model, batches = OfQuantizable().eval(), [torch.randn(5, 3, 6) for _ in range(3)]
    model.qconfig = FBGEMM  # type: ignore[assignment]
    # Of its FloatFunctionals one only multiplies by a number, which is not observed and not told.
    theirs, ours = both(lambda functions, m: functions.convert(calibrated(functions, m, batches)), model)
    assert [type(ours.lstm), type(ours.attention)] == [nn.quantized.LSTM, nn.quantized.MultiheadAttention]
    expected, result = model(batches[0]), ours(batches[0])
    assert 20 < sqnr(expected, result) < 50
    assert float((theirs(batches[0]) - result).abs().max()) < 2.01 * ours.fc.scale
    (decision,) = tc.explain(ours).find("attention.q_scaling_product")
    assert decision.reason.startswith("only scalars")
    scaling = ours.get_submodule("attention.q_scaling_product")
    with pytest.warns(tc.QuantizationWarning, match=r"no data.*: attention\.q_scaling_product\..*TQ405"):
        scaling.add(result, result)


#: The dicts of the documentation; without them the same classes are mapped by default.
PREPARE = {"float_to_observed_custom_module_class": {nn.LSTM: nn.quantizable.LSTM}}
CONVERT = {"observed_to_quantized_custom_module_class": {nn.quantizable.LSTM: nn.quantized.LSTM}}


def prepared_and_converted(functions: Any, model: Any, batches: list[Tensor], is_mapped: bool) -> Any:
    options = {"prepare_custom_config_dict": PREPARE} if is_mapped else {}
    prepared = calibrated(functions, model, batches, **options)
    converting = {"convert_custom_config_dict": CONVERT} if is_mapped else {}
    return prepared, functions.convert(prepared, **converting)


@pytest.mark.parametrize(
    ("make", "is_mapped"),
    [(Recurrent, True), (lambda: Recurrent(batch_first=True, bias=False), False), (Attention, False)],
)
def test_as_eager_mode_and_its_states_load(make: Any, is_mapped: bool) -> None:
    torch.manual_seed(0)
    model, batches = make().eval(), [torch.randn(5, 3, 6) for _ in range(3)]
    model.qconfig = FBGEMM
    flow = both(lambda functions, m: prepared_and_converted(functions, m, batches, is_mapped), model)
    (their_prepared, theirs), (ours_prepared, ours) = flow
    expected, result = model(batches[0]), ours(batches[0])
    their_result = theirs(batches[0])
    assert sqnr(expected, result) > sqnr(expected, their_result) - 0.5
    assert 25 < sqnr(expected, result) < 50
    steps = (their_result - result).abs() / ours.fc.scale
    assert float(steps.max()) < 2.01
    assert float(steps.mean()) < 0.2
    with pytest.raises(ConvertError, match="TQ950"):
        legacy.convert(ours_prepared)
    empty = quantize_eager.prepare(model)
    load_from_torch_ao = functools.partial(load_fx_state, empty)
    for load, state in (
        (empty.load_state_dict, their_prepared.state_dict()),
        (empty.load_state_dict, ours_prepared.state_dict()),
        (load_from_torch_ao, their_prepared.state_dict()),
        (load_from_torch_ao, theirs.state_dict()),
    ):
        load(state)
        assert torch.equal(quantize_eager.convert(empty)(batches[0]), result)
    exported = torch.export.export(ours, (batches[0],)).module()
    assert float((exported(batches[0]) - result).abs().max()) < 1.01 * ours.fc.scale


def test_attention_trains_where_eager_mode_raises() -> None:
    torch.manual_seed(3)
    model, x = Attention().train(), torch.randn(5, 3, 6)
    model.qconfig = legacy.get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]
    with pytest.raises(AssertionError):
        legacy.prepare_qat(model)
    prepared = quantize_eager.prepare_qat(model)
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.05)
    for _ in range(4):
        loss = prepared(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    expected = prepared.eval()(x)
    assert torch.isfinite(loss)
    assert 20 < sqnr(expected, quantize_eager.convert(prepared)(x)) < 70
    assert sqnr(expected, model.eval()(x)) < 20


class Unmapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.first, self.inner, self.fc = nn.Sequential(nn.Linear(6, 6)), inner, nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.quant(x))
        y = self.inner(x, x, x)[0] if isinstance(self.inner, nn.MultiheadAttention) else self.inner(x)[0]
        return self.dequant(self.fc(y))  # type: ignore[no-any-return]


@pytest.mark.parametrize("inner", [nn.LSTM(6, 6), nn.GRU(6, 6), nn.MultiheadAttention(6, 2)])
def test_what_is_not_mapped_stays_float_and_is_told(inner: nn.Module) -> None:
    """torch.ao observes the results of recurrent modules, which are nested, and quantizes the weight that an
    attention module reads: it raises at the first call."""
    torch.manual_seed(6)
    model, x = Unmapped(inner).eval(), torch.randn(5, 3, 6)
    model.qconfig = FBGEMM  # type: ignore[assignment]
    with pytest.warns(tc.QuantizationWarning, match=rf"'inner' stays float.*{type(inner).__name__}: .*TQ401"):
        prepared = calibrated(quantize_eager, model, [x], prepare_custom_config_dict={})
    assert all(
        torch.equal(a, b) for a, b in zip(prepared.inner.parameters(), inner.parameters(), strict=True)
    )
    converted = quantize_eager.convert(prepared)
    with pytest.warns(tc.QuantizationWarning, match="TQ42[56]"):
        result = converted(x)
    assert 25 < sqnr(model(x), result) < 60
    for report in (tc.explain(prepared), tc.explain(converted)):
        assert [d.action for d in report.find("inner") + report.find("fc")] == ["float", "quantized"]


def test_torch_ao_converts_all_or_nothing_of_what_is_prepared_here() -> None:
    model, x = Unmapped(nn.LSTM(6, 6)).eval(), torch.randn(5, 3, 6)
    model.qconfig = FBGEMM  # type: ignore[assignment]
    prepared = calibrated(quantize_eager, model, [x])
    before = [type(module) for module in prepared.modules()]
    with pytest.raises(ConvertError, match="TQ950"):
        legacy.convert(prepared, inplace=True)
    assert [type(module) for module in prepared.modules()] == before


def bad_values(value: Tensor, *, is_zero_point: bool) -> list[Any]:
    """Return what no scale, zero point or range can be, in place of ``value``."""
    values = [
        None,
        1.0,
        torch.empty_like(value, device="meta"),
        value.to_sparse(),
        torch.ones(()).expand(2**40),
    ]
    values += [torch.ones(7, dtype=value.dtype), torch.ones_like(value, dtype=torch.complex64)]
    if is_zero_point:
        return [*values, torch.full_like(value, 300), torch.full_like(value, 0.5, dtype=torch.float64)]
    return values + [
        torch.full_like(value, number, dtype=torch.float64) for number in (torch.nan, -torch.inf, 1e300)
    ]


@pytest.mark.parametrize("stage", ["prepared", "trained", "converted"])
def test_a_state_that_no_model_can_have_is_refused_by_name(stage: str) -> None:
    torch.manual_seed(4)
    model, x = Recurrent().train(stage == "trained"), torch.randn(5, 3, 6)
    model.qconfig = legacy.get_default_qat_qconfig("fbgemm") if stage == "trained" else FBGEMM  # type: ignore[assignment]
    prepare = quantize_eager.prepare_qat if stage == "trained" else quantize_eager.prepare
    loaded = prepare(model)
    loaded(x)
    if stage == "converted":
        loaded = quantize_eager.convert(loaded)
    loaded.apply(legacy.disable_observer).eval()
    state, result = copy.deepcopy(loaded.state_dict()), loaded(x)
    names = [name for name in state if re.fullmatch(r"fc\..*(scale|zero_point|max_val)", name)]
    assert len(names) >= {"prepared": 1, "trained": 6, "converted": 4}[stage]
    parent = nn.ModuleDict({"inner": loaded})
    for name in names:
        for bad in bad_values(state[name], is_zero_point=name.endswith("zero_point")):
            with pytest.raises(CheckpointError, match=rf"{re.escape(name)}[ ,].*\nHint: .*TQ960"):
                loaded.load_state_dict({**state, name: bad})
            with pytest.raises(CheckpointError, match=re.escape(name)):
                parent.load_state_dict(
                    {f"inner.{key}": bad if key == name else v for key, v in state.items()}
                )
    for bad_state in ({**state, "fc.stranger": x}, {k: v for k, v in state.items() if k != names[-1]}):
        with pytest.raises(CheckpointError, match=rf"fc\.stranger|{re.escape(names[-1])}"):
            loaded.load_state_dict({**bad_state, "fc.bias": torch.zeros_like(state["fc.bias"])})
    for other in (loaded, copy.deepcopy(loaded)):
        assert torch.equal(other.eval()(x), result)
    assert type(loaded).__name__ == "Recurrent"


def test_parts_are_explained() -> None:
    torch.manual_seed(1)
    model, x = Recurrent().eval(), torch.randn(5, 3, 6)
    model.qconfig = FBGEMM  # type: ignore[assignment]
    prepared = calibrated(quantize_eager, model, [x])
    assert [name for name, _ in prepared.named_modules() if name.endswith("layer_fw.cell")] == [
        "lstm.layers.0.layer_fw.cell"
    ]
    report = tc.explain(quantize_eager.convert(prepared))
    assert len(report.find("lstm")) > 8
    assert all(decision.action == "quantized" for decision in report.find("lstm"))


def test_a_converted_state_of_trained_modules_loads() -> None:
    """Batch norms are in the weights there; the qparams are those of the state, bit for bit."""
    torch.manual_seed(2)
    x = torch.randn(4, 3, 8, 8)
    model = sane(nn.Sequential(QuantStub(), ConvBNReLU(3, 4), nn.Conv2d(4, 4, 1), DeQuantStub())).train()
    legacy.fuse_modules_qat(model, [["1.0", "1.1", "1.2"]], inplace=True)
    model.qconfig = legacy.get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]

    def flow(functions: Any, model: Any) -> Any:
        prepared = functions.prepare_qat(model)
        prepared(x)
        return functions.convert(prepared.eval())

    theirs, ours = both(flow, model)
    empty = quantize_eager.prepare_qat(model)
    load_fx_state(empty, theirs.state_dict())
    loaded = quantize_eager.convert(empty.eval())
    assert torch.equal(loaded(x), ours(x))
    state = theirs.state_dict()
    del state["2.scale"]
    before = copy.deepcopy(empty.state_dict())
    with pytest.raises(CheckpointError, match=r"2\.scale"):
        load_fx_state(empty, state)
    assert all(torch.equal(value, before[name]) for name, value in empty.state_dict().items())


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)  # type: ignore[no-any-return]


class ObservedScaled(nn.Module):
    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)  # type: ignore[no-any-return]

    @classmethod
    def from_float(cls, float_module: Any) -> Any:
        observed = cls(float_module.conv)
        observed.qconfig = float_module.qconfig
        return observed


class QuantizedScaled(ObservedScaled):
    """As the documentation of custom modules writes it: with a quantized module of torch.ao inside."""

    @classmethod
    def from_observed(cls, observed: Any) -> Any:
        observed.conv.activation_post_process = observed.activation_post_process
        return cls(torch.ao.nn.quantized.Conv2d.from_float(observed.conv))


def test_a_users_own() -> None:
    torch.manual_seed(3)
    x = torch.randn(4, 3, 6, 6)
    model = nn.Sequential(QuantStub(), Scaled(), nn.Conv2d(3, 2, 1), DeQuantStub()).eval()
    model.qconfig = FBGEMM  # type: ignore[assignment]

    def flow(functions: Any, model: Any) -> Any:
        mapping = {"float_to_observed_custom_module_class": {Scaled: ObservedScaled}}
        prepared = calibrated(functions, model, [x], prepare_custom_config_dict=mapping)
        assert type(prepared[1]) is ObservedScaled
        mapping = {"observed_to_quantized_custom_module_class": {ObservedScaled: QuantizedScaled}}
        return functions.convert(prepared, convert_custom_config_dict=mapping)

    theirs, ours = both(flow, model)
    with pytest.warns(tc.QuantizationWarning, match="TQ427"):
        result = ours(x)
    assert float((result - theirs(x)).abs().max()) < 1.01 * ours[2].scale
