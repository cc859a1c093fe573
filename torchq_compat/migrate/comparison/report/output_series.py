"""One output over time on each side: the channel in which they differ most."""

from __future__ import annotations

import torch
from torch import Tensor

from torchq_compat.migrate.comparison.results import Series

__all__ = ["output_series"]

MAX_POINTS = 400
#: A dimension below it is no time.
SHORT = 4


def output_series(
    name: str, axis: int | None, exact: Tensor, ours: Tensor, fx: Tensor | None
) -> Series | None:
    """Return the values along time, where either side is farthest from float. None: nothing to draw.

    Time is ``axis`` of a tensor of three dimensions. What has no time is not drawn: a line over the places of
    a batch, or over classes, would say nothing.
    """
    if axis is None or exact.dim() != 3 or exact.shape[axis] < SHORT or not exact.is_floating_point():
        return None
    error = (ours - exact).abs() if fx is None else torch.maximum((ours - exact).abs(), (fx - exact).abs())
    rows = error.movedim(axis, 0).reshape(error.shape[axis], -1)
    worst = int(rows.amax(0).argmax())

    def along(value: Tensor) -> tuple[float, ...]:
        line = value.detach().movedim(axis, 0).reshape(value.shape[axis], -1)[:MAX_POINTS, worst]
        return tuple(float(number) for number in line)

    index = torch.unravel_index(torch.tensor(worst), [s for i, s in enumerate(exact.shape) if i != axis])
    where = ", ".join(str(int(number)) for number in index)
    return Series(
        name,
        "time",
        f"At [{where}] of the other dimensions" if where else "",
        along(exact),
        along(ours),
        None if fx is None else along(fx),
    )
