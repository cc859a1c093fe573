"""Float LSTMs of trial runs, computed without the copy of their weights that oneDNN packs at each call."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode

from torchq_compat.read.qdq import LARGE

LSTM = torch.ops.aten.lstm.input


def without_packing(*models: nn.Module) -> AbstractContextManager[Any]:
    """Compute LSTMs without oneDNN while the context is active, if ``models`` have large ones."""
    return WithoutOneDNN() if any(map(_has_large_lstm, models)) else nullcontext()


def _has_large_lstm(model: nn.Module) -> bool:
    if not any(parameter.numel() > LARGE for parameter in model.parameters()):
        return False
    return any(
        isinstance(module, nn.LSTM)
        or (isinstance(module, GraphModule) and module.graph.find_nodes(op="call_function", target=LSTM))
        for module in model.modules()
    )


class WithoutOneDNN(TorchFunctionMode):
    """Computes LSTMs by torch's own kernel; for threads that run alone, because torch's switch is for all."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_lstm = func in (torch.lstm, LSTM)
        with torch.backends.mkldnn.flags(enabled=False) if is_lstm else nullcontext():
            return func(*args, **(kwargs or {}))
