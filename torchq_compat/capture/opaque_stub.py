"""The opaque op, which represents a custom module in torch.export."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.fx.node import map_arg
from torch.utils.hooks import RemovableHandle

from torchq_compat.capture.call_layouts import CallLayout, LeafKind, Structure
from torchq_compat.capture.packed_sequences import batch_of_arguments, call_with_batch
from torchq_compat.capture.sizes.size_reads import current_reads
from torchq_compat.errors import CustomModuleError
from torchq_compat.support.process_state import held

# The opaque op, which represents a custom module in torch.export.
#
# During capture a ``CaptureStub`` takes the place of the float module. It flattens its arguments and calls
# one custom operator, of which torch.export runs only the fake kernel; so the module is never traced, and
# none of its sizes is fixed. After capture every such node becomes a ``call_module`` of the observed
# module.


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

    def watch(self, model: nn.Module) -> RemovableHandle:
        """Record whether ``model`` returns one of the results during capture; return the hook's handle."""

        def note(_model: nn.Module, _args: Any, result: Any) -> None:
            self.returns_whole_result = any(result is whole for whole in self.results)

        return model.register_forward_hook(note)

    def active(self) -> AbstractContextManager[None]:
        """Make the opaque op resolve its handles in this registry while the context is active."""
        return held(_KERNELS, self)

    @contextmanager
    def capturing(self, model: nn.Module) -> Iterator[None]:
        """Be active while ``model`` is captured. If ``model`` runs again because the first attempt failed,
        the calls of the earlier run are forgotten."""
        with model.register_forward_pre_hook(lambda _model, _args: self._forget_calls()), self.active():
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

    def _forget_calls(self) -> None:
        for stub in self.by_handle.values():
            stub.layouts.clear()


#: What computes the fake results of the opaque op: a ``StubRegistry``, or ``HiddenCalls``.
_KERNELS: ContextVar[Any] = ContextVar("torchq_compat_fake_kernels")


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
        if (reads := current_reads()) is not None:
            for built, item in zip(flat, shown, strict=True):
                reads.hand_on_sizes(built, like=item)
        result = outputs.put_together(_with_handed_on(flat, shown, tensors))
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


