"""``torch.ao.nn.quantizable``: observed modules to name in a float-to-observed mapping."""

from torchq_compat.custom_modules.recurrent.lstm import ObservedLSTM as LSTM

__all__ = ["LSTM"]
