"""``torch.ao.nn.quantizable``: observed modules for a float-to-observed mapping."""

from torchq_compat.modules.attention import ObservedMultiheadAttention
from torchq_compat.recurrent.families import (
    ObservedGRU,
    ObservedGRUCell,
    ObservedLSTM,
    ObservedLSTMCell,
    ObservedRNN,
    ObservedRNNCell,
)

__all__ = ["GRU", "LSTM", "RNN", "GRUCell", "LSTMCell", "MultiheadAttention", "RNNCell"]


GRU = ObservedGRU
GRUCell = ObservedGRUCell
LSTM = ObservedLSTM
LSTMCell = ObservedLSTMCell
RNN = ObservedRNN
RNNCell = ObservedRNNCell
MultiheadAttention = ObservedMultiheadAttention
