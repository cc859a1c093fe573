"""``torch.ao.nn.quantizable``: observed modules to name in a float-to-observed mapping."""

from torchq_compat.custom_modules.recurrent.lstm import ObservedLSTM
from torchq_compat.custom_modules.recurrent.single_cell import ObservedLSTMCell

LSTM = ObservedLSTM
LSTMCell = ObservedLSTMCell

__all__ = ["LSTM", "LSTMCell"]
