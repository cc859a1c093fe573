"""The facts of both sides about a model: the places where values can be read, and their qparams."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from torchq_compat.qspecs.qparams import QParams

__all__ = ["Key", "OpKey", "PartKey", "QuantizedModel", "Reading", "ResultKey"]


class OpKey(NamedTuple):
    """Call number ``call`` of the module at ``path`` (``function`` is empty) or of a function in its code."""

    path: str
    function: str
    call: int


class ResultKey(NamedTuple):
    """Flat result ``position`` of the first call of the custom module at ``path``."""

    path: str
    position: int


class PartKey(NamedTuple):
    """A part of the cell at ``cell``."""

    cell: str
    part: str


Key = OpKey | ResultKey | PartKey


@dataclass(frozen=True)
class Reading:
    """The value at a place in one run, dequantized, and its qparams, None if it is float."""

    value: Tensor
    qparams: QParams | None


@dataclass(frozen=True)
class QuantizedModel:
    """One side, ready to run.

    Attributes:
        run: calls the model and returns its result, and the readings at every place.
        output_qparams: returns the qparams of each tensor of a result; None for a float tensor.
        deployed: the model that the script would ship, for size and latency; None if it could not be made.
    """

    run: Callable[[tuple[Any, ...]], tuple[Any, Mapping[Key, Reading]]]
    output_qparams: Callable[[Any], tuple[QParams | None, ...]]
    deployed: nn.Module | None
    deployed_error: str = ""
