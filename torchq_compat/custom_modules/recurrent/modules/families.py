"""The one table of torch.nn's recurrent modules and the observed and converted class of each.

Legacy: ``torch.ao.nn.quantizable.LSTM`` and ``LSTMCell`` (observed; FX cannot map the cell, whose result is a
tuple) and ``torch.ao.nn.quantized.LSTM`` (converted). Our classes derive from them. GRU and RNN are new.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from torchq_compat.custom_modules.recurrent.modules.contracts import contract_of
from torchq_compat.custom_modules.recurrent.modules.recurrent_module import (
    ConvertedRecurrent,
    ObservedRecurrent,
)
from torchq_compat.opaque_calls.capture_stub import FakeCall
from torchq_compat.support.torch_ao import quantizable, quantized

__all__ = [
    "FAMILIES",
    "ConvertedGRU",
    "ConvertedGRUCell",
    "ConvertedLSTM",
    "ConvertedLSTMCell",
    "ConvertedRNN",
    "ConvertedRNNCell",
    "ObservedGRU",
    "ObservedGRUCell",
    "ObservedLSTM",
    "ObservedLSTMCell",
    "ObservedRNN",
    "ObservedRNNCell",
    "RecurrentFamily",
    "fake_call",
    "family_of",
]

#: Ends the names of constructor arguments, after the group of parts.
SUFFIX = "_obs_ctr"


class ObservedLSTM(ObservedRecurrent, quantizable.LSTM):
    """An LSTM whose parts are observed, or fake-quantized, one by one."""

    float_class = nn.LSTM

    def _get_name(self) -> str:
        return "QuantizableLSTM"


class ConvertedLSTM(ConvertedRecurrent, quantized.LSTM):
    """An LSTM of q-dq cells with folded integer weights."""

    observed = ObservedLSTM

    def _get_name(self) -> str:
        return "QuantizedLSTM"


class ObservedLSTMCell(ObservedRecurrent, quantizable.LSTMCell):
    """An LSTMCell whose parts are observed, or fake-quantized, one by one."""

    float_class = nn.LSTMCell


class ConvertedLSTMCell(ConvertedRecurrent):
    """A q-dq LSTMCell with folded integer weights."""

    observed = ObservedLSTMCell


class ObservedGRU(ObservedRecurrent):
    """A GRU whose parts are observed, or fake-quantized, one by one."""

    float_class = nn.GRU


class ConvertedGRU(ConvertedRecurrent):
    """A GRU of q-dq cells with folded integer weights."""

    observed = ObservedGRU


class ObservedGRUCell(ObservedRecurrent):
    """A GRUCell whose parts are observed, or fake-quantized, one by one."""

    float_class = nn.GRUCell


class ConvertedGRUCell(ConvertedRecurrent):
    """A q-dq GRUCell with folded integer weights."""

    observed = ObservedGRUCell


class ObservedRNN(ObservedRecurrent):
    """An RNN, with tanh or ReLU, whose parts are observed, or fake-quantized, one by one."""

    float_class = nn.RNN


class ConvertedRNN(ConvertedRecurrent):
    """An RNN of q-dq cells with folded integer weights."""

    observed = ObservedRNN


class ObservedRNNCell(ObservedRecurrent):
    """An RNNCell whose parts are observed, or fake-quantized, one by one."""

    float_class = nn.RNNCell


class ConvertedRNNCell(ConvertedRecurrent):
    """A q-dq RNNCell with folded integer weights."""

    observed = ObservedRNNCell


@dataclass(frozen=True)
class RecurrentFamily:
    """A float class of torch.nn, its observed class and its converted class.

    Attributes:
        observed: the class that replaces it in a prepared model.
        converted: the class that replaces it in a converted model.
        legacy_observed: the class of torch.ao that scripts map it to, if there is one.
        legacy_converted: the class of torch.ao that it is converted to, if there is one.
    """

    observed: type[ObservedRecurrent]
    converted: type[ConvertedRecurrent]
    legacy_observed: type[nn.Module] | None = None
    legacy_converted: type[nn.Module] | None = None

    @property
    def float_class(self) -> type[nn.Module]:
        """The class of torch.nn."""
        return self.observed.float_class

    @property
    def map_to(self) -> str:
        """The name of the class to map the float class to, for messages."""
        name = self.float_class.__name__
        if self.legacy_observed is not None:
            return f"torch.ao.nn.quantizable.{name}"
        return f"torchq_compat.nn.quantizable.{name}"


FAMILIES = (
    RecurrentFamily(ObservedLSTM, ConvertedLSTM, quantizable.LSTM, quantized.LSTM),
    RecurrentFamily(ObservedGRU, ConvertedGRU),
    RecurrentFamily(ObservedRNN, ConvertedRNN),
    RecurrentFamily(ObservedLSTMCell, ConvertedLSTMCell, quantizable.LSTMCell),
    RecurrentFamily(ObservedGRUCell, ConvertedGRUCell),
    RecurrentFamily(ObservedRNNCell, ConvertedRNNCell),
)


def family_of(module: object) -> RecurrentFamily | None:
    """Return the family of a float module; None if it is not recurrent."""
    return next((family for family in FAMILIES if isinstance(module, family.float_class)), None)


def fake_call(module: nn.Module, path: str) -> FakeCall:
    """Return a function that computes the shapes of the results of the float recurrent module at ``path``."""
    return contract_of(module).fake_call(path)
