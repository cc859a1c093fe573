"""Packed sequences in an exported program: all steps of all sequences, padding included.

How many rows a pack has is data, which no exported program of tensors can loop over. There the rows are those
of the padded input, (T * B, features) with time first: ops that compute each row by itself need no change.
``batch_sizes`` has T entries, zeros behind the longest sequence, so that it says of every row whether it is
padding; loops over time let a state pass unchanged there, and what is unpacked has the padding value there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torchq_compat.packed_sequences.operators import PACK, PAD
from torchq_compat.support.upstream import assume

__all__ = ["is_step", "with_padded_packs"]


def with_padded_packs(graph_module: GraphModule) -> GraphModule:
    """Replace, in place, packing and unpacking by what they are on padded rows."""
    graph = graph_module.graph
    for node in graph.nodes:
        if node.target is PACK:
            node.target = _pack
            _count_steps(graph_module, node)
        elif node.target is PAD:
            node.target = _pad
    graph_module.recompile()
    return graph_module


def is_step(batch_sizes: Tensor, batch: Any) -> Tensor:
    """(T, B): whether a row is a step of its sequence, and not padding."""
    return torch.arange(batch, device=batch_sizes.device)[None] < batch_sizes[:, None]


def _count_steps(graph_module: GraphModule, pack: Node) -> None:
    """The size of ``batch_sizes`` was that of the longest sequence."""
    whole = pack.args[3]
    for getitem in list(pack.users):
        sizes = [user for user in getitem.users if user.target is torch.ops.aten.sym_size.int]
        if getitem.args[1] != 1 or whole or not sizes:
            continue
        with graph_module.graph.inserting_after(getitem):
            longest = graph_module.graph.call_function(_longest, (getitem,))
        for size in sizes:
            size.replace_all_uses_with(longest)
            graph_module.graph.erase_node(size)


def _longest(batch_sizes: Tensor) -> Any:
    longest = (batch_sizes > 0).sum().item()
    assume(longest >= 1)
    assume(longest <= batch_sizes.shape[0])
    return longest


def _pack(input: Tensor, lengths: Tensor, batch_first: bool, whole: bool) -> tuple[Tensor, Tensor]:
    steps_first = input.transpose(0, 1) if batch_first else input
    steps, batch = steps_first.shape[:2]
    batch_sizes = (lengths[None] > torch.arange(steps, device=lengths.device)[:, None]).sum(1)
    return steps_first.reshape(steps * batch, *steps_first.shape[2:]), batch_sizes


def _pad(
    rows: Tensor, batch_sizes: Tensor, batch: int, batch_first: bool, padding_value: float, steps: int
) -> tuple[Tensor, Tensor]:
    given = batch_sizes.shape[0]
    mask = is_step(batch_sizes, batch)
    padded = rows.reshape(given, batch, *rows.shape[1:])
    shown = mask.reshape(given, batch, *[1] * (rows.dim() - 1))
    padded = torch.where(shown, padded, padded.new_full((), padding_value))
    if steps is not given:
        padded = _to_length(padded, steps, padding_value)
    return (padded.transpose(0, 1) if batch_first else padded), mask.sum(0)


def _to_length(padded: Tensor, steps: Any, padding_value: float) -> Tensor:
    """``padded`` with its first dimension cut or grown to ``steps``."""
    if isinstance(steps, int):
        more = padded.new_full((steps, *padded.shape[1:]), padding_value)
        padded = torch.cat([padded, more])
    return padded[:steps]
