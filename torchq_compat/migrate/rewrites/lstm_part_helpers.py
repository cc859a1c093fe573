"""Private helpers of ``torch.ao.quantization.fx.lstm_utils`` -> public ones of ``torchq_compat.lstm_utils``."""

from __future__ import annotations

from torchq_compat.migrate.legacy_names import MOVED_FUNCTIONS
from torchq_compat.migrate.moved_names import MovedNames
from torchq_compat.migrate.rewrites.rewrite import Rewrite

__all__ = ["REWRITE"]

ROWS = tuple(row for row in MOVED_FUNCTIONS if row.replacement == "torchq_compat.lstm_utils")

REWRITE = Rewrite(
    "lstm-part-helpers",
    "TQ102",
    "_get_lstm_with_individually_observed_parts and its kin get their public names",
    MovedNames("TQ102", ROWS).find,
)
