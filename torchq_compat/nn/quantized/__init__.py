"""``torch.ao.nn.quantized``: converted modules for an observed-to-quantized mapping."""

from torchq_compat.custom_modules.attention.module import ConvertedMultiheadAttention
from torchq_compat.custom_modules.recurrent.modules.families import (
    ConvertedGRU,
    ConvertedGRUCell,
    ConvertedLSTM,
    ConvertedLSTMCell,
    ConvertedRNN,
    ConvertedRNNCell,
)

GRU = ConvertedGRU
GRUCell = ConvertedGRUCell
LSTM = ConvertedLSTM
LSTMCell = ConvertedLSTMCell
RNN = ConvertedRNN
RNNCell = ConvertedRNNCell
MultiheadAttention = ConvertedMultiheadAttention

__all__ = ["GRU", "LSTM", "RNN", "GRUCell", "LSTMCell", "MultiheadAttention", "RNNCell"]
