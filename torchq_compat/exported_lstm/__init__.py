"""An exported LSTM decomposed: ``aten.lstm.input`` as linears that any quantizer can annotate."""

from torchq_compat.exported_lstm.decompose import decompose_lstm
from torchq_compat.exported_lstm.quantize import convert_decomposed_lstm, prepare_decomposed_lstm

__all__ = ["convert_decomposed_lstm", "decompose_lstm", "prepare_decomposed_lstm"]
