"""Records the arguments of custom modules while the float model runs on the example inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from torchq_compat.opaque_calls.layouts import Structure

__all__ = ["RecordedCalls"]


@dataclass
class RecordedCalls:
    """The tensor arguments of recorded calls.

    Attributes:
        tensors: the tensors of each call, by handle, in the order of the calls.
    """

    tensors: dict[str, list[list[Tensor]]] = field(default_factory=dict)

    @contextmanager
    def recording(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Record the tensors that ``modules``, by handle, are called with while the context is active."""

        def keep(handle: str) -> Callable[..., None]:
            def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
                _, tensors = Structure.take_apart((args, kwargs))
                self.tensors.setdefault(handle, []).append([tensor.detach().clone() for tensor in tensors])

            return hook

        hooks = [
            module.register_forward_pre_hook(keep(handle), with_kwargs=True)
            for handle, module in modules.items()
            if not isinstance(module, torch.jit.ScriptModule)  # It takes no hooks.
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
