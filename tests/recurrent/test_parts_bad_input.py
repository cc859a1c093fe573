"""Mistakes of users with the parts of an LSTM: an error of this package with the part's name and a hint."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.quantization import FixedQParamsObserver, MinMaxObserver, get_default_qconfig_mapping
from torch.ao.quantization.backend_config import get_qnnpack_backend_config
from torch.ao.quantization.fx import lstm_utils as fx_lstm_utils
from torch.ao.quantization.fx.custom_config import PrepareCustomConfig

import torchq_compat as tc
from torchq_compat.errors import ConfigError, CustomModuleError, TorchQCompatError
from torchq_compat.lstm_utils import (
    get_lstm_with_individually_observed_parts,
    get_reference_quantized_lstm_module,
)

MAPPING = get_default_qconfig_mapping("qnnpack")
WIDE = FixedQParamsObserver.with_args(scale=2**-15, zero_point=0, dtype=torch.qint32)


def lstm() -> nn.LSTM:
    made = nn.LSTM(4, 6)
    made.qconfig = MAPPING.global_qconfig
    return made


@pytest.mark.parametrize(
    ("constructor", "part", "op"),
    [
        ("sigmoid_obs_ctr", "input_gate", "Sigmoid"),
        ("tanh_obs_ctr", "cell_gate", "Tanh"),
        ("linear_output_obs_ctr", "gates", "add"),
        ("hidden_state_obs_ctr", "ogate_cy", "mul"),
        ("igates_obs_ctr", "igates", "Linear"),
    ],
)
def test_a_dtype_the_backend_does_not_allow_names_the_part(constructor: str, part: str, op: str) -> None:
    """FX silently ignored a sigmoid's unsupported dtype (B11)."""
    with pytest.raises(ConfigError, match=rf"part '{part}' is observed as int32.*for {op}\.") as caught:
        get_lstm_with_individually_observed_parts(
            lstm(), None, get_qnnpack_backend_config(), **{constructor: WIDE}
        )
    assert "Hint: it allows int8, uint8; add a DTypeConfig" in str(caught.value)


@pytest.mark.parametrize("bad", [MinMaxObserver(), "MinMax", 3, lambda: torch.zeros(1), nn.ReLU])
def test_what_is_no_constructor(bad: Any) -> None:
    with pytest.raises(ConfigError, match=r"cell_state_obs_ctr is not an observer .* constructor") as caught:
        get_lstm_with_individually_observed_parts(lstm(), cell_state_obs_ctr=bad)
    assert "Hint:" in str(caught.value)


@pytest.mark.parametrize(
    ("examples", "problem"),
    [
        ((torch.rand(5, 3), (torch.rand(5, 6), torch.rand(5, 6))), "x must be 4 wide"),
        ((torch.rand(5, 4), (torch.rand(5, 7), torch.rand(5, 6))), "h must be 6 wide"),
        ((torch.rand(5, 4), (torch.rand(5, 6), torch.rand(5, 4))), "c must be 6 wide"),
    ],
)
def test_example_inputs_that_do_not_fit(examples: Any, problem: str) -> None:
    with pytest.raises(CustomModuleError, match=problem):
        get_lstm_with_individually_observed_parts(lstm(), examples)


def test_no_qconfig_and_no_lstm() -> None:
    with pytest.raises(ConfigError, match="no qconfig"):
        get_lstm_with_individually_observed_parts(nn.LSTM(4, 6))
    with pytest.raises(CustomModuleError, match="LSTM is needed, got Linear"):
        get_lstm_with_individually_observed_parts(nn.Linear(4, 6))  # type: ignore[arg-type]
    with pytest.raises(CustomModuleError, match="which this package cannot run"):
        get_reference_quantized_lstm_module(torch.ao.nn.quantizable.LSTM(4, 6))


def something_else(cls: type, float_lstm: nn.LSTM) -> nn.Module:
    return nn.Linear(4, 6)


def nothing(cls: type, float_lstm: nn.LSTM) -> None:
    return None


def by_stock_utils(cls: type, float_lstm: nn.LSTM) -> Any:
    inputs = torch.rand(5, 4), (torch.rand(5, 6), torch.rand(5, 6))
    return fx_lstm_utils._get_lstm_with_individually_observed_parts(float_lstm, inputs)


@pytest.mark.parametrize(
    ("from_float", "problem"),
    [
        (something_else, "from_float of the custom module at '0' returned Linear"),
        (nothing, "from_float of the custom module at '0' returned NoneType"),
        (by_stock_utils, "the LSTM at '0' was observed by the FX engine"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_from_float_that_gives_something_else(from_float: Any, problem: str) -> None:
    observed = type("UserLSTM", (torch.ao.nn.quantizable.LSTM,), {"from_float": classmethod(from_float)})
    model = nn.Sequential(nn.LSTM(4, 6)).eval()
    before = copy.deepcopy(model.state_dict())
    config = PrepareCustomConfig().set_float_to_observed_mapping(nn.LSTM, observed)
    with pytest.raises(TorchQCompatError, match=problem) as caught:
        tc.prepare_fx(model, MAPPING, (torch.randn(5, 2, 4),), config)
    assert "Hint:" in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not hasattr(model[0], "qconfig")
