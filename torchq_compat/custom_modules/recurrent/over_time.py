"""One direction over time: a loop in Python, a ``scan``, or rows packed by time step.

A step is called with what all steps have of their own, and the states: ``step(*inputs, *states)``; it gives
the new states, the hidden state first, which is the step's output.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan

__all__ = ["State", "Step", "run_looped_direction", "run_packed_direction", "run_rolled_direction"]

State = tuple[Tensor, ...]
Step = Callable[..., State]


def run_looped_direction(
    step: Step, inputs: tuple[Tensor, ...], state: State, *, backward: bool
) -> tuple[Tensor, State]:
    """``inputs`` (T, B, width) each, states (B, width) -> (T, B, P) and the last states."""
    steps = list(zip(*(each.unbind(0) for each in inputs), strict=True))
    outputs = []
    for at_time in reversed(steps) if backward else steps:
        state = tuple(step(*at_time, *state))
        outputs.append(state[0])
    if backward:
        outputs.reverse()
    return torch.stack(outputs), state


def run_rolled_direction(
    step: Step, inputs: tuple[Tensor, ...], state: State, *, backward: bool
) -> tuple[Tensor, State]:
    """The same, bit for bit, as a ``scan``: how torch.export sees it, at any length."""

    def body(carried: State, at_time: tuple[Tensor, ...]) -> tuple[State, Tensor]:
        new = tuple(step(*at_time, *carried))
        # scan refuses a result that is the carried tensor itself.
        return new, new[0].clone()

    last, outputs = scan(body, state, inputs, dim=0, reverse=backward)
    return outputs, last


def run_packed_direction(
    step: Step, inputs: tuple[Tensor, ...], state: State, batch_sizes: list[int], *, backward: bool
) -> tuple[Tensor, State]:
    """``inputs`` (sum of batch_sizes, width) each -> (sum of batch_sizes, P) and the last state of every
    sequence, as torch.nn runs a PackedSequence.

    Step t holds ``batch_sizes[t]`` rows, the longest sequences first; sizes never grow. Forward, sequences
    leave when they end; backward, they join where they end, each with its own initial state.
    """
    steps = list(zip(batch_sizes, *(torch.split(each, batch_sizes) for each in inputs), strict=True))
    outputs = []
    for size, *at_time in reversed(steps) if backward else steps:
        new = step(*at_time, *(each[:size] for each in state))
        outputs.append(new[0])
        state = tuple(torch.cat([now, each[size:]]) for now, each in zip(new, state, strict=True))
    if backward:
        outputs.reverse()
    return torch.cat(outputs), state
