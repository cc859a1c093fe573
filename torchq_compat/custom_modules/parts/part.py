"""A part: one op inside a custom module that is observed on its own."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn

__all__ = ["ObservedValue", "Part", "PartKind"]


class PartKind(Enum):
    """The operation of a part, which decides its default observer and its pattern in a BackendConfig."""

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
        kind: the operation; decides the default observer.
        group: the group whose constructor makes its output observer.
        formula: what it computes, for messages.
        input_group: the group whose constructor, if given, observes its input separately from the producer's
            output.
        covers: the gates it computes at once; with split gates, each gate has its own part.
    """

    name: str
    kind: PartKind
    group: str
    formula: str
    input_group: str | None = None
    covers: tuple[str, ...] = ()


class ObservedValue(nn.Module):
    """A part of kind ``PartKind.IDENTITY``: gives its input a node of its own, which can be observed."""

    def forward(self, x: Tensor) -> Tensor:
        alias: Tensor = torch.ops.aten.alias.default(x)
        return alias
