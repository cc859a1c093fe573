"""A streaming model as ``export`` traces it: with its states as buffers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchq_compat.custom_modules.recurrent.modules.streams import CallKey, Streams

__all__ = ["StreamProgram"]


class StreamProgram(nn.Module):
    """A q-dq graph that writes its states back into buffers.

    Args:
        graph: the module to export.
        model: the model that ``graph`` was made from, in eager mode.
        streams: the calls that keep their state.
        args: example arguments, in the batch size to export.
    """

    def __init__(self, graph: nn.Module, model: nn.Module, streams: Streams, args: tuple[Any, ...]) -> None:
        super().__init__()
        # A GraphModule cannot have a submodule named ``graph``, and the exported program is one.
        self.computation = graph
        first = Streams(streams.kept)
        with torch.no_grad(), first.active():
            model(*args)
        self._names: dict[CallKey, tuple[str, ...]] = {}
        for index, (key, states) in enumerate(sorted(first.initial.items())):
            self._names[key] = tuple(f"state_{index}_{position}" for position in range(len(states)))
            for name, state in zip(self._names[key], states, strict=True):
                self.register_buffer(name, state.detach().clone())

    def forward(self, *args: Any) -> Any:
        states: dict[CallKey, tuple[Tensor, ...]] = {
            key: tuple(getattr(self, name) for name in names) for key, names in self._names.items()
        }
        with Streams(frozenset(states), states, buffers=True).active():
            return self.computation(*args)
