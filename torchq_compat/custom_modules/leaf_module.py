"""The module behind a leaf call of the outer graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchq_compat.custom_modules.layouts import CallLayout, Structure
from torchq_compat.specs.grids import Grid

__all__ = ["LeafModule"]


class LeafModule(nn.Module):
    """A custom module that can be called in two ways.

    By a person, with the arguments and results of the float module it replaces (``call``). By the graph, with
    flat tensors and the index of a ``CallLayout``; across a quantized boundary those tensors are integers.
    """

    layouts: list[CallLayout]
    #: The class the script mapped the float module to.
    observed_class: type[nn.Module] | None = None

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Compute in floats, as the float module is called."""
        raise NotImplementedError

    def output_grids(self, results: list[Tensor]) -> tuple[Grid | None, ...]:
        """The grid each of the flat ``results`` (of any device, ``meta`` too) lies on; None: floats."""
        return (None,) * len(results)

    def forward(self, *args: Any, layout: int | None = None, **kwargs: Any) -> Any:
        if layout is None:
            return self.call(*args, **kwargs)
        return self._call_flat(self.layouts[layout], args)

    def _call_flat(self, layout: CallLayout, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if layout.input_grids:
            float_dtype = self.float_dtype()
            tensors = tuple(
                tensor if grid is None else grid.dequantize(tensor, float_dtype)
                for tensor, grid in zip(tensors, layout.input_grids, strict=True)
            )
        args, kwargs = layout.inputs.put_together(tensors)
        _, results = Structure.take_apart(self.call(*args, **kwargs))
        if layout.output_grids:
            results = [
                tensor if grid is None else grid.quantize(tensor)
                for tensor, grid in zip(results, layout.output_grids, strict=True)
            ]
        return tuple(results)

    def float_dtype(self) -> torch.dtype:
        """The dtype the module computes in."""
        return torch.float32
