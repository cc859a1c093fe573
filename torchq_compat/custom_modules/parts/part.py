"""A part: one op inside a custom module that is observed on its own."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Part", "PartKind"]


class PartKind(Enum):
    """The operation of a part: decides its default observer and its row in a BackendConfig."""

    LINEAR = "linear"
    ADD = "add"
    MUL = "mul"
    SIGMOID = "sigmoid"
    TANH = "tanh"
    RELU = "relu"
    COMPLEMENT = "complement"
    IDENTITY = "identity"


@dataclass(frozen=True)
class Part:
    """One op of a cell.

    Attributes:
        name: path of the op inside the module that is exported.
        kind: what the op is; decides its default observer.
        group: the constructor its output observer comes from.
        formula: what it computes, for people.
        input_group: the constructor that observes its input apart from the producer's output, if given.
        covers: the gates it computes at once, each of which is a part of its own when gates are split.
    """

    name: str
    kind: PartKind
    group: str
    formula: str
    input_group: str | None = None
    covers: tuple[str, ...] = ()
