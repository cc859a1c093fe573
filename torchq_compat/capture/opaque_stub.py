"""The opaque op, which represents a custom module in torch.export."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from torchq_compat.capture.call_layouts import CallLayout, LeafKind, Structure
from torchq_compat.capture.packed_sequences import batch_of_arguments, call_with_batch
from torchq_compat.capture.sizes.size_reads import ShapesOfCall, current_reads
from torchq_compat.errors import CustomModuleError
from torchq_compat.support.process_state import held

# During capture a ``CaptureStub`` takes the place of the float module. It flattens its arguments and calls
# one custom operator, of which torch.export runs only the fake kernel; so the module is never traced, and
# none of its sizes is fixed. After capture every such node becomes a ``call_module`` of the observed
# module.


#: Computes the nested result of a call from fake arguments: shapes and dtypes only.
FakeCall = Callable[..., Any]
#: A shape that no result has.
OF_ANOTHER_RANK = (0,) * 64


@dataclass
class _Stub:
    fake_call: FakeCall
    layouts: list[CallLayout] = field(default_factory=list)

    def on_shapes(self, index: int) -> ShapesOfCall:
        """Return what computes the shapes of the results of call ``index``, at any time after the capture."""
        layout = self.layouts[index]
        fake_call: FakeCall = getattr(self.fake_call, "on_shapes", lambda: self.fake_call)()

        def compute(tensors: list[Tensor], sizes: list[int]) -> list[Tensor]:
            args, kwargs = layout.inputs.put_together(tensors, sizes)
            outputs, results = Structure.take_apart(fake_call(*args, **kwargs))
            if outputs == layout.outputs:
                return results
            # Of another rank than any result, so that the guard on it refuses.
            return [torch.empty(OF_ANOTHER_RANK, device="meta")] * layout.outputs.count()

        return compute


@dataclass
class StubRegistry:
    """The stubs of one capture.

    Attributes:
        by_handle: each stub's fake call and the layouts of its calls in order, by handle.
        results: the nested results of the calls, which the model receives.
        returns_whole_result: whether the model returns one of them as it is.
    """

    by_handle: dict[str, _Stub] = field(default_factory=dict)
    results: list[Any] = field(default_factory=list)
    returns_whole_result: bool = False

    def add(self, handle: str, original: nn.Module, fake_call: FakeCall) -> CaptureStub:
        """Register a stub and return the module to put in the place of ``original``."""
        self.by_handle[handle] = _Stub(fake_call)
        return CaptureStub.standing_for(original, handle)

    def layouts(self, handle: str) -> list[CallLayout]:
        return self.by_handle[handle].layouts

    def active(self) -> AbstractContextManager[None]:
        """Make the opaque op resolve its handles in this registry while the context is active."""
        return standing_in(self)

    @contextmanager
    def capturing(self, model: nn.Module) -> Iterator[None]:
        """Be active while ``model`` is captured, and record whether it returns one of the results. If it runs
        again because the first attempt failed, the calls of the earlier run are forgotten."""

        def forget_calls(_model: nn.Module, _args: Any) -> None:
            for stub in self.by_handle.values():
                stub.layouts.clear()

        def note(_model: nn.Module, _args: Any, result: Any) -> None:
            self.returns_whole_result = any(result is whole for whole in self.results)

        with model.register_forward_pre_hook(forget_calls), model.register_forward_hook(note), self.active():
            yield

    def fake_results(self, tensors: list[Tensor], sizes: list[int], handle: str, layout: int) -> list[Tensor]:
        """Return the flat results of call ``layout`` of the stub ``handle``."""
        stub = self.by_handle[handle]
        inputs = stub.layouts[layout].inputs
        args, kwargs = inputs.put_together(tensors, sizes)
        with call_with_batch(next(iter(sizes[inputs.count(LeafKind.SIZE) :]), None)):
            _, results = Structure.take_apart(stub.fake_call(*args, **kwargs))
        # An operator must not return its argument.
        return [
            torch.empty_like(result) if any(result is given for given in tensors) else result
            for result in results
        ]


#: What computes the fake results of the opaque op: a ``StubRegistry``, or ``HiddenCalls``.
_KERNELS: ContextVar[Any] = ContextVar("torchq_compat_fake_kernels")


def standing_in(kernels: Any) -> AbstractContextManager[None]:
    """Let ``kernels`` compute the fake results of the opaque op while the context is active."""
    return held(_KERNELS, kernels)


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
        registry: StubRegistry = _KERNELS.get()
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
        handed_on = [True] * len(shown)
        if (reads := current_reads()) is not None:
            compute = stub.on_shapes(len(stub.layouts) - 1) if batch is None else None
            has_constants = any(value is not None for value in outputs.constants())
            if not reads.know_results(flat, shown, compute, has_constants=has_constants):
                handed_on = outputs.holds_indices()
                stub.layouts[-1] = replace(stub.layouts[-1], ranks=tuple(item.dim() for item in shown))
        result = outputs.put_together(_with_handed_on(flat, shown, tensors, handed_on))
        registry.results.append(result)
        return result

    def _check(self, inputs: Structure, outputs: Structure, computed: list[Any]) -> None:
        for constant in (*inputs.constants(), *outputs.constants()):
            if any(isinstance(value, Tensor) for value in getattr(constant, "__dict__", {}).values()):
                raise _unknown_container(self.stub_handle, constant)
        if computed:
            raise CustomModuleError.of("TQ940.size_result", path=self.stub_handle)


@torch.library.custom_op("torchq_compat::custom_module", mutates_args=())
def _custom_module(tensors: list[Tensor], sizes: list[int], handle: str, layout: int) -> list[Tensor]:
    raise RuntimeError("torchq_compat::custom_module exists during capture only")


@_custom_module.register_fake
def _custom_module_fake(tensors: list[Tensor], sizes: list[int], handle: str, layout: int) -> list[Tensor]:
    results: list[Tensor] = _KERNELS.get().fake_results(tensors, sizes, handle, layout)
    return results


OPAQUE_OP = torch.ops.torchq_compat.custom_module.default


def _with_handed_on(
    results: list[Tensor], shown: list[Tensor], tensors: list[Tensor], handed_on: list[bool]
) -> list[Tensor]:
    """Return ``results``, with the argument itself in place of each result that may be ``handed_on`` and is
    an argument in ``shown``, such as the batch sizes of a PackedSequence."""
    return [
        next((given for given in tensors if given is item), result) if may_be else result
        for result, item, may_be in zip(results, shown, handed_on, strict=True)
    ]


def _unknown_container(path: str, value: object) -> CustomModuleError:
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    return CustomModuleError.of("TQ940.unknown_container", path=path, name=name, value=value)


# Records the arguments of custom modules while the float model runs on the example inputs.


#: Handle -> the tensor arguments of each call, in order.
RecordedCalls = dict[str, list[list[Tensor]]]


@contextmanager
def recording(calls: RecordedCalls, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Add to ``calls`` the tensors that ``modules``, by handle, are called with in the context."""

    def keep(handle: str, _module: nn.Module, args: Any, kwargs: Any) -> None:
        _, tensors = Structure.take_apart((args, kwargs))
        calls.setdefault(handle, []).append([tensor.detach().clone() for tensor in tensors])

    with ExitStack() as hooks:
        for handle, module in modules.items():
            if not isinstance(module, torch.jit.ScriptModule):  # It takes no hooks.
                hook = module.register_forward_pre_hook(partial(keep, handle), with_kwargs=True)
                hooks.enter_context(hook)
        yield
