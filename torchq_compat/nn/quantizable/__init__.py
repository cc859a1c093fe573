"""``torch.ao.nn.quantizable``: observed modules to name in a float-to-observed mapping."""

from torchq_compat.custom_modules.attention.module import ObservedMultiheadAttention
from torchq_compat.custom_modules.recurrent.gru import ObservedGRU, ObservedGRUCell
from torchq_compat.custom_modules.recurrent.lstm import ObservedLSTM, ObservedLSTMCell
from torchq_compat.custom_modules.recurrent.rnn import ObservedRNN, ObservedRNNCell

GRU = ObservedGRU
GRUCell = ObservedGRUCell
LSTM = ObservedLSTM
LSTMCell = ObservedLSTMCell
RNN = ObservedRNN
RNNCell = ObservedRNNCell
MultiheadAttention = ObservedMultiheadAttention

__all__ = ["GRU", "LSTM", "RNN", "GRUCell", "LSTMCell", "MultiheadAttention", "RNNCell"]
