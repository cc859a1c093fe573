"""Packed sequences inside a model: packing and unpacking as operators of the captured graph."""

from __future__ import annotations

import sys
from collections import UserList
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from torchq_compat.capture.inlined_blocks import Blocks
from torchq_compat.capture.replaced_calls import ReplacedCalls, called_without_out
from torchq_compat.errors import InputError
from torchq_compat.support import upstream
from torchq_compat.support.process_state import held

# Packing and unpacking as two operators with data-dependent sizes.
#
# A captured graph keeps the packed rows of ``PackedSequence.data``, (rows, features): their number is the
# sum of the lengths, which torch.export treats as a number known at run time. So ops on the rows, observers
# and calibration use the real steps of each sequence and never its padding.
#
# Source: ``torch.nn.utils.rnn``, whose two functions end in ``torch._pack_padded_sequence`` and
# ``torch._pad_packed_sequence``; invalid lengths are handled as these functions handle them.


@torch.library.custom_op("torchq_compat::pack_padded_sequence", mutates_args=())
def _pack(input: Tensor, lengths: Tensor, batch_first: bool, whole: bool) -> tuple[Tensor, Tensor]:
    """Return the rows of the steps of padded sequences, and the number of sequences that have each step.

    Args:
        input: (T, B, ...), or (B, T, ...) with ``batch_first``.
        lengths: (B,) int64, in descending order.
        whole: whether the graph assumes that the longest sequence has T steps.

    Raises:
        InputError: a length exceeds T, or with ``whole`` no sequence has T steps.
    """
    rows, batch_sizes = upstream.pack_padded_sequence(input, lengths.cpu(), batch_first)
    steps = input.shape[time_and_batch(batch_first)[0]]
    if batch_sizes.shape[0] > steps:
        raise InputError.of("TQ901.longer_than_padded", longest=batch_sizes.shape[0], steps=steps)
    if whole and batch_sizes.shape[0] != steps:
        raise InputError.of("TQ901.padding_beyond_longest", longest=batch_sizes.shape[0], steps=steps)
    return rows, batch_sizes


@_pack.register_fake
def _fake_pack(input: Tensor, lengths: Tensor, batch_first: bool, whole: bool) -> tuple[Tensor, Tensor]:
    time, batch = time_and_batch(batch_first)
    upstream.assume(lengths.shape[0] == input.shape[batch])
    steps: Any = input.shape[time]
    if input.is_meta:
        # Only shapes are computed: as if all lengths were 1, or all the whole.
        rows, steps = (input.shape[batch] * steps, steps) if whole else (input.shape[batch], 1)
    else:
        context = torch.library.get_ctx()
        rows = context.new_dynamic_size(min=1)
        if not whole:
            given, steps = steps, context.new_dynamic_size(min=1)
            if isinstance(given, torch.SymInt):
                # As a number it is that of the example: Python would decide by it.
                upstream.assume(steps <= given)
    return input.new_empty(rows, *input.shape[2:]), lengths.new_empty(steps, device="cpu")


@torch.library.custom_op("torchq_compat::pad_packed_sequence", mutates_args=())
def _pad(
    rows: Tensor, batch_sizes: Tensor, batch: int, batch_first: bool, padding_value: float, steps: int
) -> tuple[Tensor, Tensor]:
    """Return the padded sequences of packed ``rows``, and their lengths.

    Args:
        batch: the number of sequences, ``batch_sizes[0]``.
        steps: the number of steps of the padded sequences, at least that of the longest.
    """
    padded, lengths = upstream.pad_packed(rows, batch_sizes, batch_first, padding_value, steps)
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


def is_step(batch_sizes: Tensor, batch: Any) -> Tensor:
    """Return a (T, B) mask of the rows that are steps of their sequence, not padding."""
    return torch.arange(batch, device=batch_sizes.device)[None] < batch_sizes[:, None]


