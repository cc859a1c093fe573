"""PackedSequence: one direction over rows packed by time step, as torch.nn runs it.

Step t holds ``batch_sizes[t]`` rows, the longest sequences first; sizes never grow. Forward, sequences leave
when they end; backward, they join where they end, each with its own initial state.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["run_packed_direction"]

State = tuple[Tensor, ...]
Cell = Callable[..., State]


def run_packed_direction(
    cell: Cell, rows: Tensor, state: State, batch_sizes: list[int], *, backward: bool
) -> tuple[Tensor, State]:
    """``rows`` (sum of batch_sizes, I) -> (sum of batch_sizes, P) and the last state of every sequence."""
    steps = list(torch.split(rows, batch_sizes))
    outputs = []
    for step in reversed(steps) if backward else steps:
        size = step.shape[0]
        new = cell(step, *(each[:size] for each in state))
        outputs.append(new[0])
        state = tuple(torch.cat([now, each[size:]]) for now, each in zip(new, state, strict=True))
    if backward:
        outputs.reverse()
    return torch.cat(outputs), state
