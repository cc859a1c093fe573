"""The wrappers of torch.distributed around a prepared model: taken off, or refused with what to do."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from torchq_compat.errors import ConvertError


def is_sharded(tensor: Tensor) -> bool:
    """Return whether each rank has a part of ``tensor`` only."""
    if not dist.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def unwrapped(model: Any, function: str) -> Any:
    """Return ``model`` without the wrapper of DistributedDataParallel.

    Raises:
        ConvertError: FullyShardedDataParallel holds it, which has only parts of its weights.
    """
    while isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    if not dist.is_available():
        return model
    from torch.distributed.fsdp import FullyShardedDataParallel

    if isinstance(model, nn.Module) and any(isinstance(m, FullyShardedDataParallel) for m in model.modules()):
        raise ConvertError(
            f"{function}: FullyShardedDataParallel holds the model, each rank a part of its weights.",
            hint="train with torch.distributed.fsdp.fully_shard(prepared) instead, whose models are taken as "
            "they are; or load the full state dict into a model prepared alike, and convert that one.",
        )
    return model
