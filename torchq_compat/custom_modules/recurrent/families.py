"""The recurrent modules of torch.nn, each with what it becomes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchq_compat.custom_modules.leaf_op import FakeCall
from torchq_compat.custom_modules.recurrent.cell_owner import ConvertedModule, ObservedModule
from torchq_compat.custom_modules.recurrent.contract import RecurrentStructure, call_recurrent, fake_layers
from torchq_compat.custom_modules.recurrent.gru import (
    ConvertedGRU,
    ConvertedGRUCell,
    ObservedGRU,
    ObservedGRUCell,
)
from torchq_compat.custom_modules.recurrent.lstm import (
    ConvertedLSTM,
    ConvertedLSTMCell,
    ObservedLSTM,
    ObservedLSTMCell,
)
from torchq_compat.custom_modules.recurrent.rnn import (
    ConvertedRNN,
    ConvertedRNNCell,
    ObservedRNN,
    ObservedRNNCell,
)
from torchq_compat.custom_modules.recurrent.single_cell import fake_cell

__all__ = ["FAMILIES", "RecurrentFamily", "family_of"]


@dataclass(frozen=True)
class RecurrentFamily:
    """A float class of torch.nn and the classes it goes through.

    Attributes:
        float_class: the class of torch.nn.
        observed: what takes its place in a prepared model.
        converted: what takes its place in a converted model.
        fake_call: shapes of a float module's results; arguments: the module and its path.
        legacy_observed: the class of torch.ao a script maps to, if there is one.
        legacy_converted: the class of torch.ao it converts to, if there is one.
    """

    float_class: type[nn.Module]
    observed: type[ObservedModule]
    converted: type[ConvertedModule]
    fake_call: Callable[[Any, str], FakeCall]
    legacy_observed: type[nn.Module] | None = None
    legacy_converted: type[nn.Module] | None = None

    @property
    def map_to(self) -> str:
        """The name to map the float class to, for people."""
        name = self.float_class.__name__
        if self.legacy_observed is not None:
            return f"torch.ao.nn.quantizable.{name}"
        return f"torchq_compat.nn.quantizable.{name}"


def fake_sequence(module: nn.RNNBase, path: str) -> FakeCall:
    """Shapes of the results of an LSTM, GRU or RNN that stands at ``path``."""
    structure = RecurrentStructure.of(module)

    def fake(*args: Any, **kwargs: Any) -> Any:
        return call_recurrent(structure, path, fake_layers(structure), args, kwargs)

    return fake


FAMILIES = (
    RecurrentFamily(
        nn.LSTM,
        ObservedLSTM,
        ConvertedLSTM,
        fake_sequence,
        torch.ao.nn.quantizable.LSTM,
        torch.ao.nn.quantized.LSTM,
    ),
    RecurrentFamily(nn.GRU, ObservedGRU, ConvertedGRU, fake_sequence),
    RecurrentFamily(nn.RNN, ObservedRNN, ConvertedRNN, fake_sequence),
    RecurrentFamily(
        nn.LSTMCell, ObservedLSTMCell, ConvertedLSTMCell, fake_cell, torch.ao.nn.quantizable.LSTMCell
    ),
    RecurrentFamily(nn.GRUCell, ObservedGRUCell, ConvertedGRUCell, fake_cell),
    RecurrentFamily(nn.RNNCell, ObservedRNNCell, ConvertedRNNCell, fake_cell),
)


def family_of(module: object) -> RecurrentFamily | None:
    """The family of a float module; None if it is not recurrent."""
    return next((family for family in FAMILIES if isinstance(module, family.float_class)), None)
