"""Example inputs as a caller gives them."""

from __future__ import annotations

from typing import Any

from torch.nn.utils.rnn import PackedSequence

from torchq_compat.errors import InputError

__all__ = ["MISSING", "read_example_inputs"]

#: Default of an argument that must be given, whose absence deserves words of ours.
MISSING: Any = object()


def read_example_inputs(value: Any) -> tuple[Any, ...]:
    """``value`` as a tuple of positional arguments.

    Raises:
        InputError: missing, no tuple or list, or holding a PackedSequence.
    """
    if value is MISSING or value is None:
        raise InputError.missing()
    if isinstance(value, list):
        value = tuple(value)
    if not isinstance(value, tuple):
        raise InputError.not_a_tuple(value)
    if any(isinstance(arg, PackedSequence) for arg in value):
        raise InputError.packed()
    return value
