"""An exported LSTM in pieces: ``aten.lstm.input`` broken up into linears that any quantizer can annotate."""

from torchq_compat.custom_modules.recurrent.pieces.quantize import convert_pieces, prepare_pieces
from torchq_compat.custom_modules.recurrent.pieces.rewrite import break_up_lstm

__all__ = ["break_up_lstm", "convert_pieces", "prepare_pieces"]
