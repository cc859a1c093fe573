"""Recurrent modules whose parts are observed one by one: LSTM, GRU, RNN and their cells.

Legacy: ``torch.ao.quantization.fx.lstm_utils`` has this for LSTM only; ``torchq_compat.lstm_utils`` keeps its
signatures. The parts of every kind of cell are listed in ``recurrent.cells``.

New: functions for torchao Quantizers, which quantize the recurrent operators of an exported program whole, or
decompose them.
"""

from torchq_compat.recurrent.exported_lstm.decompose import (
    convert_decomposed_lstm,
    decompose_recurrent,
    prepare_decomposed_lstm,
)
from torchq_compat.recurrent.exported_lstm.whole_op import whole_op_recurrent_quantizer
from torchq_compat.recurrent.families import get_individually_observed_parts

__all__ = [
    "convert_decomposed_recurrent",
    "decompose_recurrent",
    "get_individually_observed_parts",
    "prepare_decomposed_recurrent",
    "whole_op_recurrent_quantizer",
]


#: The functions of ``lstm_utils``, which accept any decomposed recurrent operator, under general names.
prepare_decomposed_recurrent = prepare_decomposed_lstm
convert_decomposed_recurrent = convert_decomposed_lstm
