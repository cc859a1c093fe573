"""The module behind a leaf call of the outer graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.ao.quantization.quant_type import QuantType

from torchq_compat.opaque_calls.layouts import CallLayout, Structure
from torchq_compat.qspecs.qparams import Grid

__all__ = ["LeafModule"]


class LeafModule(nn.Module):
    """A custom module that can be called in two ways.

    By a person, with the arguments and results of the float module it replaces (``leaf_call``). By the graph,
    with flat tensors and the index of a ``CallLayout``; across a quantized boundary the tensors are integers.
    All names begin with ``leaf``: this class is also mixed into classes that users wrote.
    """

    leaf_layouts: list[CallLayout]
    leaf_quant_type = QuantType.STATIC
    #: The class the script mapped the float module to.
    leaf_observed_class: type[nn.Module] | None = None
    #: Whether what ``leaf_call`` returns lies on ``leaf_output_grids`` already, and an exported program shows
    #: the per-tensor grids it is made of.
    leaf_results_on_grids = False
    #: Whether it takes and gives floats that lie on the grids of its layouts, where others have the integers.
    leaf_in_floats = False

    def leaf_call(self, *args: Any, **kwargs: Any) -> Any:
        """Compute in floats, as the float module is called."""
        raise NotImplementedError

    def leaf_output_grids(self, results: list[Tensor]) -> tuple[Grid | None, ...]:
        """The grid each of the flat ``results`` (of any device, ``meta`` too) lies on; None: floats."""
        return (None,) * len(results)

    def forward(self, *args: Any, leaf_layout: int | None = None, **kwargs: Any) -> Any:
        if leaf_layout is None:
            return self.leaf_call(*args, **kwargs)
        return self._leaf_call_flat(self.leaf_layouts[leaf_layout], args)

    def leaf_call_from_graph(self, layout: CallLayout, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``leaf_call``, for a call of the graph, whose grids ``layout`` knows."""
        return self.leaf_call(*args, **kwargs)

    def leaf_receive(self, q: Tensor, grid: Grid) -> Tensor:
        """What ``leaf_call`` gets for the integers ``q`` on ``grid``."""
        return grid.dequantize(q, self.leaf_float_dtype())

    def leaf_hand_out(self, result: Tensor, grid: Grid | None) -> Tensor:
        """What the graph gets for a ``result`` of ``leaf_call``."""
        return result if grid is None else grid.quantize(result)

    def leaf_set_grids(
        self, index: int, inputs: tuple[Grid | None, ...], outputs: tuple[Grid | None, ...]
    ) -> None:
        """Tell call ``index`` on which grids its integers lie."""
        layouts = list(self.leaf_layouts)
        layouts[index] = layouts[index].with_grids(inputs, outputs)
        self.leaf_layouts = layouts

    def leaf_check_results(self, layout: CallLayout, results: Any) -> None:
        """Refuse ``results`` of another structure than the call had in capture."""

    def _leaf_call_flat(self, layout: CallLayout, flat: tuple[Any, ...]) -> tuple[Tensor, ...]:
        count = layout.inputs.count()
        tensors, sizes = flat[:count], flat[count:]
        if layout.input_grids:
            tensors = tuple(map(self._as_floats, tensors, layout.input_grids))
        args, kwargs = layout.inputs.put_together(tensors, sizes)
        nested = self.leaf_call_from_graph(layout, args, kwargs)
        self.leaf_check_results(layout, nested)
        _, results = Structure.take_apart(nested)
        if self.leaf_in_floats:
            return tuple(results)
        output_grids = layout.output_grids or (None,) * len(results)
        return tuple(self.leaf_hand_out(*pair) for pair in zip(results, output_grids, strict=True))

    def _as_floats(self, tensor: Tensor, grid: Grid | None) -> Tensor:
        if grid is None or (self.leaf_in_floats and tensor.is_floating_point()):
            return tensor
        return self.leaf_receive(tensor, grid)

    def leaf_float_dtype(self) -> torch.dtype:
        """The dtype the module computes in."""
        return torch.float32
