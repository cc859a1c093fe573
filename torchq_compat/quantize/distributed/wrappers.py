"""The wrappers of torch.distributed around a prepared model: taken off, or refused with what to do."""

from typing import Any

import torch.distributed as dist
from torch import nn

from torchq_compat.errors import ConvertError, InputError
from torchq_compat.support.sharded import is_sharded


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
        raise InputError.of("TQ901.wrapped_model", problem=f"a {type(model).__name__}, which holds the model")
    check_not_sharded(model)


def check_not_sharded(model: nn.Module) -> None:
    if isinstance(model, nn.Module) and any(map(is_sharded, model.parameters())):
        problem = f"sharded: each rank has parts of the parameters of this {type(model).__name__}"
        raise InputError.of("TQ901.wrapped_model", problem=problem)


def unwrapped(model: Any, function: str) -> Any:
    """Return ``model`` without the wrappers of DistributedDataParallel, DataParallel and torch.compile, and
    without the weights that ``fully_shard`` left gathered after a call.

    Raises:
        ConvertError: FullyShardedDataParallel holds it, which has only parts of its weights.
    """
    while (inner := _inside(model)) is not None:
        model = inner
    if not dist.is_available():
        return model
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    for module in model.modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, FullyShardedDataParallel):
            raise ConvertError.of("TQ950.fsdp1", function=function)
        if isinstance(module, FSDPModule):
            module.reshard()
    return model
