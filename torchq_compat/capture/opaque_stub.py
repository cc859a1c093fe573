"""The opaque op, which represents a custom module in torch.export."""

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

from torchq_compat.capture.call_layouts import CallLayout, LeafKind, Structure
from torchq_compat.capture.packed_sequences import batch_of_arguments, call_with_batch
from torchq_compat.capture.sizes.size_reads import current_reads
from torchq_compat.errors import CustomModuleError

# The opaque op, which represents a custom module in torch.export.
#
# During capture a ``CaptureStub`` takes the place of the float module. It flattens its arguments and calls
# one custom operator, of which torch.export runs only the fake kernel; so the module is never traced, and
# none of its sizes is fixed. After capture every such node becomes a ``call_module`` of the observed
# module.


@dataclass
class CallResults:
    """The results of opaque calls during capture.

    Attributes:
        results: the nested results that the model receives.
        returns_whole_result: whether the model returns one of them as it is.
    """

    results: list[Any] = field(default_factory=list)
    returns_whole_result: bool = False

    def watch(self, model: nn.Module) -> RemovableHandle:
        """Record whether ``model`` returns one of the results during capture; return the hook's handle."""

        def note(_model: nn.Module, _args: Any, result: Any) -> None:
            self.returns_whole_result = any(result is whole for whole in self.results)

        return model.register_forward_hook(note)


#: Computes the nested result of a call from fake arguments: shapes and dtypes only.
FakeCall = Callable[..., Any]


@dataclass
class _Stub:
    fake_call: FakeCall
    layouts: list[CallLayout] = field(default_factory=list)


@dataclass
class StubRegistry:
    """The stubs of one capture.

    Attributes:
        by_handle: each stub's fake call and the layouts of its calls in order, by handle.
        results: the results of the calls.
    """

    by_handle: dict[str, _Stub] = field(default_factory=dict)
    results: CallResults = field(default_factory=CallResults)

    def add(self, handle: str, original: nn.Module, fake_call: FakeCall) -> CaptureStub:
        """Register a stub and return the module to put in the place of ``original``."""
        self.by_handle[handle] = _Stub(fake_call)
        return CaptureStub.standing_for(original, handle)

    def layouts(self, handle: str) -> list[CallLayout]:
        return self.by_handle[handle].layouts

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make the opaque op resolve its handles in this registry while the context is active."""
        token = _REGISTRY.set(self)
        try:
            yield
        finally:
            _REGISTRY.reset(token)

    @contextmanager
    def capturing(self, model: nn.Module) -> Iterator[None]:
        """Be active while ``model`` is captured. If ``model`` runs again because the first attempt failed,
        the calls of the earlier run are forgotten."""
        hook = model.register_forward_pre_hook(lambda _model, _args: self._forget_calls())
        try:
            with self.active():
                yield
        finally:
            hook.remove()

    def _forget_calls(self) -> None:
        for stub in self.by_handle.values():
            stub.layouts.clear()


_REGISTRY: ContextVar[StubRegistry] = ContextVar("torchq_compat_stubs")


#: The attribute of a CaptureStub with the module that it replaces.
ORIGINAL = "stub_original"


class CaptureStub(nn.Module):
    """A replacement of a custom module during capture.

    It has the class, attributes and parameters of the original: models check ``isinstance(self.rnn,
    nn.LSTM)``, read ``self.lstm.hidden_size``, or make a state with
    ``next(self.parameters()).new_zeros(...)``.
    """

    def __init__(self, handle: str, original: nn.Module) -> None:
        # Not super().__init__, which may be that of the original's class.
        nn.Module.__init__(self)
        self.stub_handle = handle
        if isinstance(original, torch.jit.ScriptModule):
            # No submodule: torch.export refuses the parameters of TorchScript.
            vars(self)[ORIGINAL] = original
        else:
            self.stub_original = original
        self.training = original.training

    @classmethod
    def standing_for(cls, original: nn.Module, handle: str) -> CaptureStub:
        """Return a stub whose class also derives from the class of ``original``, except for a GraphModule and
        TorchScript, whose classes cannot be subclassed like this."""
        base = type(original)
        if isinstance(original, GraphModule | torch.jit.ScriptModule):
            return cls(handle, original)
        namespace = {"__module__": base.__module__, "__qualname__": base.__qualname__}
        caller: Any = object.__new__(type(base.__name__, (cls, base), namespace))
        CaptureStub.__init__(caller, handle, original)
        assert isinstance(caller, CaptureStub)
        return caller

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(vars(self).get(ORIGINAL) or super().__getattr__(ORIGINAL), name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Set a plain attribute: a parameter that the model assigns in its ``forward`` does not belong to the
        stub, and ``nn.Module`` would refuse a name that the original has."""
        vars(self)[name] = param

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        registry = _REGISTRY.get()
        stub = registry.by_handle[self.stub_handle]
        inputs, tensors, sizes = Structure.take_apart_with_sizes((args, kwargs))
        batch = batch_of_arguments((args, kwargs))
        # The structure is needed, but not the computation of shapes in the user's graph.
        with disable_proxy_modes_tracing(), call_with_batch(batch):
            outputs, shown, computed = Structure.take_apart_with_sizes(stub.fake_call(*args, **kwargs))
        self._check(inputs, outputs, computed)
        stub.layouts.append(CallLayout(inputs, outputs))
        # The batch, which only the fake kernel needs, comes behind the sizes of the layout.
        more = [] if batch is None else [batch]
        flat = torch.ops.torchq_compat.custom_module(
            tensors, [*sizes, *more], self.stub_handle, len(stub.layouts) - 1
        )
        if (reads := current_reads()) is not None:
            for made, each in zip(flat, shown, strict=True):
                reads.hand_on_sizes(made, like=each)
        result = outputs.put_together(_with_handed_on(flat, shown, tensors))
        registry.results.results.append(result)
        return result

    def _check(self, inputs: Structure, outputs: Structure, computed: list[Any]) -> None:
        for constant in (*inputs.constants(), *outputs.constants()):
            if any(isinstance(value, Tensor) for value in getattr(constant, "__dict__", {}).values()):
                raise _unknown_container(self.stub_handle, constant)
        if computed:
            raise CustomModuleError(
                f"the module at {self.stub_handle!r} returns an integer computed from the sizes of its "
                "inputs.",
                hint="take the size from a tensor outside the module: x.shape[0].",
            )


