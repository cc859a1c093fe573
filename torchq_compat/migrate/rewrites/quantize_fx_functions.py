"""``torch.ao.quantization.quantize_fx`` -> ``torchq_compat.quantize_fx``: the functions, however imported."""

from __future__ import annotations

from torchq_compat.migrate.legacy_names import MOVED_FUNCTIONS
from torchq_compat.migrate.moved_names import MovedNames
from torchq_compat.migrate.rewrites.rewrite import Rewrite

__all__ = ["REWRITE"]

ROWS = tuple(row for row in MOVED_FUNCTIONS if row.replacement == "torchq_compat.quantize_fx")

REWRITE = Rewrite(
    "quantize-fx-functions",
    "TQ101",
    "prepare_fx, convert_fx and their kin come from torchq_compat.quantize_fx",
    MovedNames("TQ101", ROWS).find,
)
