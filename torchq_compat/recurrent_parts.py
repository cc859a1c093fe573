"""Recurrent modules whose parts are observed one by one: LSTM, GRU, RNN and their cells.

Legacy has this for LSTM alone, ``torch.ao.quantization.fx.lstm_utils``; ``torchq_compat.lstm_utils`` keeps
its signatures. The parts of every kind of cell are listed in ``custom_modules.recurrent.cell.cell_parts``.
"""

from torchq_compat.custom_modules.recurrent.modules.observed_parts import get_individually_observed_parts

__all__ = ["get_individually_observed_parts"]
