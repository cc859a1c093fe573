"""``torch.ao.nn.quantized``: converted modules for an observed-to-quantized mapping."""

from torchq_compat.modules.attention import ConvertedMultiheadAttention as MultiheadAttention
from torchq_compat.recurrent.families import ConvertedGRU as GRU
from torchq_compat.recurrent.families import ConvertedGRUCell as GRUCell
from torchq_compat.recurrent.families import ConvertedLSTM as LSTM
from torchq_compat.recurrent.families import ConvertedLSTMCell as LSTMCell
from torchq_compat.recurrent.families import ConvertedRNN as RNN
from torchq_compat.recurrent.families import ConvertedRNNCell as RNNCell

__all__ = ["GRU", "LSTM", "RNN", "GRUCell", "LSTMCell", "MultiheadAttention", "RNNCell"]
