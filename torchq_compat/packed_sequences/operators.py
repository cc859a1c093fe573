"""Packing and unpacking as two operators with data-dependent sizes.

A captured graph keeps the packed rows of ``PackedSequence.data``, (rows, features): their number is the sum
of the lengths, which torch.export treats as a number known at run time. So ops on the rows, observers and
calibration use the real steps of each sequence and never its padding.

Source: ``torch.nn.utils.rnn``, whose two functions end in ``torch._pack_padded_sequence`` and
``torch._pad_packed_sequence``; invalid lengths are handled as these functions handle them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchq_compat.errors import InputError
from torchq_compat.support.upstream import (
    assume,
    pack_padded_sequence,
    pack_padded_sequence_backward,
    pad_packed,
)

__all__ = ["PACK", "PAD", "time_and_batch"]


@torch.library.custom_op("torchq_compat::pack_padded_sequence", mutates_args=())
def _pack(input: Tensor, lengths: Tensor, batch_first: bool, whole: bool) -> tuple[Tensor, Tensor]:
    """Return the rows of the steps of padded sequences, and the number of sequences that have each step.

    Args:
        input: (T, B, ...), or (B, T, ...) with ``batch_first``.
        lengths: (B,) int64 on the CPU, in descending order.
        whole: whether the graph assumes that the longest sequence has T steps.

    Raises:
        InputError: a length exceeds T, or with ``whole`` no sequence has T steps.
    """
    rows, batch_sizes = pack_padded_sequence(input, lengths, batch_first)
    steps = input.shape[time_and_batch(batch_first)[0]]
    if batch_sizes.shape[0] > steps:
        raise _too_long(batch_sizes.shape[0], steps)
    if whole and batch_sizes.shape[0] != steps:
        raise _not_whole(batch_sizes.shape[0], steps)
    return rows, batch_sizes


@_pack.register_fake
def _fake_pack(input: Tensor, lengths: Tensor, batch_first: bool, whole: bool) -> tuple[Tensor, Tensor]:
    time, batch = time_and_batch(batch_first)
    assume(lengths.shape[0] == input.shape[batch])
    context = torch.library.get_ctx()
    rows = context.new_dynamic_size(min=1)
    steps: Any = input.shape[time]
    if not whole:
        steps = context.new_dynamic_size(min=1)
        assume(steps <= input.shape[time])
    return input.new_empty(rows, *input.shape[2:]), lengths.new_empty(steps)


@torch.library.custom_op("torchq_compat::pad_packed_sequence", mutates_args=())
def _pad(
    rows: Tensor, batch_sizes: Tensor, batch: int, batch_first: bool, padding_value: float, steps: int
) -> tuple[Tensor, Tensor]:
    """Return the padded sequences of packed ``rows``, and their lengths.

    Args:
        batch: the number of sequences, ``batch_sizes[0]``.
        steps: the number of steps of the padded sequences, at least that of the longest.
    """
    padded, lengths = pad_packed(rows, batch_sizes, batch_first, padding_value, steps)
    return padded, lengths


@_pad.register_fake
def _fake_pad(
    rows: Tensor, batch_sizes: Tensor, batch: int, batch_first: bool, padding_value: float, steps: int
) -> tuple[Tensor, Tensor]:
    leading = (batch, steps) if batch_first else (steps, batch)
    return rows.new_empty(*leading, *rows.shape[1:]), batch_sizes.new_empty(batch)


def time_and_batch(batch_first: bool) -> tuple[int, int]:
    """Return the dimensions of time and batch."""
    return (1, 0) if batch_first else (0, 1)


def _keep_for_pack(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    padded, _, ctx.batch_first, _ = inputs
    ctx.padded_shape = padded.shape
    ctx.save_for_backward(output[1])


def _backward_of_pack(ctx: Any, of_rows: Tensor, _of_sizes: Tensor) -> tuple[Tensor, None, None, None]:
    (batch_sizes,) = ctx.saved_tensors
    gradient = pack_padded_sequence_backward(of_rows, ctx.padded_shape, batch_sizes, ctx.batch_first)
    return gradient, None, None, None


def _keep_for_pad(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.batch_first = inputs[3]
    ctx.save_for_backward(output[1])


def _backward_of_pad(ctx: Any, of_padded: Tensor, _of_lengths: Tensor) -> tuple[Any, ...]:
    (lengths,) = ctx.saved_tensors
    rows, _ = pack_padded_sequence(of_padded.contiguous(), lengths, ctx.batch_first)
    return rows, None, None, None, None, None


_pack.register_autograd(_backward_of_pack, setup_context=_keep_for_pack)
_pad.register_autograd(_backward_of_pad, setup_context=_keep_for_pad)

PACK = torch.ops.torchq_compat.pack_padded_sequence.default
PAD = torch.ops.torchq_compat.pad_packed_sequence.default


def _too_long(longest: int, steps: int) -> InputError:
    return InputError(
        f"a length of {longest} was given for sequences of {steps} steps.",
        hint="lengths count the steps of each sequence before its padding.",
    )


def _not_whole(longest: int, steps: int) -> InputError:
    return InputError(
        f"the longest of the packed sequences has {longest} steps and the padded input {steps}, but the "
        "model puts what it unpacks beside something as long as the input.",
        hint="give pad_packed_sequence the length of the input, total_length=x.size(1), or cut the input to "
        "lengths.max() steps.",
    )
