"""The opaque leaf op: how a custom module looks to torch.export.

During capture a ``LeafCaller`` stands where the float module was. It flattens its arguments and calls one
custom operator, of which torch.export sees only the fake kernel; so the module inside is never traced and
no size of it is fixed. After capture every such node becomes a ``call_module`` of the observed module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils.hooks import RemovableHandle

from torchq_compat.custom_modules.layouts import CallLayout, Structure
from torchq_compat.errors import CustomModuleError

__all__ = ["LEAF_OP", "ORIGINAL", "CaptureSession", "LeafCaller"]

#: Computes the nested result of a call from fake arguments: shapes and dtypes only.
FakeCall = Callable[..., Any]


@dataclass
class _Leaf:
    fake_call: FakeCall
    layouts: list[CallLayout] = field(default_factory=list)


@dataclass
class CaptureSession:
    """The leaves of one capture, by handle, and the layouts of their calls in the order of the calls."""

    leaves: dict[str, _Leaf] = field(default_factory=dict)
    #: The tensors of each call in a run on the example inputs, by handle, in the order of the calls.
    examples: dict[str, list[list[Tensor]]] = field(default_factory=dict)
    #: What the calls returned, nested as the model gets it.
    results: list[Any] = field(default_factory=list)
    #: Whether the model returns the very result of a call.
    returns_whole_result: bool = False

    def add(self, handle: str, original: nn.Module, fake_call: FakeCall) -> LeafCaller:
        """Register a leaf and return the module to put in the place of ``original``."""
        self.leaves[handle] = _Leaf(fake_call)
        return LeafCaller.standing_for(original, handle)

    def layouts(self, handle: str) -> list[CallLayout]:
        return self.leaves[handle].layouts

    @contextmanager
    def recording(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Keep the tensors that ``modules``, by handle, are called with in the meantime."""

        def keep(handle: str) -> Callable[..., None]:
            def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
                _, tensors = Structure.take_apart((args, kwargs))
                self.examples.setdefault(handle, []).append([tensor.detach().clone() for tensor in tensors])

            return hook

        hooks = [
            module.register_forward_pre_hook(keep(handle), with_kwargs=True)
            for handle, module in modules.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def watch(self, model: nn.Module) -> RemovableHandle:
        """Note what ``model`` returns while it is captured."""

        def note(_model: nn.Module, _args: Any, result: Any) -> None:
            self.returns_whole_result = any(result is whole for whole in self.results)

        return model.register_forward_hook(note)

    @contextmanager
    def active(self) -> Iterator[None]:
        """The leaf op resolves its handles in this session for the duration."""
        token = _SESSION.set(self)
        try:
            yield
        finally:
            _SESSION.reset(token)


_SESSION: ContextVar[CaptureSession] = ContextVar("torchq_compat_capture_session")


#: Where a LeafCaller keeps the module it stands for.
ORIGINAL = "leaf_original"


class LeafCaller(nn.Module):
    """Stands for a custom module during capture.

    Class, attributes and parameters are those of the original: models ask ``isinstance(self.rnn, nn.LSTM)``,
    read ``self.lstm.hidden_size``, or make a state with ``next(self.parameters()).new_zeros(...)``.
    """

    def __init__(self, handle: str, original: nn.Module) -> None:
        # Not super().__init__: that may be the original's class.
        nn.Module.__init__(self)
        self.leaf_handle = handle
        self.leaf_original = original
        self.training = original.training

    @classmethod
    def standing_for(cls, original: nn.Module, handle: str) -> LeafCaller:
        """A caller of a subclass of the class of ``original``; a graph's class cannot be added to."""
        base = type(original)
        if isinstance(original, GraphModule):
            return cls(handle, original)
        namespace = {"__module__": base.__module__, "__qualname__": base.__qualname__}
        caller: Any = object.__new__(type(base.__name__, (cls, base), namespace))
        LeafCaller.__init__(caller, handle, original)
        assert isinstance(caller, LeafCaller)
        return caller

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__(ORIGINAL), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        session = _SESSION.get()
        leaf = session.leaves[self.leaf_handle]
        inputs, tensors, sizes = Structure.take_apart_with_sizes((args, kwargs))
        # Only the structure is wanted here, not the shape computation in the user's graph.
        with disable_proxy_modes_tracing():
            outputs, _, computed = Structure.take_apart_with_sizes(leaf.fake_call(*args, **kwargs))
        self._check(inputs, outputs, computed)
        leaf.layouts.append(CallLayout(inputs, outputs))
        flat = torch.ops.torchq_compat.custom_module(tensors, sizes, self.leaf_handle, len(leaf.layouts) - 1)
        result = outputs.put_together(flat)
        session.results.append(result)
        return result

    def _check(self, inputs: Structure, outputs: Structure, computed: list[Any]) -> None:
        for constant in (*inputs.constants(), *outputs.constants()):
            if any(isinstance(value, Tensor) for value in getattr(constant, "__dict__", {}).values()):
                raise CustomModuleError.unknown_container(self.leaf_handle, constant)
        if computed:
            raise CustomModuleError.returns_size(self.leaf_handle)


@torch.library.custom_op("torchq_compat::custom_module", mutates_args=())
def _custom_module(tensors: list[Tensor], sizes: list[int], handle: str, layout: int) -> list[Tensor]:
    raise RuntimeError("torchq_compat::custom_module exists during capture only")


@_custom_module.register_fake
def _custom_module_fake(tensors: list[Tensor], sizes: list[int], handle: str, layout: int) -> list[Tensor]:
    leaf = _SESSION.get().leaves[handle]
    args, kwargs = leaf.layouts[layout].inputs.put_together(tensors, sizes)
    _, results = Structure.take_apart(leaf.fake_call(*args, **kwargs))
    return results


LEAF_OP = torch.ops.torchq_compat.custom_module.default
