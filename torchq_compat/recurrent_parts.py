"""Recurrent modules whose parts are observed one by one: LSTM, GRU, RNN and their cells.

Legacy: ``torch.ao.quantization.fx.lstm_utils`` has this for LSTM only; ``torchq_compat.lstm_utils`` keeps its
signatures. The parts of every kind of cell are listed in ``recurrent.cells``. What quantizes the recurrent
operators of an exported program is in ``torchq_compat.pt2e``.
"""

from torchq_compat.recurrent.families import get_individually_observed_parts

__all__ = ["get_individually_observed_parts"]
