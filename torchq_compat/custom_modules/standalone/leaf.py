"""A standalone module as a leaf of the graph around it: a prepared or converted model at its own path."""

from __future__ import annotations

from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor

from torchq_compat.custom_modules.layouts import CallLayout
from torchq_compat.custom_modules.leaf_module import LeafModule
from torchq_compat.graph_module import ConvertedGraphModule, QuantizationGraphModule
from torchq_compat.quantized_interface import quantize_inputs
from torchq_compat.specs.grids import Grid

__all__ = ["ConvertedStandalone", "PreparedStandalone", "StandaloneLeaf"]

LAYOUTS_KEY = "torchq_compat_leaf_layouts"


class StandaloneLeaf(LeafModule):
    """What is added to a prepared or converted model that another graph calls."""

    meta: dict[str, Any]

    # In meta, because GraphModule.__deepcopy__ drops other attributes.
    @property
    def leaf_layouts(self) -> list[CallLayout]:
        layouts: list[CallLayout] = self.meta.get(LAYOUTS_KEY, [])
        return layouts

    @leaf_layouts.setter
    def leaf_layouts(self, layouts: list[CallLayout]) -> None:
        self.meta[LAYOUTS_KEY] = layouts

    def __call__(self, *args: Any, leaf_layout: int | None = None, **kwargs: Any) -> Any:
        if leaf_layout is None:
            return super().__call__(*args, **kwargs)
        return self._leaf_call_flat(self.leaf_layouts[leaf_layout], args)

    def leaf_hand_out(self, result: Tensor, grid: Grid | None) -> Tensor:
        """Results on a grid are integers already."""
        return result


class PreparedStandalone(StandaloneLeaf, QuantizationGraphModule):
    """A prepared standalone module."""

    def leaf_call(self, *args: Any, **kwargs: Any) -> Any:
        return QuantizationGraphModule.__call__(self, *args, **kwargs)


class ConvertedStandalone(StandaloneLeaf, ConvertedGraphModule):
    """A converted standalone module."""

    def leaf_call(self, *args: Any, **kwargs: Any) -> Any:
        bound = self.record.signature.bind(args, kwargs)
        return ConvertedGraphModule.__call__(self, *quantize_inputs(bound, self.input_grids()))

    def leaf_output_grids(self, results: list[Tensor]) -> tuple[Grid | None, ...]:
        returned = self.graph.output_node().args[0]
        leaves = pytree.tree_leaves(returned)
        # Constants among the results are no results of the leaf.
        return tuple(
            grid for grid, leaf in zip(self.output_grids(), leaves, strict=True) if hasattr(leaf, "meta")
        )