@torch.library.custom_op("torchq_compat::custom_module", mutates_args=())
def _custom_module(tensors: list[Tensor], sizes: list[int], handle: str, layout: int) -> list[Tensor]:
    raise RuntimeError("torchq_compat::custom_module exists during capture only")


@_custom_module.register_fake
def _custom_module_fake(tensors: list[Tensor], sizes: list[int], handle: str, layout: int) -> list[Tensor]:
    stub = _REGISTRY.get().by_handle[handle]
    inputs = stub.layouts[layout].inputs
    args, kwargs = inputs.put_together(tensors, sizes)
    with call_with_batch(next(iter(sizes[inputs.count(LeafKind.SIZE) :]), None)):
        _, results = Structure.take_apart(stub.fake_call(*args, **kwargs))
    # An operator must not return its argument.
    return [torch.empty_like(each) if any(each is given for given in tensors) else each for each in results]


OPAQUE_OP = torch.ops.torchq_compat.custom_module.default


def _with_handed_on(results: list[Tensor], shown: list[Tensor], tensors: list[Tensor]) -> list[Tensor]:
    """Return ``results``, with the argument itself in place of each result that is an argument in ``shown``,
    such as the batch sizes of a PackedSequence."""
    return [
        next((given for given in tensors if given is each), result)
        for result, each in zip(results, shown, strict=True)
    ]


def _unknown_container(path: str, found: object) -> CustomModuleError:
    name = f"{type(found).__module__}.{type(found).__qualname__}"
    return CustomModuleError(
        f"the module at {path!r} is given, or returns, a {name}, which holds tensors "
        "but is no tuple, list, dict or dataclass.",
        hint=f"make {type(found).__name__} a dataclass, or register it with torch.utils._pytree.",
    )


# Records the arguments of custom modules while the float model runs on the example inputs.


@dataclass
class RecordedCalls:
    """The tensor arguments of recorded calls.

    Attributes:
        tensors: the tensors of each call, by handle, in the order of the calls.
    """

    tensors: dict[str, list[list[Tensor]]] = field(default_factory=dict)

    @contextmanager
    def recording(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Record the tensors that ``modules``, by handle, are called with while the context is active."""

        def keep(handle: str) -> Callable[..., None]:
            def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
                _, tensors = Structure.take_apart((args, kwargs))
                self.tensors.setdefault(handle, []).append([tensor.detach().clone() for tensor in tensors])

            return hook

        hooks = [
            module.register_forward_pre_hook(keep(handle), with_kwargs=True)
            for handle, module in modules.items()
            if not isinstance(module, torch.jit.ScriptModule)  # It takes no hooks.
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
