"""A cell over time as a ``scan``: how torch.export sees a converted recurrent module, at any length."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch._higher_order_ops.scan import scan

__all__ = ["run_rolled_direction"]

State = tuple[Tensor, ...]
Cell = Callable[..., State]


def run_rolled_direction(cell: Cell, x: Tensor, state: State, *, backward: bool) -> tuple[Tensor, State]:
    """``x`` (T, B, I), states (B, width) -> (T, B, P) and the last states, bit-equal to the Python loop."""

    def step(carried: State, x_t: Tensor) -> tuple[State, Tensor]:
        new = tuple(cell(x_t, *carried))
        # scan refuses a result that is the carried tensor itself.
        return new, new[0].clone()

    last, outputs = scan(step, state, x, dim=0, reverse=backward)
    return outputs, last
