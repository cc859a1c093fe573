"""``torch.ao.nn.quantizable``: observed modules for a float-to-observed mapping."""

from torchq_compat.modules.attention import ObservedMultiheadAttention as MultiheadAttention
from torchq_compat.recurrent.families import ObservedGRU as GRU
from torchq_compat.recurrent.families import ObservedGRUCell as GRUCell
from torchq_compat.recurrent.families import ObservedLSTM as LSTM
from torchq_compat.recurrent.families import ObservedLSTMCell as LSTMCell
from torchq_compat.recurrent.families import ObservedRNN as RNN
from torchq_compat.recurrent.families import ObservedRNNCell as RNNCell

__all__ = ["GRU", "LSTM", "RNN", "GRUCell", "LSTMCell", "MultiheadAttention", "RNNCell"]
