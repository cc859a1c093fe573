"""The shapes of the results of a user's module: by fake tensors, or by calls with values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from torchq_compat.capture.call_layouts import Structure, input_labels
from torchq_compat.capture.opaque_stub import FakeCall
from torchq_compat.capture.sizes.numbers import plain
from torchq_compat.capture.sizes.size_reads import current_reads
from torchq_compat.errors import CustomModuleError, TorchQCompatError
from torchq_compat.model.graph_module import record_of
from torchq_compat.modules.registry import Parent, handlers
from torchq_compat.support.graph_nodes import copied_model, tensors_in
from torchq_compat.support.process_state import alone, draws_kept, own_attribute
from torchq_compat.support.upstream import FakeTensorMode, detect_fake_mode, disable_current_modes

# Finds the shapes of a module's results if fake tensors fail: the module branches on data, or leaves torch.
#
# The module is run on real tensors, of zeros and of ones. At other sizes it is run again: how its results
# depend on these cannot be seen.


def probe(module: nn.Module, path: str, args: Any, kwargs: Any) -> Any:
    """Return empty tensors of the shapes and dtypes of ``module(*args, **kwargs)``, in the same structure.

    Raises:
        CustomModuleError: if the module fails on example data, or its shapes depend on the data.
    """
    inputs, tensors, sizes = Structure.take_apart_with_sizes((args, kwargs))
    kind = type(module).__name__
    shapes = [[*map(_value, tensor.shape)] for tensor in tensors]

    def run(fill: Callable[..., Tensor]) -> tuple[Structure, list[Tensor]]:
        # Inside torch.export every new tensor would be fake.
        with disable_current_modes():
            given = zip(tensors, shapes, strict=True)
            real = [
                fill(shape, dtype=tensor.dtype, device=_device(tensor, module)) for tensor, shape in given
            ]
            real_args, real_kwargs = inputs.put_together(real, [*map(_value, sizes)])
            try:
                with alone(), draws_kept(), torch.no_grad():
                    return Structure.take_apart(copied_model(module)(*real_args, **real_kwargs))
            except Exception as cause:
                raise CustomModuleError.of(
                    "TQ942.shapes_unknown", kind=kind, path=path, cause=cause
                ) from cause

    outputs, results = run(torch.zeros)
    try:
        other_outputs, others = run(torch.ones)
    except CustomModuleError:  # As where a mask hides all there is.
        other_outputs, others = run(_ones_but_in_masks)
    if outputs != other_outputs or [*map(_form, results)] != [*map(_form, others)]:
        raise CustomModuleError.of("TQ942.shapes_depend_on_data", kind=kind, path=path)
    empty = (tensors[0].new_empty(result.shape, dtype=result.dtype) for result in results)
    return outputs.put_together(empty)


def _ones_but_in_masks(shape: list[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return ones; of truth values only the last in each row are true, and none where there is but one."""
    result = torch.ones(shape, dtype=dtype, device=device)
    if dtype is torch.bool and shape:
        result[..., : max(1, shape[-1] - 1)] = False
    return result


def _value(size: Any) -> int:
    return int(plain(size))


def _form(result: Tensor) -> tuple[Any, ...]:
    return tuple(result.shape), result.dtype


def _device(tensor: Tensor, module: nn.Module) -> torch.device:
    """Return the device of ``tensor``; that of the module's weights for one that is a shape only."""
    if not tensor.is_meta:
        return tensor.device
    return next((weight.device for weight in _weights(module).values()), torch.device("cpu"))


# Computes the shapes of a module's results by running it on fake tensors.


def fake_call_of(module: nn.Module, path: str, *, decides_at_calls: bool = True) -> WholeCall:
    """Return a function that runs ``module`` on fake tensors; its parameters may be real.

    Submodules that a handler keeps opaque, such as recurrent modules, are replaced by the handler's fake
    calls. A module that needs data is run on example data; see ``probe``.

    Args:
        decides_at_calls: whether the module's Python decides by sizes at each call; if not, what it decides
            here holds for all.

    Raises:
        CustomModuleError: on the call, if no shapes can be found, or the module writes to an input.
    """
    # During torch.export the module itself has fake parameters, and its calls are recorded.
    return WholeCall(copied_model(module), path, decides_at_calls)


class WholeCall:
    """See ``fake_call_of``."""

    def __init__(self, real: nn.Module, path: str, decides_at_calls: bool) -> None:
        self._real, self._path, self._decides_at_calls = real, path, decides_at_calls
        # On fake tensors torch writes its recurrent operator out, for as many steps as are tried.
        self._needs_data = is_users_own(real)
        self._faked = real if self._needs_data else _with_fake_calls_inside(real, path)

    @functools.cached_property
    def _shapes(self) -> _OnShapes:
        return _OnShapes(self._faked, self._path)

    def on_shapes(self) -> FakeCall:
        """Return a function for tensors on the meta device, which keeps weights only if the module needs
        data."""
        return self if self._needs_data else self._shapes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        reads = current_reads()
        with nullcontext() if reads is None or not self._decides_at_calls else reads.apart():
            if not self._needs_data:
                is_meta = any(tensor.is_meta for tensor in tensors_in((args, kwargs)))
                try:
                    if is_meta:
                        return self._shapes(*args, **kwargs)
                    return _run(self._faked, type(self._real), self._path, args, kwargs)
                except TorchQCompatError:
                    raise
                except Exception:
                    pass  # Data may tell.
            result = probe(self._real, self._path, args, kwargs)
            self._needs_data = True
            if reads is not None:
                reads.decide_unseen()
            return result


