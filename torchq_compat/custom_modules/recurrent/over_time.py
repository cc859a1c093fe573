"""One direction over time: a loop in Python, a ``scan``, or rows packed by time step.

A step is called with its own inputs and the states: ``step(*inputs, *states)``. It returns the new states;
the first is the hidden state, which is the output of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchq_compat.support.upstream import scan

__all__ = [
    "State",
    "Step",
    "masked_step",
    "project_as_given",
    "run_looped_direction",
    "run_packed_direction",
    "run_rolled_direction",
    "scan_steps",
]

State = tuple[Tensor, ...]
Step = Callable[..., State]
SCAN = torch.ops.higher_order.scan


def project_as_given(
    project: Callable[[Tensor], tuple[Tensor, ...]], x: Tensor, *, batch_first: bool
) -> tuple[Tensor, ...]:
    """Return ``project(x)`` for ``x`` (T, B, I), computed in the caller's layout: (B, T, I) with
    ``batch_first``. A linear would copy the transposed view, and backends match a linear only directly after
    a dequantize."""
    if not batch_first or x.dim() != 3:
        return project(x)
    return tuple(each.transpose(0, 1) for each in project(x.transpose(0, 1)))


def masked_step(step: Step, weights: int, states: int) -> Step:
    """Return ``step`` with one more argument, a mask (B,), after its first ``weights`` arguments; the states,
    its last ``states`` arguments, are kept where the mask is false."""

    def masked(*flat: Tensor) -> State:
        mask, rest = flat[weights], flat[weights + 1 :]
        new = step(*flat[:weights], *rest)
        return tuple(
            torch.where(mask[:, None], *pair) for pair in zip(new, rest[len(rest) - states :], strict=True)
        )

    return masked


def run_looped_direction(
    step: Step, inputs: tuple[Tensor, ...], state: State, *, backward: bool
) -> tuple[Tensor, State]:
    """Run ``step`` in a Python loop: ``inputs`` (T, B, width) each, states (B, width) -> (T, B, P) and the
    last states."""
    steps = list(zip(*(each.unbind(0) for each in inputs), strict=True))
    outputs = []
    for at_time in reversed(steps) if backward else steps:
        state = tuple(step(*at_time, *state))
        outputs.append(state[0])
    if backward:
        outputs.reverse()
    return torch.stack(outputs), state


def scan_steps(
    body: Callable[..., Sequence[Tensor]],
    states: Sequence[Tensor],
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    """Run ``body(*states, *parts, *weights)`` over the first dimension of ``xs`` as a ``scan``, which
    torch.export traces.

    The operator is called directly and not through its front, which would first compile each body to find the
    weights it reads. Dynamo does so anyway, and accepts only the front.

    Args:
        body: returns the new states, then its other values.

    Returns:
        The last states, then the stacked values.
    """
    if not torch.compiler.is_dynamo_compiling():
        return tuple(SCAN(body, list(states), list(xs), tuple(weights)))
    count = len(states)

    def combine(carried: list[Tensor], parts: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        results = list(body(*carried, *parts, *weights))
        return results[:count], results[count:]

    last, stacked = scan(combine, list(states), list(xs))
    return (*last, *stacked)


def run_rolled_direction(
    step: Step, weights: tuple[Tensor, ...], inputs: tuple[Tensor, ...], state: State, *, backward: bool
) -> tuple[Tensor, State]:
    """Run ``step(*weights, *inputs, *states)`` as a ``scan``, which torch.export captures at any length, with
    the same bits as ``run_looped_direction``."""

    def body(*flat: Tensor) -> list[Tensor]:
        states, rest = flat[: len(state)], flat[len(state) :]
        new = step(*rest[len(inputs) :], *rest[: len(inputs)], *states)
        # scan refuses a result that is the carried tensor itself.
        return [*new, new[0].clone()]

    xs = [each.flip([0]) for each in inputs] if backward else list(inputs)
    *last, outputs = scan_steps(body, state, xs, weights)
    return (outputs.flip([0]) if backward else outputs), tuple(last)


def run_packed_direction(
    step: Step, inputs: tuple[Tensor, ...], state: State, batch_sizes: list[int], *, backward: bool
) -> tuple[Tensor, State]:
    """Run ``step`` over the rows of a PackedSequence, as torch.nn does: ``inputs`` (sum of batch_sizes,
    width) each -> (sum of batch_sizes, P) and the last state of every sequence.

    Step t has ``batch_sizes[t]`` rows, the longest sequences first; batch sizes never grow. Forward, a
    sequence leaves the batch at its end; backward, it joins there with its own initial state.
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
