"""PackedSequence: one direction over rows packed by time step, as torch.nn.LSTM runs it.

Step t holds ``batch_sizes[t]`` rows, the longest sequences first; sizes never grow. Forward, sequences leave
when they end; backward, they join where they end, each with its own initial state.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["run_packed_direction"]

State = tuple[Tensor, Tensor]
Cell = Callable[[Tensor, Tensor, Tensor], State]


def run_packed_direction(
    cell: Cell, rows: Tensor, state: State, batch_sizes: list[int], *, backward: bool
) -> tuple[Tensor, State]:
    """``rows`` (sum of batch_sizes, I) -> (sum of batch_sizes, P) and the last state of every sequence."""
    steps = list(torch.split(rows, batch_sizes))
    h_all, c_all = state
    outputs = []
    for step in reversed(steps) if backward else steps:
        size = step.shape[0]
        h, c = cell(step, h_all[:size], c_all[:size])
        outputs.append(h)
        h_all, c_all = torch.cat([h, h_all[size:]]), torch.cat([c, c_all[size:]])
    if backward:
        outputs.reverse()
    return torch.cat(outputs), (h_all, c_all)