class _OnShapes:
    """Runs a module on tensors of which only the shapes are read, and keeps none of its weights, except for a
    converted model, which would be lowered again for others."""

    def __init__(self, module: nn.Module, path: str) -> None:
        self._path, self._module = path, module
        self._has_weights = any(record_of(part) is not None for part in module.modules())
        if not self._has_weights:
            with disable_current_modes():
                self._module = copied_model(module).to("meta")
        self._devices = {name: weight.device for name, weight in _weights(module).items()}
        self._parameters = {name for name, item in module.named_parameters() if item.is_floating_point()}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, (inputs, tensors, sizes) = self._module, Structure.take_apart_with_sizes((args, kwargs))
        if isinstance(module, torch.jit.ScriptModule):
            return _run(module, type(module), self._path, args, kwargs)
        device = next(iter(self._devices.values()), torch.device("cpu"))
        outer = detect_fake_mode(tensors)
        # Not on the meta device: the module may make tensors of its own, and name no device. With gradients:
        # without them modules of torch take ways with nested tensors, of which there are no fake ones.
        with alone(), outer or self._mode, torch.inference_mode(mode=False), torch.enable_grad():
            given = inputs.put_together([_like(tensor, device) for tensor in tensors], sizes)
            call: Callable[..., Any] = module
            if not self._has_weights:
                weights = self._own_fakes if outer is None else self._fakes()
                call = partial(_with_weights, module, weights)
            outputs, results = Structure.take_apart(_run(call, type(module), self._path, *given))
        return outputs.put_together([_like(result, torch.device("meta")) for result in results])

    @functools.cached_property
    def _mode(self) -> FakeTensorMode:
        return FakeTensorMode()

    @functools.cached_property
    def _own_fakes(self) -> dict[str, Tensor]:
        """The weights in the mode of its own, for all calls."""
        return self._fakes()

    def _fakes(self) -> dict[str, Tensor]:
        return {
            name: _like(weight, self._devices[name]).requires_grad_(name in self._parameters)
            for name, weight in _weights(self._module).items()
        }


def _weights(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _like(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


def _with_weights(module: nn.Module, weights: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
    return functional_call(module, weights, args, kwargs)


def _run(call: Callable[..., Any], kind: type[nn.Module], path: str, args: Any, kwargs: Any) -> Any:
    inputs, tensors = Structure.take_apart((args, kwargs))
    versions = [tensor._version for tensor in tensors]
    with alone(), draws_kept(), _real_parameters_allowed(tensors):
        result = call(*args, **kwargs)
    for label, tensor, version in zip(input_labels(kind, inputs), tensors, versions, strict=True):
        if tensor._version != version:
            raise CustomModuleError.of("TQ942.changes_input", path=path, label=label)
    return result


class FakeCaller(Parent):
    """Replaces a module whose handler computes its shapes."""

    def __init__(self, original: nn.Module, fake_call: FakeCall) -> None:
        super().__init__(original)
        self.fake_call = fake_call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.fake_call(*args, **kwargs)


def _with_fake_calls_inside(module: nn.Module, path: str) -> nn.Module:
    """Return a copy of ``module`` with opaque submodules replaced; ``module`` itself if there are none."""
    known: dict[str, Callable[[nn.Module, str], FakeCall]] = {}
    for name, child in module.named_modules():
        handler = next((h for h in handlers() if h.is_opaque(child)), None)
        if name and (handler is not None or is_users_own(child)):
            known[name] = fake_call_of if handler is None else handler.fake_call
    if not known:
        return module
    copied = copied_model(module)
    for name, fake_call in known.items():
        child = copied.get_submodule(name)
        copied.set_submodule(name, FakeCaller(child, fake_call(child, f"{path}.{name}")))
    return copied


def is_users_own(module: nn.Module) -> bool:
    """Return whether ``module`` is user code on a class of a handler; see ``CustomModuleHandler``."""
    return any(handler.is_users_own(module) for handler in handlers())


@contextmanager
def _real_parameters_allowed(tensors: list[Tensor]) -> Iterator[None]:
    mode = detect_fake_mode(tensors)
    if mode is None:
        yield
        return
    # A branch on data creates an unbacked symbol, whose value only data would give.
    unbacked = nullcontext() if mode.shape_env is None else mode.shape_env.ignore_fresh_unbacked_symbols()
    with own_attribute(mode, "allow_non_fake_inputs", True), unbacked:
        yield
