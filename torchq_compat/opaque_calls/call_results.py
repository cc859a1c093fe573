"""Whether a model returns the very result of an opaque call, not a part of it or what was made from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

__all__ = ["CallResults"]


@dataclass
class CallResults:
    """The results of opaque calls during capture.

    Attributes:
        results: nested as the model gets them.
        returns_whole_result: whether the model returns one of them.
    """

    results: list[Any] = field(default_factory=list)
    returns_whole_result: bool = False

    def watch(self, model: nn.Module) -> RemovableHandle:
        """Note what ``model`` returns while it is captured."""

        def note(_model: nn.Module, _args: Any, result: Any) -> None:
            self.returns_whole_result = any(result is whole for whole in self.results)

        return model.register_forward_hook(note)
