"""Several models as one, so that they are captured and prepared at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch.fx
from torch import Tensor, nn

__all__ = ["Branches", "side_by_side"]


class Branches(nn.Module):
    """Models side by side, each with an input and a result of its own."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, inputs: list[Tensor]) -> list[Tensor]:
        return [model(x) for model, x in zip(self.models, inputs, strict=True)]


def side_by_side(models: Sequence[nn.Module], inputs: Sequence[Sequence[int]]) -> torch.fx.GraphModule:
    """Return a model that returns the results of all ``models``, which are at "0", "1", ...

    ``inputs`` are the indexes of what each is given. An input that several are given has one observer: they
    must not ask for different ones, nor replace it, as a concatenation does. Sizes of further inputs make the
    capture slower.
    """
    graph = torch.fx.Graph()
    given = [graph.placeholder(f"x_{index}") for index in range(1 + max(map(max, inputs)))]
    calls = [[given[index] for index in indexes] for indexes in inputs]
    graph.output([graph.call_module(str(i), tuple(args)) for i, args in enumerate(calls)])
    return torch.fx.GraphModule(nn.ModuleList(models), graph)
