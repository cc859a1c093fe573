"""XNNPACK's partitioner, restricted to patterns that XNNPACK computes correctly.

Its own checks inspect the pattern around a matmul or a convolution, but not the qparams: it takes uint8,
16-bit and narrowed qparams, and computes other numbers. It also marks the dequantize before an operator that
it then refuses as an op that does not compute; taken alone, the dequantize would return integers as floats.
So quantize and dequantize are taken only along with the operator between them. XNNPACK also reshapes, even
around a convolution of one dimension, and a reshape of several free sizes fails when the program is written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from torchq_compat.lower.executorch.runtime import executorch_module
from torchq_compat.qspecs.qparams import PerTensorQParams

__all__ = ["xnnpack_partitioner"]


def xnnpack_partitioner(refused: dict[str, str]) -> Any:
    """Return the partitioner for ``to_edge_transform_and_lower``.

    Args:
        refused: filled with name of a node -> reason, for nodes whose qparams XNNPACK does not support.
    """
    partition = "backends.xnnpack.partition"
    all_configs = executorch_module(f"{partition}.config").ALL_PARTITIONER_CONFIGS
    partitioner = executorch_module(f"{partition}.xnnpack_partitioner").XnnpackPartitioner
    configs = [config for config in all_configs if "quantize" not in config.target_name]
    return partitioner(configs=[_held_to_int8(config, refused) for config in configs])


def _held_to_int8(config: type[Any], refused: dict[str, str]) -> type[Any]:
    class HeldToInt8(config):  # type: ignore[misc]
        def check_constraints(self, node: Node, ep: ExportedProgram) -> bool:
            if not super().check_constraints(node, ep):
                return False
            reason = _why_not(node, {node, *self.get_node_and_deps(node, ep)}, ep)
            if reason:
                refused[node.name] = reason
            return not reason

    HeldToInt8.__name__ = config.__name__
    return HeldToInt8


def _why_not(node: Node, partition: set[Node], program: ExportedProgram) -> str:
    """Return why XNNPACK must not have ``partition``, ``node`` and its surroundings; empty if it may."""
    if any(map(_reshapes_free_sizes, partition)):
        return "XNNPACK reshapes a tensor with one free size at most"
    quantized = [each for each in partition if _is_quantized(each)]
    if not quantized and any(_is_quantized(each) for each in node.all_input_nodes):
        return "not in the pattern of a quantized operator: dequantize, operator, quantize"
    reasons = (_wrong_qparams(each, is_weight=_is_constant(each.args[0], program)) for each in quantized)
    return next(filter(None, reasons), "")


def _wrong_qparams(node: Node, *, is_weight: bool) -> str:
    if "per_channel" in _name(node):
        dtype = node.args[6]
        return "" if dtype is torch.int8 else f"XNNPACK computes on int8, not {dtype}"
    qparams = PerTensorQParams.of_node(node)
    # A weight is stored as its integers: nothing is clamped at run time.
    narrow = (qparams.quant_min, qparams.quant_max) != (-128, 127) and not is_weight
    if qparams.dtype is torch.int8 and not narrow:
        return ""
    found = f"{qparams.dtype} [{qparams.quant_min}, {qparams.quant_max}]"
    return f"XNNPACK computes on int8 from -128 to 127, not {found}"


def _reshapes_free_sizes(node: Node) -> bool:
    """Return whether XNNPACK reshapes for ``node``, to or from a shape with several free sizes."""
    name = _name(node)
    shapes = [each.meta["val"].shape for each in (node, *node.all_input_nodes[:1]) if "val" in each.meta]
    is_1d_convolution = "convolution" in name and len(shapes[0]) == 3
    if not is_1d_convolution and "squeeze_copy" not in name:
        return False
    return any(sum(isinstance(size, torch.SymInt) for size in shape) > 1 for shape in shapes)


def _is_quantized(node: Node) -> bool:
    # Variants with qparams as tensors, not "default", choose the qparams at run time.
    return "quantize_per_" in _name(node) and "default" in _name(node)


def _is_constant(node: Any, program: ExportedProgram) -> bool:
    """Return whether ``node`` is a parameter or buffer."""
    return node.op == "placeholder" and node.name not in program.graph_signature.user_inputs


def _name(node: Node) -> str:
    return getattr(node.target, "__name__", str(node.target))
