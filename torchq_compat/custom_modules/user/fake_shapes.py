"""Computes the shapes of a module's results by running it on fake tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from torchq_compat.custom_modules.registry import handlers
from torchq_compat.custom_modules.user.probed_shapes import probe
from torchq_compat.errors import TorchQCompatError, UserModuleError
from torchq_compat.opaque_calls.capture_stub import FakeCall
from torchq_compat.opaque_calls.layouts import Structure
from torchq_compat.opaque_calls.tensor_labels import input_labels
from torchq_compat.support.model_copies import copied_model
from torchq_compat.support.upstream import detect_fake_mode

__all__ = ["fake_call_of"]


def fake_call_of(module: nn.Module, path: str) -> FakeCall:
    """Return a function that runs ``module`` on fake tensors; its parameters may be real.

    Submodules that a handler keeps opaque, such as recurrent modules, are replaced by the handler's fake
    calls. A module that needs data is run on example data; see ``probed_shapes``.

    Raises:
        CustomModuleError: on the call, if no shapes can be found, or the module writes to an input.
    """
    # During torch.export the module itself has fake parameters, and its calls are recorded.
    real = copied_model(module)
    faked = _with_fake_calls_inside(real, path)

    def fake(*args: Any, **kwargs: Any) -> Any:
        inputs, tensors = Structure.take_apart((args, kwargs))
        versions = [tensor._version for tensor in tensors]
        try:
            with _real_parameters_allowed(tensors), torch.random.fork_rng(devices=[]):
                result = faked(*args, **kwargs)
        except TorchQCompatError:
            raise
        except Exception:
            return probe(real, path, args, kwargs)
        for label, tensor, version in zip(input_labels(type(module), inputs), tensors, versions, strict=True):
            if tensor._version != version:
                raise UserModuleError(
                    f"the module at {path!r} changes its input {label} in place; behind a quantized boundary "
                    "nobody would see the change.",
                    hint="write the result to a new tensor and return it.",
                )
        return result

    return fake


class FakeCaller(nn.Module):
    """Replaces a module whose handler computes its shapes."""

    def __init__(self, original: nn.Module, fake_call: FakeCall) -> None:
        super().__init__()
        self.original = original
        self.fake_call = fake_call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.fake_call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("original"), name)


def _with_fake_calls_inside(module: nn.Module, path: str) -> nn.Module:
    """Return a copy of ``module`` with opaque submodules replaced; ``module`` itself if there are none."""
    known = {
        name: handler
        for name, child in module.named_modules()
        if name and (handler := next((h for h in handlers() if h.is_opaque(child)), None)) is not None
    }
    if not known:
        return module
    copied = copied_model(module)
    for name, handler in known.items():
        child = copied.get_submodule(name)
        copied.set_submodule(name, FakeCaller(child, handler.fake_call(child, f"{path}.{name}")))
    return copied


@contextmanager
def _real_parameters_allowed(tensors: list[Tensor]) -> Iterator[None]:
    mode = detect_fake_mode(tensors)
    if mode is None:
        yield
        return
    before = mode.allow_non_fake_inputs
    mode.allow_non_fake_inputs = True
    unbacked = nullcontext() if mode.shape_env is None else mode.shape_env.ignore_fresh_unbacked_symbols()
    try:
        # A branch on data creates an unbacked symbol, whose value only data would give.
        with unbacked:
            yield
    finally:
        mode.allow_non_fake_inputs = before
