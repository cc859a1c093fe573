"""States of recurrent modules: observed part by part by FX, with parts of their own dtypes, and dynamic."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.ao.quantization.quantize_fx as fx
from torch import Tensor, nn
from torch.ao.quantization import (
    QConfigMapping,
    default_dynamic_qconfig,
    get_default_qat_qconfig_mapping,
    get_default_qconfig_mapping,
    quantize_dynamic,
)
from torch.ao.quantization.fx.custom_config import ConvertCustomConfig
from torch.fx import GraphModule

import torchq_compat as tc
from tests.helpers.oracle import CONVERT_LSTM, MAP_LSTM, sqnr
from torchq_compat.checkpoints import load_checkpoint, load_fx_state
from torchq_compat.errors import CheckpointError, QuantizationWarning


class WithState(nn.Module):
    """A model that has the state as an argument, as FX requires."""

    def __init__(self, layers: int = 1, bidirectional: bool = False) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, layers, bidirectional=bidirectional)
        self.fc = nn.Linear(12 if bidirectional else 6, 3)
        self.rows = layers * (2 if bidirectional else 1)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Tensor:
        return self.fc(self.lstm(x, (h, c))[0])

    def batch(self) -> tuple[Tensor, ...]:
        return torch.randn(5, 3, 4), *(0.1 * torch.randn(self.rows, 3, 6) for _ in range(2))


class Dynamic(nn.Module):
    """An LSTM and a linear; with ``whole`` also a GRU and a cell."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.whole = whole
        self.lstm = nn.LSTM(4, 6, 2 if whole else 1, bidirectional=whole)
        if whole:
            self.gru, self.cell = nn.GRU(12, 5), nn.LSTMCell(5, 6)
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.lstm(x)[0]
        return self.fc(self.cell(self.gru(y)[0][0])[0] if self.whole else y)


def by_fx(model: nn.Module, batch: Any, is_qat: bool = False) -> GraphModule:
    mapping = (get_default_qat_qconfig_mapping if is_qat else get_default_qconfig_mapping)("x86")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return (fx.prepare_qat_fx if is_qat else fx.prepare_fx)(
            copy.deepcopy(model).train(is_qat), mapping, batch, MAP_LSTM
        )


def by_us(model: nn.Module, batch: Any, is_qat: bool = False) -> GraphModule:
    mapping = (get_default_qat_qconfig_mapping if is_qat else get_default_qconfig_mapping)("x86")
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return (tc.prepare_qat_fx if is_qat else tc.prepare_fx)(model.train(is_qat), mapping, batch, MAP_LSTM)


@pytest.mark.parametrize(
    ("layers", "bidirectional"), [(1, False), pytest.param(2, True, marks=pytest.mark.slow)]
)
def test_default_parts(layers: int, bidirectional: bool) -> None:
    """FX concatenates directions with the first one's qparams (B5), so only one direction is compared."""
    torch.manual_seed(0)
    model = WithState(layers, bidirectional).eval()
    batches = [model.batch() for _ in range(3)]
    theirs = by_fx(model, batches[0])
    for batch in batches:
        theirs(*batch)
    converted = fx.convert_to_reference_fx(copy.deepcopy(theirs), CONVERT_LSTM)
    outputs = []
    for state in (theirs.state_dict(), converted.state_dict()):
        ours = by_us(model, batches[0])
        load_fx_state(ours, state)
        outputs.append(tc.convert_to_reference_fx(ours)(*batches[0]))
    assert torch.equal(*outputs)
    assert 25 < sqnr(model(*batches[0]), outputs[0]) < 60
    if not bidirectional:
        step = float(converted.fc_scale_0)
        assert float(((outputs[0] - converted(*batches[0])).abs() <= 1.01 * step).float().mean()) > 0.99


@pytest.mark.slow
def test_training_of_an_lstm_goes_on_with_the_next_losses_of_fx() -> None:
    torch.manual_seed(0)
    model = WithState()
    batch = model.batch()
    theirs, ours = by_fx(model, batch, is_qat=True), by_us(model, batch, is_qat=True)
    losses(theirs, batch, 3)
    load_fx_state(ours, copy.deepcopy(theirs.state_dict()))
    expected = losses(theirs, batch, 5)
    assert losses(ours, batch, 5) == pytest.approx(expected, rel=1e-3)
    assert expected[-1] < 0.99 * expected[0]


def losses(model: nn.Module, batch: Any, steps: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(*batch) - 1).pow(2).mean()
        loss.backward()
        optimizer.step()
        found.append(float(loss))
    return found


