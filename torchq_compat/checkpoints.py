"""Checkpoints that are whole or not there: a killed save leaves the old file, a bad one is refused."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchq_compat.errors import CheckpointError
from torchq_compat.support.argument_checks import (
    ANYTHING,
    PATH,
    Expected,
    checked_arguments,
    instance_of,
    mapping_of,
    optional,
    shown,
)
from torchq_compat.support.atomic_files import whole_file

__all__ = ["load_checkpoint", "save_checkpoint"]


MODULE = instance_of(nn.Module, what="an nn.Module")
BY_NAME = mapping_of(instance_of(str), ANYTHING)
STATE = Expected(
    f"{MODULE.what}, or {BY_NAME.what}",
    lambda value: bool(MODULE.accepts(value) or (BY_NAME.accepts(value) and value)),
    MODULE.classes,
)


@checked_arguments(state=STATE, path=PATH)
def save_checkpoint(state: nn.Module | Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write ``state``, a module's state_dict or a mapping of such, to ``path`` in one step.

    The file is written beside ``path`` and moved over it when it is complete and on disk.

    Raises:
        CheckpointError: a value that cannot be saved.
        OSError: the file cannot be written; one that was there is left.
    """
    content = state.state_dict() if isinstance(state, nn.Module) else dict(state)
    with whole_file(Path(path)) as file:
        try:
            torch.save(content, file)
        except (pickle.PicklingError, AttributeError, TypeError) as cause:
            raise _not_written(Path(path).name, cause) from cause


@checked_arguments(path=PATH, model=optional(MODULE))
def load_checkpoint(path: str | os.PathLike[str], model: nn.Module | None = None) -> dict[str, Any]:
    """Read what ``save_checkpoint`` wrote, tensors and plain values only; load it into ``model`` if given.

    Raises:
        CheckpointError: the file is no whole checkpoint, or does not fit ``model``, which then is unchanged.
    """
    try:
        content: dict[str, Any] = torch.load(path, weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as cause:
        raise _unreadable(Path(path).name, cause) from cause
    if not BY_NAME.accepts(content):
        raise CheckpointError.not_a_state(shown(content))
    if model is not None:
        model.load_state_dict(content)
    return content


def _not_written(path: str, cause: BaseException) -> CheckpointError:
    first_line = str(cause).strip().split("\n", 1)[0]
    return CheckpointError(
        f"the state cannot be saved to {path}: {type(cause).__name__}: {first_line}",
        hint="it has to hold tensors and plain values only; a file that was there is as it was.",
    )


def _unreadable(path: str, cause: BaseException) -> CheckpointError:
    first_line = str(cause).strip().split("\n", 1)[0]
    return CheckpointError(
        f"the checkpoint {path} cannot be read: {type(cause).__name__}: {first_line}",
        hint="it may have been cut off while it was written; save_checkpoint replaces a file only when "
        "the new one is whole, so an older copy of it would be.",
    )
