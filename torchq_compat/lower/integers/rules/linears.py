"""Linear layers with int8 weights on 8-bit activations. Legacy: ``nnq.Linear``, ``nniq.LinearReLU``."""

from __future__ import annotations

import torch
from torch.fx import Node

from torchq_compat.lower.integers.lowered_graph import LoweredGraph
from torchq_compat.lower.integers.operators import LINEAR
from torchq_compat.lower.integers.qdq_graph import Site, integers_at
from torchq_compat.lower.integers.rules.rule import Family, Kernel, Refusal
from torchq_compat.lower.integers.rules.weights import Weight, bias_fault, ends, weight_of

__all__ = ["FAMILY"]


def _linear(site: Site) -> Kernel | Refusal | None:
    weight = weight_of(site)
    if not isinstance(weight, Weight):
        return weight
    source = integers_at(site.arguments["input"])
    fault = bias_fault(site) if source is not None else Refusal("its input is not quantized to 8 bits")
    if source is None or fault is not None:
        return fault

    def write(lowered: LoweredGraph) -> Node:
        numbers, kind = ends(site)
        x = (source.node, source.qparams.scale, source.qparams.zero_point)
        scales = weight.write_scales(lowered)
        return lowered.call(LINEAR, *x, weight.values, scales, site.arguments["bias"], *numbers, kind)

    return Kernel(str(LINEAR), write)


FAMILY = Family({torch.ops.aten.linear.default: _linear})