def test_parts_of_their_own_dtypes() -> None:
    """FX requantizes gates to 8 bits (B8) and observes their inputs with their outputs' qparams (B7): these
    observers have no place here, which is reported. The others are equal."""
    from migration.legacy import lstm_16bit_parts as legacy
    from torchq_compat import lstm_utils

    torch.manual_seed(0)
    model, state = legacy.Encoder().eval(), torch.zeros(1, legacy.BATCH, legacy.HIDDEN)
    batch = (torch.randn(7, legacy.BATCH, legacy.INPUTS), state, state)
    mapping = QConfigMapping().set_global(legacy.default_qconfig)
    config = tc.get_default_prepare_custom_config()
    config.set_float_to_observed_mapping(nn.LSTM, legacy.UserObservedLSTM)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = fx.prepare_fx(copy.deepcopy(model), mapping, batch, config, backend_config=legacy.BACKEND)
    theirs(*batch)
    cell = theirs.lstm.layers[0].layer_fw.cell
    expected = {
        name: getattr(cell, f"activation_post_process_{index}").calculate_qparams()
        for name, index in {"igates": 1, "hgates": 3, "gates": 4, "fgate_cx": 15, "ogate_cy": 22}.items()
    }
    prepared_state = copy.deepcopy(theirs.state_dict())
    converted = fx.convert_to_reference_fx(
        theirs,
        ConvertCustomConfig().set_observed_to_quantized_mapping(
            torch.ao.nn.quantizable.LSTM, legacy.UserQuantizedLSTM
        ),
        backend_config=legacy.BACKEND,
    )

    class Ours(torch.ao.nn.quantizable.LSTM):
        @classmethod
        def from_float(cls, float_lstm: Any) -> Any:
            fixed = legacy.fixed
            return lstm_utils.get_lstm_with_individually_observed_parts(
                float_lstm=float_lstm,
                backend_config=legacy.BACKEND,
                linear_output_obs_ctr=fixed(2**-11, 2**15),
                sigmoid_obs_ctr=fixed(2**-16, 0),
                tanh_obs_ctr=fixed(2**-15, 2**15),
                cell_state_obs_ctr=fixed(2**-11, 0),
                hidden_state_obs_ctr=fixed(2**-7, 2**7, torch.quint8),
            )

    config = tc.get_default_prepare_custom_config().set_float_to_observed_mapping(nn.LSTM, Ours)
    for state_dict in (prepared_state, converted.state_dict()):
        ours = tc.prepare_fx(copy.deepcopy(model), mapping, batch, config, backend_config=legacy.BACKEND)
        with pytest.warns(QuantizationWarning, match="FX observes .* values that have no observer here"):
            load_fx_state(ours, state_dict)
        quantized = tc.convert_to_reference_fx(ours)
        found = {
            decision.path.rpartition(".")[2]: decision.details
            for decision in tc.explain(quantized)
            if decision.path.startswith("lstm.layers.0")
        }
        for name, (scale, zero_point) in expected.items():
            assert found[name]["scale"] == pytest.approx(float(scale), rel=1e-6), name
            assert found[name]["zero_point"] == int(zero_point), name


def test_a_file_with_packed_objects_names_them(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        eager = quantize_dynamic(Dynamic(whole=True).eval(), {nn.LSTM, nn.GRU, nn.LSTMCell, nn.Linear})
        torch.save(eager.state_dict(), tmp_path / "dynamic.pt")
    with pytest.raises(CheckpointError, match=r"(?s)lstm\._all_weight_values\.0\.param, .*_only=False"):
        load_checkpoint(tmp_path / "dynamic.pt")


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_dynamic_modules(whole: bool) -> None:
    torch.manual_seed(0)
    model, x = Dynamic(whole).eval(), torch.randn(6, 2, 4)
    mapping = QConfigMapping().set_global(default_dynamic_qconfig)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = fx.prepare_fx(copy.deepcopy(model), mapping, (x,))
        theirs(x)
        converted = fx.convert_fx(copy.deepcopy(theirs))
        eager = quantize_dynamic(copy.deepcopy(model), {nn.LSTM, nn.GRU, nn.LSTMCell, nn.Linear})
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        nn.init.normal_(parameter)
    expected = None
    for state in (theirs.state_dict(), converted.state_dict(), eager.state_dict()):
        ours = tc.prepare_fx(copy.deepcopy(other), mapping, (x,))
        load_fx_state(ours, state)
        found = tc.convert_to_reference_fx(ours)(x)
        expected = found if expected is None else expected
        assert torch.equal(found, expected)
    assert expected is not None
    assert sqnr(converted(x), expected) > 45
    assert 20 < sqnr(model(x), expected) < 70
