"""A standalone module as a leaf of the graph around it: a prepared or converted model at its own path."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torchq_compat.graph import metadata
from torchq_compat.graph.graph_module import ConvertedGraphModule, QuantizationGraphModule
from torchq_compat.graph.quantized_interface import quantize_inputs
from torchq_compat.opaque_calls.layouts import CallLayout
from torchq_compat.opaque_calls.opaque_module import LeafModule
from torchq_compat.qspecs.qparams import Grid
from torchq_compat.support.upstream import pytree

__all__ = ["ConvertedStandalone", "PreparedStandalone"]


def _layouts(leaf: Any) -> list[CallLayout]:
    # In meta, because GraphModule.__deepcopy__ drops other attributes.
    layouts: list[CallLayout] = leaf.meta.get(metadata.LAYOUTS.name, [])
    return layouts


def _set_layouts(leaf: Any, layouts: list[CallLayout]) -> None:
    leaf.meta[metadata.LAYOUTS.name] = layouts


class PreparedStandalone(LeafModule, QuantizationGraphModule):
    """A prepared standalone module."""

    leaf_layouts = property(_layouts, _set_layouts)

    def __call__(self, *args: Any, leaf_layout: int | None = None, **kwargs: Any) -> Any:
        if leaf_layout is None:
            return super().__call__(*args, **kwargs)
        return self._leaf_call_flat(self.leaf_layouts[leaf_layout], args)

    def leaf_call(self, *args: Any, **kwargs: Any) -> Any:
        return QuantizationGraphModule.__call__(self, *args, **kwargs)

    def leaf_hand_out(self, result: Tensor, grid: Grid | None) -> Tensor:
        """Results on a grid are integers already."""
        return result


class ConvertedStandalone(LeafModule, ConvertedGraphModule):
    """A converted standalone module."""

    leaf_layouts = property(_layouts, _set_layouts)

    def __call__(self, *args: Any, leaf_layout: int | None = None, **kwargs: Any) -> Any:
        if leaf_layout is None:
            return super().__call__(*args, **kwargs)
        return self._leaf_call_flat(self.leaf_layouts[leaf_layout], args)

    def leaf_call(self, *args: Any, **kwargs: Any) -> Any:
        bound = self.record.signature.bind(args, kwargs)
        return ConvertedGraphModule.__call__(self, *quantize_inputs(bound, self.input_grids()))

    def leaf_hand_out(self, result: Tensor, grid: Grid | None) -> Tensor:
        """Results on a grid are integers already."""
        return result

    def leaf_output_grids(self, results: list[Tensor]) -> tuple[Grid | None, ...]:
        returned = self.graph.output_node().args[0]
        leaves = pytree.tree_leaves(returned)
        # Constants among the results are no results of the leaf.
        return tuple(
            grid for grid, leaf in zip(self.output_grids(), leaves, strict=True) if hasattr(leaf, "meta")
        )


StandaloneLeaf = PreparedStandalone | ConvertedStandalone
