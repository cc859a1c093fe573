"""``torch.ao.nn.quantized``: converted modules to name in an observed-to-quantized mapping."""

from torchq_compat.custom_modules.recurrent.lstm import ConvertedLSTM
from torchq_compat.custom_modules.recurrent.single_cell import ConvertedLSTMCell

LSTM = ConvertedLSTM
LSTMCell = ConvertedLSTMCell

__all__ = ["LSTM", "LSTMCell"]
