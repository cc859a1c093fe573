"""On which grids the columns of a cell's input lie: what the cell loop has to know to read it as integers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from torchq_compat.custom_modules.recurrent.native.program import grid_row
from torchq_compat.opaque_calls.layouts import CallLayout
from torchq_compat.qspecs.qparams import Grid, PerChannelGrid, PerTensorGrid

__all__ = ["ColumnGrids", "as_numbers", "column_grids", "grids_of_call"]

#: (columns, their grid or None) from the first column to the last.
ColumnGrids = tuple[tuple[int, PerTensorGrid | None], ...]

KERNEL_DTYPES = (torch.uint8, torch.int8)


def column_grids(grid: Grid | None, width: int, rank: int) -> ColumnGrids:
    """Of a tensor of ``rank`` dimensions, the last of size ``width``, on ``grid``."""
    if isinstance(grid, PerChannelGrid):
        return grid.runs if grid.axis == rank - 1 else ((width, None),)
    return ((width, grid),)


def grids_of_call(layout: CallLayout) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, with the grid of every tensor, or None, in its place."""
    grids = layout.input_grids or (None,) * layout.inputs.count()
    nested: tuple[tuple[Any, ...], dict[str, Any]] = layout.inputs.put_together(grids, itertools.repeat(None))
    return nested


def as_numbers(columns: Sequence[tuple[int, PerTensorGrid | None]]) -> list[float]:
    """``columns`` as the operator takes them. Where some are on no 8-bit grid, all count as floats."""
    if any(grid is None or grid.dtype not in KERNEL_DTYPES for _, grid in columns):
        columns = [(sum(width for width, _ in columns), None)]
    return [number for width, grid in columns for number in (float(width), *grid_row(grid))]
