"""``torch.ao.nn.quantizable``: observed modules for a float-to-observed mapping."""

from torchq_compat.custom_modules.attention.module import ObservedMultiheadAttention
from torchq_compat.custom_modules.recurrent.modules.families import (
    ObservedGRU,
    ObservedGRUCell,
    ObservedLSTM,
    ObservedLSTMCell,
    ObservedRNN,
    ObservedRNNCell,
)

GRU = ObservedGRU
GRUCell = ObservedGRUCell
LSTM = ObservedLSTM
LSTMCell = ObservedLSTMCell
RNN = ObservedRNN
RNNCell = ObservedRNNCell
MultiheadAttention = ObservedMultiheadAttention

__all__ = ["GRU", "LSTM", "RNN", "GRUCell", "LSTMCell", "MultiheadAttention", "RNNCell"]
