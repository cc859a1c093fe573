"""Individually observed parts where FX is wrong or fails: live FX, its number or failure beside ours."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import (
    FixedQParamsFakeQuantize,
    FixedQParamsObserver,
    MovingAverageMinMaxObserver,
    QConfig,
    QConfigMapping,
    default_weight_observer,
    get_default_qat_qconfig_mapping,
    get_default_qconfig_mapping,
)
from torch.ao.quantization.fx import lstm_utils as fx_lstm_utils
from torch.ao.quantization.fx.custom_config import ConvertCustomConfig, PrepareCustomConfig
from torch.fx import GraphModule

import torchq_compat as tc
from tests.helpers.once import made_once
from tests.helpers.oracle import MAP_LSTM, by_fx, by_us, calibrate, sqnr
from torchq_compat import lstm_utils
from torchq_compat.errors import CustomModuleError
from torchq_compat.modules.parts import part_nodes

QUANTIZE = torch.ops.quantized_decomposed.quantize_per_tensor.default
FIXED = FixedQParamsObserver.with_args
SIXTEEN_BITS = {
    "sigmoid_obs_ctr": FIXED(scale=2**-16, zero_point=0, dtype=torch.qint32),
    "tanh_obs_ctr": FIXED(scale=2**-15, zero_point=2**15, dtype=torch.qint32),
}


class Model(nn.Module):
    """Return an LSTM with weights that make the gates use their whole range."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTM(12, 16, **kwargs)
        for parameter in self.lstm.parameters():
            parameter.data *= 4

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Tensor:
        output: Tensor = self.lstm(x, (h, c))[0]
        return output


def batches(count: int = 4, rows: int = 1, steps: int = 9) -> list[tuple[Tensor, ...]]:
    torch.manual_seed(1)
    return [
        (torch.randn(steps, 8, 12), torch.rand(rows, 8, 16) - 0.5, torch.rand(rows, 8, 16) - 0.5)
        for _ in range(count)
    ]


def observed_by(utils: Any, **constructors: Any) -> type[nn.Module]:
    class UserLSTM(torch.ao.nn.quantizable.LSTM):
        @classmethod
        def from_float(cls, float_lstm: nn.LSTM) -> Any:
            cell_inputs = torch.rand(8, 12), (torch.rand(8, 16), torch.rand(8, 16))
            return utils._get_lstm_with_individually_observed_parts(float_lstm, cell_inputs, **constructors)

    return UserLSTM


def mapped(observed: type[nn.Module]) -> PrepareCustomConfig:
    return PrepareCustomConfig().set_float_to_observed_mapping(nn.LSTM, observed)


def converted_by_fx(model: nn.Module, data: list[tuple[Tensor, ...]], **constructors: Any) -> Any:
    """Convert ``model`` by FX's own flow with the class that a user writes for it."""
    import torch.ao.quantization.quantize_fx as fx

    class Quantized(torch.ao.nn.quantized.LSTM):
        @classmethod
        def from_observed(cls, observed: Any) -> Any:
            return fx_lstm_utils._get_reference_quantized_lstm_module(observed)

    prepared = fx.prepare_fx(
        copy.deepcopy(model),
        get_default_qconfig_mapping("qnnpack"),
        data[0],
        mapped(observed_by(fx_lstm_utils, **constructors)),
    )
    calibrate(prepared, data)
    config = ConvertCustomConfig().set_observed_to_quantized_mapping(torch.ao.nn.quantizable.LSTM, Quantized)
    return fx.convert_to_reference_fx(prepared, config)


def ours_with(model: nn.Module, data: list[tuple[Tensor, ...]], **constructors: Any) -> Any:
    mapping = get_default_qconfig_mapping("qnnpack")
    return by_us(model, mapping, data, mapped(observed_by(lstm_utils, **constructors)))[1]


def part(converted: Any, name: str, direction: str = "layer_fw") -> torch.fx.Node:
    cell = converted.get_submodule(f"lstm.layers.0.{direction}.cell")
    return dict(part_nodes(cell))[name]


@pytest.mark.filterwarnings("ignore")
def test_b6_the_backward_direction_is_observed_too() -> None:
    model, data = Model(bidirectional=True).eval(), batches(rows=2)
    theirs = converted_by_fx(model, data)
    with pytest.raises(RuntimeError, match="same dtype"):
        theirs(*data[0])
    ours = ours_with(model, data)
    names = [name for name, _ in part_nodes(ours.get_submodule("lstm.layers.0.layer_bw.cell"))]
    assert len(names) == 12
    exact, output = model(*data[0]), ours(*data[0])
    assert 25 < sqnr(exact[..., 16:], output[..., 16:]) < 60


