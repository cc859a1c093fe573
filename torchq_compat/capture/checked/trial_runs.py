"""Trial runs that change neither the model, its buffers and inputs, nor the state of any random generator."""

from __future__ import annotations

import copy
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Interpreter

from torchq_compat.capture.torch_export import copied_inputs
from torchq_compat.opaque_calls.capture_stub import OPAQUE_OP, StubRegistry
from torchq_compat.opaque_calls.layouts import Structure
from torchq_compat.opaque_calls.recorded_calls import RecordedCalls
from torchq_compat.support.model_copies import copied_model, copied_weights
from torchq_compat.support.upstream import pytree

__all__ = [
    "FloatRun",
    "GraphRunner",
    "Runs",
    "in_double",
    "kept_buffers",
    "run_graph",
    "run_prepared",
    "trial_copy",
]


@dataclass(frozen=True)
class FloatRun:
    """One run of the float model: its inputs, and its result or the error it raised.

    Attributes:
        args: the inputs.
        value: the result; None if the run failed.
        error: the error of a failed run.
    """

    args: tuple[Any, ...]
    value: Any = None
    error: Exception | None = None


@dataclass
class Runs:
    """Trial runs of one float model.

    Attributes:
        model: a copy of the float model that is never run itself; each run makes a copy of it.
        stubs: the stubs of its custom modules.
        modules: the custom modules, by handle.
        calls: the recorded calls of custom modules.
        float_runs: how many runs of the float model there were.
    """

    model: nn.Module
    stubs: StubRegistry
    modules: Mapping[str, nn.Module]
    calls: RecordedCalls = field(default_factory=RecordedCalls)
    float_runs: int = field(default=0)

    def of_float_model(
        self, args: tuple[Any, ...], *, double: bool = False, recorded: Sequence[str] = ()
    ) -> FloatRun:
        """Run the float model on ``args``; ``calls`` keeps the calls of the modules at ``recorded``."""
        self.float_runs += 1
        model = trial_copy(self.model)
        recording = self.calls.recording({path: model.get_submodule(path) for path in recorded})
        if double:
            model, args = copied_model(model).double(), in_double(args)
        try:
            with _no_trace(), recording:
                return FloatRun(args, model(*copied_inputs(args)))
        except Exception as cause:
            return FloatRun(args, error=cause)

    def of_graph(
        self,
        graph_module: GraphModule,
        args: tuple[Any, ...],
        *,
        double: bool = False,
        runner: type[GraphRunner] | None = None,
    ) -> Any:
        """Run a captured graph, with the float modules behind its opaque calls."""
        modules = {handle: trial_copy(module) for handle, module in self.modules.items()}
        if double:
            graph_module, args = copy.deepcopy(graph_module).double(), in_double(args)
            modules = {handle: copied_model(module).double() for handle, module in modules.items()}
        return run_graph(graph_module, args, self.stubs, modules, runner)


def trial_copy(model: nn.Module) -> nn.Module:
    """Return a copy of ``model`` with its own buffers and attributes, but the same parameters."""
    shared: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    return copy.deepcopy(model, shared | copied_weights(model))


def run_graph(
    graph_module: GraphModule,
    args: tuple[Any, ...],
    stubs: StubRegistry,
    modules: Mapping[str, nn.Module],
    runner: type[GraphRunner] | None = None,
) -> Any:
    """Run a captured graph with ``modules``, by handle, behind the opaque calls of ``stubs``."""
    with _no_trace(), kept_buffers(graph_module):
        return (runner or GraphRunner)(graph_module, stubs, modules).run(*copied_inputs(args))


def run_prepared(prepared: nn.Module, args: tuple[Any, ...], is_observer: Callable[[nn.Module], bool]) -> Any:
    """Run a prepared model with its observers and fake-quantizes off: each returns its input."""
    off = [module for module in prepared.modules() if is_observer(module)]
    try:
        for module in off:
            vars(module)["forward"] = _hand_on
        with _no_trace(), kept_buffers(prepared):
            return prepared(*copied_inputs(args))
    finally:
        for module in off:
            vars(module).pop("forward", None)


class GraphRunner(Interpreter):
    """Runs a captured graph node by node."""

    def __init__(
        self, graph_module: GraphModule, stubs: StubRegistry, modules: Mapping[str, nn.Module]
    ) -> None:
        super().__init__(graph_module)
        self.stubs, self._modules = stubs, modules

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is not OPAQUE_OP:
            return super().call_function(target, args, kwargs)
        tensors, sizes, handle, layout = args
        inputs, named = self.stubs.layouts(handle)[layout].inputs.put_together(tensors, sizes)
        return Structure.take_apart(self._modules[handle](*inputs, **named))[1]


def _hand_on(x: Any) -> Any:
    return x


def in_double(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return ``args`` with floats in float64."""

    def widen(leaf: Any) -> Any:
        is_float = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        return leaf.double() if is_float else leaf

    widened: tuple[Any, ...] = pytree.tree_map(widen, args)
    return widened


@contextmanager
def _no_trace() -> Iterator[None]:
    """Run without gradients and warnings, with every random generator seeded and restored afterwards."""
    python, numpy = random.getstate(), sys.modules.get("numpy.random")
    numpy_state: Any = numpy.get_state() if numpy is not None else None
    try:
        with (
            torch.no_grad(),
            torch.random.fork_rng(devices=range(torch.cuda.device_count())),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            # torch.manual_seed queues a call and its stack for every kind of device that is not in use.
            torch.default_generator.manual_seed(0)
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                torch.cuda.manual_seed_all(0)
            random.seed(0)
            if numpy is not None:
                numpy.seed(0)
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.set_state(numpy_state)


@contextmanager
def kept_buffers(module: nn.Module) -> Iterator[None]:
    """Restore the values of the buffers of ``module`` afterwards."""
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                if not buffer.is_meta and not torch.equal(buffer, value):
                    buffer.copy_(value)
