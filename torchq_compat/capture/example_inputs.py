"""Example inputs as a caller gives them."""

from __future__ import annotations

from typing import Any

from torch.nn.utils.rnn import PackedSequence

from torchq_compat.errors import InputError

__all__ = ["MISSING", "read_example_inputs"]

#: Default of an argument that must be given, whose absence deserves words of ours.
MISSING: Any = object()


def read_example_inputs(value: Any) -> tuple[Any, ...]:
    """Return ``value`` as a tuple of positional arguments.

    Raises:
        InputError: missing, no tuple or list, or holding a PackedSequence.
    """
    if value is MISSING or value is None:
        raise InputError(
            "example_inputs is missing: torch.export captures the model by running it once.",
            hint="pass a tuple with one example of every argument, e.g. prepare_fx(model, mapping, (x,)).",
        )
    if isinstance(value, list):
        value = tuple(value)
    if not isinstance(value, tuple):
        raise InputError(
            f"example_inputs must be a tuple of positional arguments, got {type(value).__name__}.",
            hint="write example_inputs=(x,) with a trailing comma for a model of one argument.",
        )
    if any(isinstance(arg, PackedSequence) for arg in value):
        raise InputError(
            "example_inputs hold a PackedSequence, which torch.export cannot carry.",
            hint="capture the model with padded sequences; a prepared or converted recurrent module "
            "itself, say prepared.encoder, can be called with a PackedSequence.",
        )
    return value
