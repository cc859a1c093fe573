"""GRU and GRUCell, observed and converted. Legacy has neither."""

from __future__ import annotations

from torchq_compat.custom_modules.recurrent.loop import ConvertedLoop, ObservedLoop
from torchq_compat.custom_modules.recurrent.single_cell import ConvertedCell, ObservedCell

__all__ = ["ConvertedGRU", "ConvertedGRUCell", "ObservedGRU", "ObservedGRUCell"]


class ObservedGRU(ObservedLoop):
    """A GRU whose parts are observed, or fake-quantized, one by one."""


class ConvertedGRU(ConvertedLoop):
    """A GRU of q-dq cells with folded integer weights."""

    observed = ObservedGRU


class ObservedGRUCell(ObservedCell):
    """A GRUCell whose parts are observed, or fake-quantized, one by one."""


class ConvertedGRUCell(ConvertedCell):
    """A q-dq GRUCell with folded integer weights."""

    observed = ObservedGRUCell