def _keep_for_pack(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    padded, _, ctx.batch_first, _ = inputs
    ctx.padded_shape = padded.shape
    ctx.save_for_backward(output[1])


def _backward_of_pack(ctx: Any, of_rows: Tensor, _of_sizes: Tensor) -> tuple[Tensor, None, None, None]:
    (batch_sizes,) = ctx.saved_tensors
    gradient = upstream.pack_padded_sequence_backward(of_rows, ctx.padded_shape, batch_sizes, ctx.batch_first)
    return gradient, None, None, None


def _keep_for_pad(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.batch_first = inputs[3]
    ctx.save_for_backward(output[1])


def _backward_of_pad(ctx: Any, of_padded: Tensor, _of_lengths: Tensor) -> tuple[Any, ...]:
    (lengths,) = ctx.saved_tensors
    rows, _ = upstream.pack_padded_sequence(of_padded.contiguous(), lengths, ctx.batch_first)
    return rows, None, None, None, None, None


_pack.register_autograd(_backward_of_pack, setup_context=_keep_for_pack)
_pad.register_autograd(_backward_of_pad, setup_context=_keep_for_pad)

PACK = torch.ops.torchq_compat.pack_padded_sequence.default
PAD = torch.ops.torchq_compat.pad_packed_sequence.default


# Lengths that a model converts to a list, with ``lengths.tolist()``, and passes on as a whole.
#
# Each number of a plain list would be a separate value that torch.export knows only at run time, and their
# count would fix the batch. ``ListOfTensor`` passed to ``pack_padded_sequence`` is the tensor it came from;
# a single number of it is the ``item()`` of an element.


class ListOfTensor(UserList[Any]):
    """The list of the numbers in ``tensor``, which is converted to numbers only when they are read.

    Args:
        numbers: the tensor, or a plain list of numbers computed from a ListOfTensor.
        take_apart: computes the list of numbers; required for a tensor.
    """

    def __init__(
        self, numbers: Tensor | list[Any], take_apart: Callable[[], list[Any]] | None = None
    ) -> None:
        self.tensor = numbers if isinstance(numbers, Tensor) else None
        self._numbers = None if isinstance(numbers, Tensor) else list(numbers)
        self._take_apart = take_apart

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)

    def __getitem__(self, index: Any) -> Any:
        if self.tensor is not None and isinstance(index, int):
            return self.tensor[index].item()
        return self.data[index]

    @property
    def data(self) -> list[Any]:  # type: ignore[override]
        """The numbers as a plain list."""
        if self._numbers is None:
            assert self._take_apart is not None
            self._numbers = self._take_apart()
        return self._numbers


# Replaces packing and unpacking of ``torch.nn.utils.rnn`` by our operators during capture.
#
# ``pack_padded_sequence`` and ``pad_packed_sequence`` are Python that ends in functions of torch's C++
# module. A ``TorchFunctionMode`` intercepts these, also if a user imported ``pack_padded_sequence`` by
# name.


#: Functions that make a tensor from a list.
PUT_TOGETHER = (torch.as_tensor, torch.tensor)
_BATCH_IN_CALL: ContextVar[Any] = ContextVar("torchq_compat_packed_batch", default=None)
_MODE: ContextVar[PackingMode | None] = ContextVar("torchq_compat_packing", default=None)


class PackingMode(ReplacedCalls):
    """Replaces packing and unpacking while it is active.

    Args:
        whole: assume that the longest sequence has as many steps as the padded input, which the operator
            checks at run time. Otherwise the number of steps depends on the data.

    Attributes:
        packs: whether the model has used a packed sequence.
        blocks: the blocks under ``torch.no_grad()`` or autocast in the model.
    """

    def __init__(self, *, whole: bool) -> None:
        super().__init__()
        self.whole = whole
        self.packs = False
        self.blocks = Blocks()
        self._batches: list[tuple[Tensor, Any]] = []

    @contextmanager
    def inside(self, traced: nn.Module, args: Any, kwargs: Any) -> Iterator[None]:
        # torch.export's own modes decompose ``tolist``.
        for leaf in upstream.pytree.tree_leaves((args, kwargs)):
            _keep_whole(leaf)
        with self.blocks.inlined(), self, held(_MODE, self):
            yield

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is upstream.pack_padded_sequence:
            return self._pack(*args)
        # Each read of ``__get__`` gives a new object, so compare by equality.
        if function == torch.Tensor.data.__get__ and get_proxy_mode() is not None:  # type: ignore[attr-defined]
            return _keep_whole(args[0].detach())
        if function is upstream.pad_packed:
            return self._pad(*args)
        is_asked = function is torch.Tensor.size and any(item is args[0] for item, _ in self._batches)
        if is_asked and _is_bounded(sys._getframe(1)):
            return 0
        given: Any = args[0] if args else None
        if function is torch.Tensor.numpy and _may_be_lengths(given):
            return ListOfTensor(given, partial(function, *args))
        if function in PUT_TOGETHER and isinstance(given, ListOfTensor) and given.tensor is not None:
            return torch.as_tensor(given.tensor, **(kwargs or {}))
        if function in PUT_TOGETHER and _holds_numbers(given):
            return torch.stack([*map(_as_number, given)]).to(**(kwargs or {}))
        named = {name: _plain(value) for name, value in (kwargs or {}).items()}
        return _keep_whole(called_without_out(function, tuple(map(_plain, args)), named))

    def batch_of(self, batch_sizes: Tensor) -> Any:
        """Return the number of sequences in a packed sequence with ``batch_sizes``: the batch of the input if
        it was packed here, else the first of ``batch_sizes``."""
        self.packs = True
        known = next((batch for entry, batch in self._batches if entry is batch_sizes), None)
        if known is None:
            known = batch_sizes[0].item()
            upstream.assume(known >= 1)
            self._batches.append((batch_sizes, known))
        return known

    def _pack(self, input: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
        self.packs = True
        rows, batch_sizes = PACK(input, lengths, batch_first, self.whole)
        self._batches.append((batch_sizes, input.shape[time_and_batch(batch_first)[1]]))
        return rows, batch_sizes

    def _pad(
        self, rows: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, steps: Any
    ) -> tuple[Tensor, Tensor]:
        self.packs = True
        padded: tuple[Tensor, Tensor] = PAD(
            rows, batch_sizes, self.batch_of(batch_sizes), batch_first, padding_value, steps
        )
        return padded


def _is_bounded(frame: FrameType | None) -> bool:
    """Return whether ``pad_packed_sequence`` asks for the number of steps to see whether ``total_length``
    suffices, which the operator checks at run time."""
    while frame is not None and frame.f_code is not pad_packed_sequence.__code__:
        frame = frame.f_back
    return frame is not None and frame.f_locals["total_length"] is not None


def _may_be_lengths(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.dim() == 1 and tensor.dtype in (torch.int32, torch.int64)


def _keep_whole(result: Any) -> Any:
    """Return ``result`` after giving each of its tensors that may be lengths a ``tolist`` that returns a
    ``ListOfTensor``. No mode intercepts ``tolist`` of a capture's tensors."""
    tensors: Any = result if isinstance(result, (tuple, list)) else (result,)
    for tensor in tensors:
        if _may_be_lengths(tensor):
            vars(tensor)["tolist"] = partial(_to_list, tensor)
    return result


def _holds_numbers(value: Any) -> bool:
    """Return whether ``value`` is a list of lengths that were taken apart: symbols or tensors of one integer,
    where ``torch.tensor`` requires integers."""
    if not isinstance(value, (list, tuple, ListOfTensor)):
        return False
    return any(isinstance(entry, torch.SymInt) or _is_number(entry) for entry in value) and all(
        isinstance(item, (int, torch.SymInt)) or _is_number(item) for item in value
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0 and value.dtype in (torch.int32, torch.int64)


def _as_number(value: Any) -> Tensor:
    return value.long() if isinstance(value, Tensor) else torch.full((), value, dtype=torch.int64)


def _to_list(tensor: Tensor) -> ListOfTensor:
    return ListOfTensor(tensor, partial(type(tensor).tolist, tensor))


def _plain(value: Any) -> Any:
    """Return the plain list of a ``ListOfTensor``, for functions of torch that do not know it."""
    return value.data if isinstance(value, ListOfTensor) else value


def batch_of_arguments(arguments: Any) -> Any:
    """Return the number of sequences of the PackedSequence in ``arguments``; None if there is none, or
    outside of a capture."""
    mode = _MODE.get()
    if mode is None:
        return None
    leaves = upstream.pytree.tree_leaves(arguments, is_leaf=lambda leaf: isinstance(leaf, PackedSequence))
    packed = next((leaf for leaf in leaves if isinstance(leaf, PackedSequence)), None)
    return None if packed is None else mode.batch_of(packed.batch_sizes)


def call_with_batch(batch: Any) -> AbstractContextManager[None]:
    """Make ``batch_in_call`` return ``batch`` while the context is active."""
    return held(_BATCH_IN_CALL, batch)


def batch_in_call() -> Any:
    """Return the number of sequences of the PackedSequence in the call whose shapes are being computed; None
    if there is none."""
    # Dynamo cannot read a ContextVar; none of our captures is its.
    return None if torch.compiler.is_dynamo_compiling() else _BATCH_IN_CALL.get()