@pytest.mark.filterwarnings("ignore")
def test_b7_a_gates_input_is_not_cut_to_its_outputs_range() -> None:
    model, data = Model().eval(), batches()
    constructors = {"sigmoid_obs_ctr": FIXED(scale=1 / 256, zero_point=0)}
    theirs, ours = converted_by_fx(model, data, **constructors), ours_with(model, data, **constructors)
    with torch.no_grad():
        exact = model(*data[1])
        assert sqnr(exact, theirs(*data[1])) < 12
        assert 25 < sqnr(exact, ours(*data[1])) < 60


@pytest.mark.filterwarnings("ignore")
def test_b8_no_requantize_between_a_gate_and_its_multiplication() -> None:
    model, data = Model().eval(), batches()
    theirs, ours = converted_by_fx(model, data, **SIXTEEN_BITS), ours_with(model, data, **SIXTEEN_BITS)
    cell = theirs.lstm.layers[0].layer_fw.cell
    dtypes = [n.args[-1] for n in cell.graph.nodes if n.target is torch.quantize_per_tensor]
    assert dtypes.count(torch.qint32) < dtypes.count(torch.quint8)
    for name, gate in (
        ("fgate_cx", "forget_gate"),
        ("igate_cgate", "input_gate"),
        ("ogate_cy", "output_gate"),
    ):
        dequantize = part(ours, name).args[0]
        quantize = dequantize.args[0]
        assert quantize.args[5] is torch.int32
        assert quantize.args[0] is part(ours, gate)


def test_b9_parts_have_weight_fake_quantizes_in_qat() -> None:
    fake_quantize = FixedQParamsFakeQuantize.with_args(observer=FIXED(scale=1 / 256, zero_point=0))
    config = mapped(observed_by(lstm_utils, sigmoid_obs_ctr=fake_quantize))
    prepared = tc.prepare_qat_fx(
        Model(bidirectional=True).train(),
        get_default_qat_qconfig_mapping("qnnpack"),
        batches(rows=2)[0],
        config,
    )
    for direction in ("layer_fw", "layer_bw"):
        cell = prepared.get_submodule(f"lstm.layers.0.{direction}.cell")
        weights = [n for n in cell.graph.nodes if n.op == "get_attr" and str(n.target).endswith("weight")]
        assert [len(n.users) for n in weights] == [1, 1]
        for weight in weights:
            (user,) = weight.users
            assert hasattr(cell.get_submodule(str(user.target)), "fake_quant_enabled")


def test_b10_explain_reports_what_a_moving_average_cuts_off() -> None:
    mapping = QConfigMapping().set_global(QConfig(MovingAverageMinMaxObserver, default_weight_observer))
    model, data = Model().eval(), batches(6)
    prepared, converted = by_us(model, mapping, data, MAP_LSTM)
    path = "lstm.layers.0.layer_fw.cell.fgate_cx_igate_cgate"
    shares = [tc.explain(m).find(path)[0].details["saturated"] for m in (prepared, converted)]
    assert shares[0] == shares[1]
    observer = next(
        m for n, m in prepared.named_modules() if n.startswith("lstm") and hasattr(m, "saturated")
    )
    assert shares[0] > 0.01
    assert 0 < float(observer.saturated) < float(observer.seen)


def test_b11_constructors_fx_does_not_have() -> None:
    constructors = {
        "igates_obs_ctr": FIXED(scale=2**-5, zero_point=128),
        "hgates_obs_ctr": FIXED(scale=2**-6, zero_point=128),
        "tanh_cell_state_obs_ctr": FIXED(scale=2**-14, zero_point=0, dtype=torch.qint32),
    }
    ours = ours_with(Model().eval(), batches(), **constructors)
    for name, scale in (("igates", 2**-5), ("hgates", 2**-6), ("tanh_cy", 2**-14)):
        (quantize,) = part(ours, name).users
        assert quantize.target is QUANTIZE
        assert quantize.args[1] == scale


@made_once
def observed_by_a_subclass() -> tuple[type[nn.Module], nn.Module, list[tuple[Tensor, ...]], GraphModule]:
    observed, model, data = observed_by(lstm_utils), Model().eval(), batches()
    prepared, _ = by_us(model, get_default_qconfig_mapping("qnnpack"), data, mapped(observed))
    return observed, model, data, prepared


