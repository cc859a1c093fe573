"""The shapes of a module's results, from running it on fake tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode

from torchq_compat.custom_modules.labels import input_labels
from torchq_compat.custom_modules.layouts import Structure
from torchq_compat.custom_modules.leaf_op import FakeCall
from torchq_compat.custom_modules.user.errors import UserModuleError
from torchq_compat.errors import TorchQCompatError

__all__ = ["fake_call_of"]


def fake_call_of(module: nn.Module, path: str) -> FakeCall:
    """``module`` itself, run on fake tensors; its parameters may be real.

    Raises:
        CustomModuleError: on the call, if the module needs data, or writes to an input.
    """

    def fake(*args: Any, **kwargs: Any) -> Any:
        inputs, tensors = Structure.take_apart((args, kwargs))
        versions = [tensor._version for tensor in tensors]
        try:
            with _real_parameters_allowed(tensors), torch.random.fork_rng(devices=[]):
                result = module(*args, **kwargs)
        except TorchQCompatError:
            raise
        except Exception as cause:
            raise UserModuleError.shapes_unknown(path, type(module), cause) from cause
        for label, tensor, version in zip(input_labels(type(module), inputs), tensors, versions, strict=True):
            if tensor._version != version:
                raise UserModuleError.mutates_input(path, label)
        return result

    return fake


@contextmanager
def _real_parameters_allowed(tensors: list[Tensor]) -> Iterator[None]:
    mode = detect_fake_mode(tensors)
    if mode is None:
        yield
        return
    before = mode.allow_non_fake_inputs
    mode.allow_non_fake_inputs = True
    try:
        yield
    finally:
        mode.allow_non_fake_inputs = before
