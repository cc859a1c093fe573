"""XNNPACK's partitioner, held to what XNNPACK computes.

Its own checks look at the pattern around a matmul or a convolution, not at the grids in it: it takes uint8,
16-bit and narrowed grids, and computes other numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from torchq_compat.specs.grids import PerTensorGrid

__all__ = ["xnnpack_partitioner"]

WHOLE_INT8 = (torch.int8, -128, 127)


def xnnpack_partitioner(refused: dict[str, str]) -> Any:
    """The partitioner for ``to_edge_transform_and_lower``.

    Args:
        refused: is filled with the reason, by the name of the node, where a grid is not XNNPACK's.
    """
    from executorch.backends.xnnpack.partition.config import ALL_PARTITIONER_CONFIGS
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

    return XnnpackPartitioner(configs=[_held_to_int8(config, refused) for config in ALL_PARTITIONER_CONFIGS])


def _held_to_int8(config: type[Any], refused: dict[str, str]) -> type[Any]:
    class HeldToInt8(config):  # type: ignore[misc]
        def check_constraints(self, node: Node, ep: Any) -> bool:
            if not super().check_constraints(node, ep):
                return False
            for each in (node, *self.get_node_and_deps(node, ep)):
                reason = _not_xnnpacks(each)
                if reason:
                    refused[node.name] = reason
                    return False
            return True

    HeldToInt8.__name__ = config.__name__
    return HeldToInt8


def _not_xnnpacks(node: Node) -> str:
    """Why XNNPACK must not take the grid of ``node``; empty if it may, or ``node`` has none."""
    if "quantize_per_tensor" not in getattr(node.target, "__name__", "") or len(node.args) < 6:
        return ""
    grid = PerTensorGrid.of_node(node)
    source = node.args[0]
    if isinstance(source, Node) and source.op == "placeholder" and grid.dtype is torch.int8:
        return ""  # a weight: its integers are there, nothing is clamped any more
    if (grid.dtype, grid.quant_min, grid.quant_max) == WHOLE_INT8:
        return ""
    return f"XNNPACK computes on int8 from -128 to 127, not {grid.dtype} [{grid.quant_min}, {grid.quant_max}]"
