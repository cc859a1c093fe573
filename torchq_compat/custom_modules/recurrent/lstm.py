"""LSTM and LSTMCell, observed and converted.

Legacy: ``torch.ao.nn.quantizable.LSTM`` and ``LSTMCell`` (observed; FX cannot map the cell, whose result is a
tuple) and ``torch.ao.nn.quantized.LSTM`` (converted). The classes here pass for them.
"""

from __future__ import annotations

import torch

from torchq_compat.custom_modules.recurrent.loop import ConvertedLoop, ObservedLoop
from torchq_compat.custom_modules.recurrent.single_cell import ConvertedCell, ObservedCell

__all__ = ["ConvertedLSTM", "ConvertedLSTMCell", "ObservedLSTM", "ObservedLSTMCell"]


class ObservedLSTM(ObservedLoop, torch.ao.nn.quantizable.LSTM):
    """An LSTM whose parts are observed, or fake-quantized, one by one."""

    def _get_name(self) -> str:
        return "QuantizableLSTM"


class ConvertedLSTM(ConvertedLoop, torch.ao.nn.quantized.LSTM):
    """An LSTM of q-dq cells with folded integer weights."""

    observed = ObservedLSTM

    def _get_name(self) -> str:
        return "QuantizedLSTM"


class ObservedLSTMCell(ObservedCell, torch.ao.nn.quantizable.LSTMCell):
    """An LSTMCell whose parts are observed, or fake-quantized, one by one."""


class ConvertedLSTMCell(ConvertedCell):
    """A q-dq LSTMCell with folded integer weights."""

    observed = ObservedLSTMCell
