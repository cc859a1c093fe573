"""``torch.ao.nn.quantized``: converted modules to name in an observed-to-quantized mapping."""

from torchq_compat.custom_modules.recurrent.lstm import ConvertedLSTM as LSTM

__all__ = ["LSTM"]
