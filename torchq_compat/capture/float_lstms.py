"""Float LSTMs of trial runs, computed without the copy of their weights that oneDNN packs at each call."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from torchq_compat.read.qdq import LARGE

LSTM = torch.ops.aten.lstm.input


def without_packing(*models: nn.Module) -> AbstractContextManager[Any]:
    """Compute LSTMs step by step while the context is active, if ``models`` have large ones."""
    return StepByStep() if any(map(_has_large_lstm, models)) else nullcontext()


def _has_large_lstm(model: nn.Module) -> bool:
    if not any(parameter.numel() > LARGE for parameter in model.parameters()):
        return False
    return any(
        isinstance(module, nn.LSTM)
        or (isinstance(module, GraphModule) and module.graph.find_nodes(op="call_function", target=LSTM))
        for module in model.modules()
    )


class StepByStep(TorchFunctionMode):
    """Computes LSTMs step by step; with dropout or projections, packed or elsewhere than on the CPU, torch
    does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.lstm, LSTM) and not kwargs and _is_packed_by_onednn(*args):
            return _layer_by_layer(*args)
        return func(*args, **(kwargs or {}))


def _is_packed_by_onednn(x: Tensor, states: Any, *settings: Any) -> bool:
    if isinstance(states, Tensor):
        return False  # The sizes of packed sequences.
    _, _, _, dropout, is_training, *_ = settings
    is_plain = x.device.type == "cpu" and x.dtype is torch.float32 and not torch.is_autocast_enabled("cpu")
    return is_plain and states[0].shape == states[1].shape and not (dropout and is_training)


def _layer_by_layer(
    x: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    layers: int,
    _dropout: float,
    _is_training: bool,
    is_bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what ``torch.lstm`` does: the output and the last states."""
    each = 4 if has_biases else 2
    cells = [weights[start : start + each] for start in range(0, len(weights), each)]
    directions = 2 if is_bidirectional else 1
    last: list[tuple[Tensor, Tensor]] = []
    x = x.transpose(0, 1) if batch_first else x
    for _ in range(layers):
        outputs = []
        for backward in (False, True)[:directions]:
            index = len(last)
            output, state = _direction(x, (states[0][index], states[1][index]), cells[index], backward)
            outputs.append(output)
            last.append(state)
        x = torch.cat(outputs, -1)
    hidden, cell = map(torch.stack, zip(*last, strict=True))
    return x.transpose(0, 1) if batch_first else x, hidden, cell


def _direction(
    x: Tensor, state: tuple[Tensor, Tensor], weights: Sequence[Tensor], backward: bool
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    of_input, of_hidden, *biases = weights
    bias, hidden_bias = biases or (None, None)
    projected = functional.linear(x, of_input, bias).unbind(0)
    hidden, cell = state
    outputs = []
    for row in reversed(projected) if backward else projected:
        gates = row + functional.linear(hidden, of_hidden, hidden_bias)
        i, f, g, o = gates.chunk(4, -1)
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        hidden = o.sigmoid() * cell.tanh()
        outputs.append(hidden)
    return torch.stack(outputs[::-1] if backward else outputs), (hidden, cell)