@pytest.mark.parametrize("keyed_on", ["base", "subclass", "stock"])
def test_b12_the_key_of_the_convert_mapping(keyed_on: str) -> None:
    observed, model, data, prepared = observed_by_a_subclass()

    class Quantized(torch.ao.nn.quantized.LSTM):
        @classmethod
        def from_observed(cls, other: Any) -> Any:
            return lstm_utils._get_reference_quantized_lstm_module(other)

    key = observed if keyed_on == "subclass" else torch.ao.nn.quantizable.LSTM
    value = torch.ao.nn.quantized.LSTM if keyed_on == "stock" else Quantized
    config = ConvertCustomConfig().set_observed_to_quantized_mapping(key, value)
    converted = tc.convert_fx(prepared, config)
    assert isinstance(converted.lstm, torch.ao.nn.quantized.LSTM)
    assert 25 < sqnr(model(*data[0]), converted(*data[0])) < 60


@pytest.mark.filterwarnings("ignore")
def test_b12_fx_leaves_an_lstm_keyed_on_the_subclass_unconverted() -> None:
    import torch.ao.quantization.quantize_fx as fx

    observed = observed_by(fx_lstm_utils)
    prepared = fx.prepare_fx(
        Model().eval(), get_default_qconfig_mapping("qnnpack"), batches()[0], mapped(observed)
    )
    config = ConvertCustomConfig().set_observed_to_quantized_mapping(observed, torch.ao.nn.quantized.LSTM)
    converted = fx.convert_to_reference_fx(prepared, config)
    assert not isinstance(converted.lstm, torch.ao.nn.quantized.LSTM)


class Whole(nn.Module):
    def __init__(self, lstm: nn.LSTM) -> None:
        super().__init__()
        self.lstm = lstm

    def forward(self, x: Tensor) -> Any:
        return self.lstm(x)


@pytest.mark.filterwarnings("ignore")
def test_b20_unbatched_input() -> None:
    """FX's quantizable LSTM mistakes the features for the batch: (5, 4, 4) instead of (5, 4)."""
    float_lstm = nn.LSTM(4, 4)
    float_lstm.qconfig = get_default_qconfig_mapping("qnnpack").global_qconfig
    x = torch.randn(5, 4)
    theirs = torch.ao.nn.quantizable.LSTM.from_float(float_lstm.eval())
    assert theirs(x)[0].shape == (5, 4, 4)
    model = Whole(float_lstm).eval()
    _, ours = by_us(model, get_default_qconfig_mapping("qnnpack"), [(x,)], MAP_LSTM)
    assert ours(x)[0].shape == (5, 4)
    assert 20 < sqnr(model(x)[0], ours(x)[0]) < 60


@pytest.mark.filterwarnings("ignore")
def test_b20_projection() -> None:
    torch.manual_seed(0)
    model = Whole(nn.LSTM(8, 16, 2, proj_size=6)).eval()
    for parameter in model.parameters():
        parameter.data *= 2
    data = [(torch.randn(9, 8, 8),) for _ in range(4)]
    _, ours = by_us(model, get_default_qconfig_mapping("qnnpack"), data, MAP_LSTM)
    x = torch.randn(12, 4, 8)
    for exact, found in zip((model(x)[0], *model(x)[1]), (ours(x)[0], *ours(x)[1]), strict=True):
        assert exact.shape == found.shape
        assert 25 < sqnr(exact, found) < 60
    with pytest.raises((RuntimeError, AssertionError, ValueError, TypeError)):
        by_fx(model, get_default_qconfig_mapping("qnnpack"), data, MAP_LSTM)


@made_once
def prepared_whole() -> GraphModule:
    model, x = Whole(nn.LSTM(4, 4)).eval(), torch.randn(5, 2, 4)
    return tc.prepare_fx(model, get_default_qconfig_mapping("qnnpack"), (x,), MAP_LSTM)


def test_b21_initial_state_qparams_are_used() -> None:
    """FX's cell has the attributes, but no code reads them."""
    prepared = prepared_whole()
    calibrate(prepared, [(torch.randn(9, 4, 4),)])
    x = torch.randn(1, 2, 4)
    plain = tc.convert_fx(prepared)(x)[1][1]
    cell = prepared.lstm.layers[0].layer_fw.cell
    # 300 does not fit in 8 bits: zero becomes (255 - 300) * 0.01, but only if the qparams are read.
    cell.initial_cell_state_qparams = (0.01, 300)
    shifted = tc.convert_fx(copy.deepcopy(prepared))
    assert shifted.lstm.layers[0].layer_fw.cell.initial_cell_state_qparams == (0.01, 300)
    assert not torch.equal(shifted(x)[1][1], plain)
    given = (torch.zeros(1, 2, 4), torch.full((1, 2, 4), -0.45))
    torch.testing.assert_close(shifted.lstm(x, None)[1][1], shifted.lstm(x, given)[1][1])


def test_a_sequence_without_steps_is_refused() -> None:
    prepared = prepared_whole()
    with pytest.raises(CustomModuleError, match=r"module 'lstm'.*has no steps"):
        prepared(torch.zeros(0, 2, 4))
