"""Checkpoints that are whole or not there: a killed save leaves the old file, a bad one is refused."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchq_compat.errors import CheckpointError
from torchq_compat.whole_files import whole_file

__all__ = ["load_checkpoint", "save_checkpoint"]


def save_checkpoint(state: nn.Module | Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write ``state``, a module's state_dict or a mapping of such, to ``path`` in one step.

    The file is written beside ``path`` and moved over it when it is complete and on disk.
    """
    content = state.state_dict() if isinstance(state, nn.Module) else dict(state)
    with whole_file(Path(path)) as file:
        torch.save(content, file)


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
        raise CheckpointError.unreadable(Path(path).name, cause) from cause
    if model is not None:
        model.load_state_dict(content)
    return content
