"""``torch.ao.nn.quantized``: converted modules for an observed-to-quantized mapping."""

from torchq_compat.modules.attention import ConvertedMultiheadAttention
from torchq_compat.recurrent.families import (
    ConvertedGRU,
    ConvertedGRUCell,
    ConvertedLSTM,
    ConvertedLSTMCell,
    ConvertedRNN,
    ConvertedRNNCell,
)

__all__ = ["GRU", "LSTM", "RNN", "GRUCell", "LSTMCell", "MultiheadAttention", "RNNCell"]


GRU = ConvertedGRU
GRUCell = ConvertedGRUCell
LSTM = ConvertedLSTM
LSTMCell = ConvertedLSTMCell
RNN = ConvertedRNN
RNNCell = ConvertedRNNCell
MultiheadAttention = ConvertedMultiheadAttention