def _with_handed_on(results: list[Tensor], shown: list[Tensor], tensors: list[Tensor]) -> list[Tensor]:
    """Return ``results``, with the argument itself in place of each result that is an argument in ``shown``,
    such as the batch sizes of a PackedSequence."""
    return [
        next((given for given in tensors if given is item), result)
        for result, item in zip(results, shown, strict=True)
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


# Puts the opaque op in the places of the ``call_module`` nodes of a graph, while a
# user's Quantizer works on it.
#
# Quantizers run passes of exported programs, which know operators only and trace the graph anew. So every
# call is the opaque op for that long, of flat tensors and sizes; what a pass made of it is a call again
# afterwards. The check of input shapes that torch.export puts into a module is left out and put back.


#: A lookup in the nested result of a call: ``getitem`` or ``getattr``, and the key.
Lookup = tuple[Any, Any]


@dataclass(frozen=True)
class _Call:
    """One hidden call.

    Attributes:
        args: the arguments, made of ``leaves``, which the operator has as tensors, then sizes.
        results: the example value of each result, and the lookups that lead to it.
        is_flat: whether the call has its results as its own example value.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: tuple[Node, ...]
    results: tuple[tuple[Tensor, tuple[Lookup, ...]], ...]
    is_flat: bool


class HiddenCalls:
    """The calls of modules in one graph, hidden from a Quantizer by hiding them in ``model``."""

    def __init__(self, model: GraphModule) -> None:
        self._calls: list[_Call] = []
        self._modules: dict[str, nn.Module] = {}
        self._checks: list[str] = []
        for node in list(model.graph.nodes):
            if node.op == "call_module":
                self._hide(model, node)
        if self._modules:
            model.recompile()

    def active(self) -> AbstractContextManager[None]:
        """Let the operators of the hidden calls run on fake tensors while the context is active."""
        return held(_KERNELS, self)

    def fake_results(self, tensors: list[Tensor], sizes: list[int], handle: str, layout: int) -> list[Tensor]:
        """Return empty tensors like the results of the hidden call ``layout`` in the example."""
        return [
            torch.empty(value.shape, dtype=value.dtype, device=value.device)
            for value, _ in self._calls[layout].results
        ]

    def show(self, model: GraphModule) -> None:
        """Put the calls back into ``model``, the graph that was given or what a pass made of it."""
        for node in list(model.graph.nodes):
            if node.target is OPAQUE_OP:
                self._show(model, node)
        if self._calls:
            model.graph.lint()
            model.recompile()

    def show_checks(self, prepared: GraphModule) -> None:
        """Put the checks of input shapes into ``prepared``, before all observers."""
        inputs = prepared.graph.find_nodes(op="placeholder")
        for path in self._checks:
            prepared.add_submodule(path, self._modules[path])
            with prepared.graph.inserting_after(inputs[-1]):
                prepared.graph.call_module(path, tuple(inputs))
            prepared.recompile()

    def _hide(self, model: GraphModule, call: Node) -> None:
        path = str(call.target)
        inputs = model.graph.find_nodes(op="placeholder")
        if not call.users and call.args == tuple(inputs):
            self._checks.append(path)
            self._modules[path] = model.get_submodule(path)
            model.graph.erase_node(call)
            return
        ends = _ends(call)
        values = {leaf: leaf.meta.get("val") for leaf in call.all_input_nodes}
        tensors = [leaf for leaf, value in values.items() if isinstance(value, Tensor)]
        sizes = [leaf for leaf, value in values.items() if isinstance(value, (int, torch.SymInt))]
        if len(tensors) + len(sizes) < len(values) or ends is None:
            return  # A PackedSequence, or a result that is no tensor.
        self._modules[path] = model.get_submodule(path)
        is_flat = isinstance(call.meta.get("val"), (list, tuple))
        results: tuple[tuple[Tensor, tuple[Lookup, ...]], ...]
        if is_flat:
            results = tuple((value, ((operator.getitem, at),)) for at, value in enumerate(call.meta["val"]))
        else:
            results = tuple((end.meta["val"], lookups) for end, lookups in ends.items())
        self._calls.append(_Call(call.args, dict(call.kwargs), (*tensors, *sizes), results, is_flat))
        stand_in, layout = call, len(self._calls) - 1
        if results and not results[0][1]:
            with model.graph.inserting_before(call):
                stand_in = model.graph.call_function(OPAQUE_OP)
            stand_in.meta = dict(call.meta)
        _write(stand_in, "call_function", OPAQUE_OP, (tensors, sizes, path, layout), {})
        stand_in.meta["val"] = [value for value, _ in results]
        for index, end in enumerate(ends):
            before = end.args[0]
            if not is_flat:
                _write(end, "call_function", operator.getitem, (stand_in, index), {})
            while isinstance(before, Node) and before is not call and not before.users:
                unused = before
                before = unused.args[0]
                model.graph.erase_node(unused)

    def _show(self, model: GraphModule, stand_in: Node) -> None:
        tensors, sizes, path, layout = stand_in.args
        assert isinstance(path, str)
        assert isinstance(layout, int)
        call = self._calls[layout]
        given = dict(zip(call.leaves, (*tensors, *sizes), strict=True))  # type: ignore[misc]
        args = map_arg(call.args, given.__getitem__)
        kwargs = map_arg(call.kwargs, given.__getitem__)
        if path not in dict(model.named_modules()):
            model.add_submodule(path, self._modules[path])
        ends = {int(user.args[1]): user for user in stand_in.users}  # type: ignore[arg-type]
        if ends and not call.results[0][1]:
            _write(ends[0], "call_module", path, args, kwargs)
            model.graph.erase_node(stand_in)
            return
        _write(stand_in, "call_module", path, args, kwargs)
        if not call.is_flat:
            del stand_in.meta["val"]
        for index, end in ends.items():
            source = stand_in
            *inner, (lookup, key) = call.results[index][1]
            with model.graph.inserting_before(end):
                for target, name in inner:
                    source = model.graph.call_function(target, (source, name))
            _write(end, "call_function", lookup, (source, key), {})


def _write(node: Node, op: str, target: Any, args: Any, kwargs: Any) -> None:
    """Make ``node`` another one, so that annotations that refer to it stay right."""
    node.op, node.target = op, target
    node.args, node.kwargs = args, kwargs


def _ends(node: Node, lookups: tuple[Lookup, ...] = ()) -> dict[Node, tuple[Lookup, ...]] | None:
    """Return the tensors in the result of ``node`` with the lookups to them; None if it has anything else."""
    if isinstance(node.meta.get("val"), Tensor):
        return {node: lookups}
    ends: dict[Node, tuple[Lookup, ...]] = {}
    for user in node.users:
        known = user.target in (operator.getitem, getattr)
        inner = _ends(user, (*lookups, (user.target, user.args[1]))) if known else None
        if inner is None:
            return None
        ends.update(inner)
    return ends
