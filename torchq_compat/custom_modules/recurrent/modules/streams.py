"""States that outlive a call: while streams are active, a recurrent call begins with its last state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchq_compat.errors import InputError

__all__ = ["CallKey", "Streams", "active_streams"]

#: (path of the module, index of its call in the graph)
CallKey = tuple[str, int]
State = tuple[Tensor, ...]


@dataclass
class Streams:
    """The states of the recurrent calls that keep their state.

    Attributes:
        kept: the calls that keep their state.
        states: after the last call, (L*D, B, width) each; (L*D, width) for a model without a batch.
        initial: the states before the first call.
        buffers: whether ``states`` are buffers of a program that is being exported, written in place.
    """

    kept: frozenset[CallKey]
    states: dict[CallKey, State] = field(default_factory=dict)
    initial: dict[CallKey, State] = field(default_factory=dict)
    buffers: bool = False

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make recurrent modules use these streams inside the ``with`` block."""
        token = _ACTIVE.set(self)
        try:
            yield
        finally:
            _ACTIVE.reset(token)

    def call(self, key: CallKey, begin: Callable[[], State], run: Callable[[State], Any]) -> Any:
        """Run a kept call from its kept state, or from ``begin()`` the first time, and keep its last state.

        Args:
            run: state -> (output, last state); the last state is a tuple, or the tensor if there is only one.

        Raises:
            InputError: if the number of streams differs from the last call's.
        """
        first = begin()
        state = self.states.get(key)
        if state is None:
            state = self.initial[key] = first
        elif state[0].shape != first[0].shape:
            raise _other_streams(state[0].shape[-2], first[0].shape[-2])
        result = run(state)
        last = result[1] if isinstance(result[1], tuple) else (result[1],)
        if self.buffers:
            for buffer, new in zip(self.states[key], last, strict=True):
                buffer.copy_(new)
        else:
            self.states[key] = tuple(each.detach() for each in last)
        return result

    def reset(self, indices: Sequence[int] | Tensor | None = None) -> None:
        """Restore the initial states of all streams, or of those at ``indices`` in the batch.

        Raises:
            InputError: if there is no such stream.
        """
        if indices is None:
            self.states.clear()
            self.initial.clear()
            return
        given = torch.as_tensor(indices)
        is_mask = given.dtype is torch.bool
        rows = (given.nonzero() if is_mask else given).reshape(-1).long()
        for state in self.states.values():
            count = state[0].shape[-2]
            if is_mask and given.shape != (count,):
                raise _no_such_stream(given.tolist(), count)
            if rows.numel() and (int(rows.max()) >= count or int(rows.min()) < -count):
                raise _no_such_stream(rows.tolist(), count)
        for key, state in self.states.items():
            self.states[key] = tuple(
                _with_rows(each, first, rows) for each, first in zip(state, self.initial[key], strict=True)
            )


_ACTIVE: ContextVar[Streams | None] = ContextVar("torchq_compat_streams", default=None)


def active_streams() -> Streams | None:
    """Return the active streams; None outside of a streaming model."""
    return _ACTIVE.get()


def _with_rows(state: Tensor, first: Tensor, rows: Tensor) -> Tensor:
    changed = state.clone()
    changed[..., rows.to(state.device), :] = first[..., rows.to(state.device), :]
    return changed


def _other_streams(kept: int, given: int) -> InputError:
    return InputError(
        f"a chunk of {given} streams was given where states of {kept} are kept.",
        hint="give chunks of the same batch, or call reset() before another one; reset(indices) begins "
        "single streams again.",
    )


def _no_such_stream(given: object, count: int) -> InputError:
    return InputError(
        f"reset: the streams {given} were named where {count} are kept.",
        hint=f"name streams by their place in the batch, 0 to {count - 1}, or give a mask of {count}.",
    )
