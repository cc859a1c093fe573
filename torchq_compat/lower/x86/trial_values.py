"""Values for trials: integers over the whole range of qparams, floats, indices of a table."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torchq_compat.lower.x86.qdq_operands import arguments_of, constant_of
from torchq_compat.qspecs.qdq import is_dequantize
from torchq_compat.qspecs.qparams import PerTensorQParams

__all__ = ["fill_floats", "fill_indices", "fill_integers"]

EMBEDDINGS = (torch.ops.aten.embedding.default, torch.ops.aten.embedding_bag.padding_idx)


def fill_integers(
    qparams: PerTensorQParams,
    ends: tuple[int, int],
    shape: tuple[int, ...],
    index: int,
    generator: torch.Generator,
) -> Tensor:
    """Return integers of ``qparams`` between ``ends``, both included: uniformly distributed, or for every odd
    ``index`` close to the zero point, so that the result does not only saturate."""
    low, high = ends
    if index % 2:
        gain = (high - low) * 0.5 ** (1 + 5 * torch.rand(shape[:1], generator=generator))
        noise = torch.randn(shape, generator=generator) * gain.reshape(-1, *[1] * (len(shape) - 1))
        integers = noise.add_(qparams.zero_point).round_().clamp_(low, high).to(qparams.dtype)
    else:
        integers = torch.randint(low, high + 1, shape, generator=generator, dtype=qparams.dtype)
    integers.view(-1)[:1] = low
    integers.view(-1)[-1:] = high
    return integers


def fill_floats(shape: tuple[int, ...], index: int, generator: torch.Generator) -> Tensor:
    """Return floats of both signs; for every odd ``index`` not centered at zero."""
    return torch.randn(shape, generator=generator) + index % 2


def fill_indices(
    graph_module: GraphModule, op: Node, node: Node, shape: tuple[int, ...], generator: torch.Generator
) -> Tensor | None:
    """Return indices or offsets for an embedding; None if ``op`` reads ``node`` as floats."""
    if op.target not in EMBEDDINGS:
        return None
    arguments = arguments_of(op)
    if node is arguments.get("indices"):
        weight = arguments["weight"]
        table = constant_of(graph_module, weight.args[0] if is_dequantize(weight) else weight)
        assert table is not None
        return torch.randint(0, table.shape[0], shape, generator=generator)
    # Each bag has one index, the last bag the rest.
    return torch.arange(shape[0]) if node is arguments.get("offsets") else None
