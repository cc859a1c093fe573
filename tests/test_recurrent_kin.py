"""GRU, RNN and the cells: the LSTM's contract, swept over them."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import nn
from torch.ao.quantization.fx.custom_config import PrepareCustomConfig

from tests.recurrent_points import Kind, Point, Profile, check, points, sweep
from tests.test_lstm_parts import fixed
from torchq_compat import profiles
from torchq_compat.nn import quantizable
from torchq_compat.recurrent_parts import get_individually_observed_parts


def map_to_parts_of(float_class: type[nn.Module], **arguments: Any) -> PrepareCustomConfig:
    """A mapping of ``float_class`` to a user's observed class that asks for these parts."""
    base: Any = getattr(quantizable, float_class.__name__)

    class UserObserved(base):  # type: ignore[misc]
        @classmethod
        def from_float(cls, module: nn.Module) -> nn.Module:
            return get_individually_observed_parts(module, **arguments)

    return PrepareCustomConfig().set_float_to_observed_mapping(float_class, UserObserved)


def map_either(float_class: type[nn.Module], cell_class: type[nn.Module], **arguments: Any) -> Any:
    """Both mappings: of the module over sequences and of its cell."""
    config = map_to_parts_of(float_class, **arguments)
    static = map_to_parts_of(cell_class, **arguments).float_to_observed_mapping
    for quant_type, mapping in static.items():
        for found, observed in mapping.items():
            config.set_float_to_observed_mapping(found, observed, quant_type)
    return config


def int16_everywhere(module: nn.Module) -> dict[str, Any]:
    """The 16-bit profile without the 8 bits it leaves inside the cell. States are within [-8, 8)."""
    return {
        **profiles.int16_parts(module),
        "igates_obs_ctr": fixed(2**-11, 0, torch.qint32),
        "hgates_obs_ctr": fixed(2**-11, 0, torch.qint32),
        "hidden_state_obs_ctr": fixed(2**-12, 0, torch.int16),
    }


GRU = Kind(
    "GRU",
    nn.GRU,
    nn.GRUCell,
    functools.partial(map_either, nn.GRU, nn.GRUCell),
    states=(0.8,),
    bias=(1.0, 0.5, 0.0),
    sums=(1, 2),
    others=9,
)
OF_RNN = functools.partial(map_either, nn.RNN, nn.RNNCell)
RNN = Kind("RNN", nn.RNN, nn.RNNCell, OF_RNN, states=(0.8,), bias=(0.0,), sums=(1, 1), others=1)
RELU_RNN = Kind(
    "RNN with ReLU",
    functools.partial(nn.RNN, nonlinearity="relu"),
    functools.partial(nn.RNNCell, nonlinearity="relu"),
    OF_RNN,
    states=(0.8,),
    bias=(0.3,),
    sums=(0, 0),
    others=1,
)
KINDS = (GRU, RNN, RELU_RNN)
PROFILES = (
    Profile(profiles.int8_parts, dict.fromkeys(("GRU", "RNN", "RNN with ReLU"), 25)),
    Profile(profiles.int16_parts, dict.fromkeys(("GRU", "RNN", "RNN with ReLU"), 25)),
    Profile(profiles.int8_with_int16_cell, dict.fromkeys(("GRU", "RNN", "RNN with ReLU"), 25)),
    Profile(int16_everywhere, dict.fromkeys(("GRU", "RNN", "RNN with ReLU"), 25), requantizes=True),
)
