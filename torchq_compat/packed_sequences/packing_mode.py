"""Replaces packing and unpacking of ``torch.nn.utils.rnn`` by our operators during capture.

``pack_padded_sequence`` and ``pad_packed_sequence`` are Python that ends in functions of torch's C++ module.
A ``TorchFunctionMode`` intercepts these, also if a user imported ``pack_padded_sequence`` by name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence
from torch.overrides import TorchFunctionMode

from torchq_compat.packed_sequences.lengths_as_lists import ListOfTensor
from torchq_compat.packed_sequences.operators import PACK, PAD, time_and_batch
from torchq_compat.support.upstream import assume, pack_padded_sequence, pad_packed, pytree

__all__ = ["PackingMode", "batch_in_call", "batch_of_arguments", "call_with_batch"]

#: Functions that make a tensor from a list.
PUT_TOGETHER = (torch.as_tensor, torch.tensor)
TORCH = str(Path(torch.__file__).parent)
_BATCH_IN_CALL: ContextVar[Any] = ContextVar("torchq_compat_packed_batch", default=None)
_MODE: ContextVar[PackingMode | None] = ContextVar("torchq_compat_packing", default=None)


class PackingMode(TorchFunctionMode):
    """Replaces packing and unpacking while it is active.

    Args:
        whole: assume that the longest sequence has as many steps as the padded input, which the operator
            checks at run time. Otherwise the number of steps depends on the data.

    Attributes:
        packs: whether the model has used a packed sequence.
    """

    def __init__(self, *, whole: bool) -> None:
        super().__init__()
        self.whole = whole
        self.packs = False
        self._batches: list[tuple[Tensor, Any]] = []

    @contextmanager
    def during(self, model: nn.Module) -> Iterator[None]:
        """Be active while ``model`` runs, inside of torch.export's own modes, which decompose ``tolist``."""
        entered = ExitStack()

        def enter(_model: nn.Module, args: Any) -> None:
            for leaf in pytree.tree_leaves(args):
                _keep_whole(leaf)
            entered.enter_context(self)

        def leave(_model: nn.Module, _args: Any, _result: Any) -> None:
            entered.close()

        hooks = model.register_forward_pre_hook(enter), model.register_forward_hook(leave, always_call=True)
        token = _MODE.set(self)
        try:
            yield
        finally:
            _MODE.reset(token)
            entered.close()
            for hook in hooks:
                hook.remove()

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is pack_padded_sequence:
            return self._pack(*args)
        # Each read of ``__get__`` gives a new object, so compare by equality.
        if function == torch.Tensor.data.__get__ and get_proxy_mode() is not None:  # type: ignore[attr-defined]
            return _keep_whole(args[0].detach())
        if function is pad_packed:
            return self._pad(*args)
        if function is torch.Tensor.size and self._is_known(args[0]):
            _bound_by_total_length(args[0], sys._getframe(1))
        given: Any = args[0] if args else None
        if function is torch.Tensor.numpy and _may_be_lengths(given):
            return ListOfTensor(given, partial(function, *args))
        if function in PUT_TOGETHER and isinstance(given, ListOfTensor) and given.tensor is not None:
            return torch.as_tensor(given.tensor, **(kwargs or {}))
        if function in PUT_TOGETHER and _holds_numbers(given):
            return torch.stack([*map(_as_number, given)]).to(**(kwargs or {}))
        named = {name: _plain(value) for name, value in (kwargs or {}).items()}
        return _keep_whole(function(*map(_plain, args), **named))

    def batch_of(self, batch_sizes: Tensor) -> Any:
        """Return the number of sequences in a packed sequence with ``batch_sizes``: the batch of the input if
        it was packed here, else the first of ``batch_sizes``."""
        self.packs = True
        known = next((batch for each, batch in self._batches if each is batch_sizes), None)
        if known is None:
            known = batch_sizes[0].item()
            assume(known >= 1)
            self._batches.append((batch_sizes, known))
        return known

    def _is_known(self, tensor: Any) -> bool:
        return any(each is tensor for each, _ in self._batches)

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


def _bound_by_total_length(batch_sizes: Tensor, frame: FrameType | None) -> None:
    """Assume that ``total_length`` suffices if ``pad_packed_sequence`` compares it with the size of
    ``batch_sizes``; the graph checks this at run time."""
    asking = pad_packed_sequence.__code__
    while frame is not None and frame.f_code is not asking and _is_of_torch(frame):
        frame = frame.f_back
    if frame is not None and frame.f_code is asking:
        total_length = frame.f_locals.get("total_length")
        if total_length is not None:
            assume(batch_sizes.shape[0] <= total_length)


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
    return any(isinstance(each, torch.SymInt) or _is_number(each) for each in value) and all(
        isinstance(each, (int, torch.SymInt)) or _is_number(each) for each in value
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


def _is_of_torch(frame: FrameType) -> bool:
    """Return whether ``frame`` belongs to torch or to the handler of a mode."""
    return frame.f_code.co_name == "__torch_function__" or frame.f_code.co_filename.startswith(TORCH)


def batch_of_arguments(arguments: Any) -> Any:
    """Return the number of sequences of the PackedSequence in ``arguments``; None if there is none, or
    outside of a capture."""
    mode = _MODE.get()
    if mode is None:
        return None
    leaves = pytree.tree_leaves(arguments, is_leaf=lambda leaf: isinstance(leaf, PackedSequence))
    packed = next((leaf for leaf in leaves if isinstance(leaf, PackedSequence)), None)
    return None if packed is None else mode.batch_of(packed.batch_sizes)


@contextmanager
def call_with_batch(batch: Any) -> Iterator[None]:
    """Make ``batch_in_call`` return ``batch`` while the context is active."""
    token = _BATCH_IN_CALL.set(batch)
    try:
        yield
    finally:
        _BATCH_IN_CALL.reset(token)


def batch_in_call() -> Any:
    """Return the number of sequences of the PackedSequence in the call whose shapes are being computed; None
    if there is none."""
    # Dynamo cannot read a ContextVar; none of our captures is its.
    return None if torch.compiler.is_dynamo_compiling() else _BATCH_IN_CALL.get()
