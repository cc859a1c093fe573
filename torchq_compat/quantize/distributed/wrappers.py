"""The wrappers of torch.distributed around a prepared model: taken off, or refused with what to do."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from torchq_compat.errors import ConvertError, InputError


def is_sharded(tensor: Tensor) -> bool:
    """Return whether each rank has a part of ``tensor`` only."""
    if not dist.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def _inside(model: Any) -> Any:
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        return model.module
    return model._modules.get("_orig_mod") if isinstance(model, nn.Module) else None


def check_not_wrapped(model: nn.Module) -> None:
    """Raise if ``model``, which is to be prepared, is distributed already.

    Raises:
        InputError: a wrapper holds it, or its parameters are sharded.
    """
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        problem = f"a {type(model).__name__}, which holds the model"
    elif any(map(is_sharded, model.parameters())):
        problem = f"sharded: each rank has parts of the parameters of this {type(model).__name__}"
    else:
        return
    raise InputError.of("TQ901.wrapped_model", problem=problem)


def unwrapped(model: Any, function: str) -> Any:
    """Return ``model`` without the wrappers of DistributedDataParallel, DataParallel and torch.compile.

    Raises:
        ConvertError: FullyShardedDataParallel holds it, which has only parts of its weights.
    """
    while (inner := _inside(model)) is not None:
        model = inner
    if not dist.is_available():
        return model
    from torch.distributed.fsdp import FullyShardedDataParallel

    if isinstance(model, nn.Module) and any(isinstance(m, FullyShardedDataParallel) for m in model.modules()):
        raise ConvertError.of("TQ950.fsdp1", function=function)
    return model
