"""RNN and RNNCell, with tanh or ReLU, observed and converted. Legacy has neither."""

from __future__ import annotations

from torchq_compat.custom_modules.recurrent.loop import ConvertedLoop, ObservedLoop
from torchq_compat.custom_modules.recurrent.single_cell import ConvertedCell, ObservedCell

__all__ = ["ConvertedRNN", "ConvertedRNNCell", "ObservedRNN", "ObservedRNNCell"]


class ObservedRNN(ObservedLoop):
    """An RNN whose parts are observed, or fake-quantized, one by one."""


class ConvertedRNN(ConvertedLoop):
    """An RNN of q-dq cells with folded integer weights."""

    observed = ObservedRNN


class ObservedRNNCell(ObservedCell):
    """An RNNCell whose parts are observed, or fake-quantized, one by one."""


class ConvertedRNNCell(ConvertedCell):
    """A q-dq RNNCell with folded integer weights."""

    observed = ObservedRNNCell
