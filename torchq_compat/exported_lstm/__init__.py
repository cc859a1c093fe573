"""Exported recurrent operators, ``aten.lstm.input`` and related, decomposed for any torchao Quantizer."""

from torchq_compat.exported_lstm.decompose import decompose_lstm, decompose_recurrent
from torchq_compat.exported_lstm.quantize import convert_decomposed_lstm, prepare_decomposed_lstm

__all__ = [
    "convert_decomposed_lstm",
    "decompose_lstm",
    "decompose_recurrent",
    "prepare_decomposed_lstm",
]
