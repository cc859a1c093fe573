"""Trials: run a kernel beside the q-dq op it replaces, on values that fill its qparams.

A kernel is only as good as the library, the packing and the CPU it runs on: the weights that oneDNN packs for
some conv1d give wrong results on CPUs with AMX, in FX's lowered models too. So each kernel is tried first.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from torchq_compat.capture.training_modes import training_flag
from torchq_compat.lower.x86.kernels.kernel_base import Constant, Floats, KernelCall, Quantized
from torchq_compat.lower.x86.memory_layouts import layout_read, reads_by_layout
from torchq_compat.lower.x86.qdq_operands import constant_of, observed_range
from torchq_compat.lower.x86.steps import steps_of_floats
from torchq_compat.lower.x86.trial_sizes import Sizes, trial_sizes
from torchq_compat.lower.x86.trial_values import fill_floats, fill_indices, fill_integers
from torchq_compat.qspecs.qdq import DEQUANTIZES
from torchq_compat.qspecs.qparams import PerTensorQParams
from torchq_compat.support.quantized_tensors import as_float, integers_of, of_integers

__all__ = ["MOST_STEPS", "Outcome", "Trials"]

ATEN = torch.ops.aten
#: Kernels round where the q-dq op rounds, but ties may round to the other side.
MOST_STEPS = 1.001


class Outcome(NamedTuple):
    """The result of a trial.

    Attributes:
        steps: the largest difference between the kernel and its q-dq op, in quantization steps; infinite if
            the kernel fails.
        failure: how the kernel fails where the q-dq op does not.
    """

    steps: float
    failure: str | None = None

    @property
    def fault(self) -> str:
        """The outcome as the end of a sentence about the kernel."""
        return self.failure or f"is {self.steps:.0f} steps off its q-dq op"


@dataclass(frozen=True)
class _Trial:
    """One kernel, the node whose value it computes, and the values it reads."""

    graph_module: GraphModule
    qparams_of: dict[Node, PerTensorQParams]
    result: Node
    call: KernelCall
    only_observed: bool

    def ends(self, node: Node) -> tuple[int, int]:
        """Return the least and the largest integer at ``node`` in this trial."""
        qparams = self.qparams_of[node]
        return observed_range(node, qparams) if self.only_observed else (qparams.quant_min, qparams.quant_max)

    def sources(self) -> list[Quantized | Floats]:
        """List the values of the graph that the kernel reads, without duplicates."""
        found: dict[Node, Quantized | Floats] = {}
        for argument in _flat(self.call):
            if isinstance(argument, (Quantized, Floats)):
                found.setdefault(argument.node, argument)
        return list(found.values())

    @property
    def op(self) -> Node:
        return self.call.covers[0]


@dataclass
class Trials:
    """Runs trials; equal trials run once.

    Attributes:
        seen: trial -> its outcome.
    """

    seen: dict[str, Outcome] = field(default_factory=dict)

    def outcome(
        self,
        graph_module: GraphModule,
        qparams_of: dict[Node, PerTensorQParams],
        result: Node,
        call: KernelCall,
        *,
        only_observed: bool = False,
    ) -> Outcome:
        """Compare the results of ``call`` and of the q-dq nodes up to ``result``; 0 if nothing can be tried.


        Args:
            only_observed: whether to try only integers within the ranges that the observers measured.
        """
        trial = _Trial(graph_module, qparams_of, result, call, only_observed)
        sources = trial.sources()
        sizes = trial_sizes(graph_module, trial.op, [source.node for source in sources])
        key = _key(trial, sources, sizes)
        if key not in self.seen:
            constants: dict[Node, Any] = {}
            outcomes = (_try_at(trial, sources, each, index, constants) for index, each in enumerate(sizes))
            self.seen[key] = max(outcomes, default=Outcome(0.0), key=attrgetter("steps"))
        return self.seen[key]


def _key(trial: _Trial, sources: list[Quantized | Floats], sizes: list[Sizes]) -> str:
    """Return a key of kernel, packing, settings, qparams, weights and sizes, which fix the outcome."""
    digest = hashlib.blake2b()

    def add(*values: Any) -> None:
        digest.update(repr(values).encode())

    add(trial.call.label, sizes, [type(source).__name__ for source in sources])
    add(
        [
            (trial.qparams_of[each.node], trial.ends(each.node))
            for each in sources
            if isinstance(each, Quantized)
        ]
    )
    for argument in _flat(trial.call):
        if isinstance(argument, Constant) and not isinstance(argument.value, Tensor):
            add(type(argument.value).__name__, torch.backends.quantized.engine)
    for node in _reference_nodes(trial, {source.node for source in sources}):
        constant = constant_of(trial.graph_module, node)
        if constant is None:
            add(str(node.target), node.args, node.kwargs)
        else:
            whole = constant.contiguous()
            digest.update(_memory_of(whole))
    return digest.hexdigest()


def _memory_of(tensor: Tensor) -> ctypes.Array[ctypes.c_char]:
    """Return the bytes of a contiguous CPU tensor, read without NumPy, which torch does not require.

    The bytes are the tensor's own memory: the caller keeps ``tensor`` alive.
    """
    return (ctypes.c_char * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())


def _reference_nodes(trial: _Trial, boundary: set[Node]) -> list[Node]:
    """Return the nodes from ``boundary`` (excluded) up to ``trial.result``."""
    found: dict[Node, None] = {}
    waiting = [trial.result]
    while waiting:
        node = waiting.pop()
        if node not in found and node not in boundary:
            found[node] = None
            waiting.extend(node.all_input_nodes)
    return list(found)


def _try_at(
    trial: _Trial,
    sources: list[Quantized | Floats],
    sizes: Sizes,
    index: int,
    constants: dict[Node, Any],
) -> Outcome:
    generator = torch.Generator().manual_seed(index)
    given = {source.node: _value(trial, source, sizes, index, generator) for source in sources}
    floats = {node: _dequantized(value) for node, value in given.items()}
    evaluate = _Evaluation(trial.graph_module, floats, constants).at
    try:
        expected = evaluate(trial.result)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
        return Outcome(0.0)  # The op itself refuses these sizes, or reads values from outside the trial.
    try:
        found = _run_call(trial.call, given, evaluate)
    except RuntimeError as error:
        return Outcome(float("inf"), f"fails ({str(error).splitlines()[0]})")
    if found.shape != expected.shape:
        shapes = f"{tuple(found.shape)} for {tuple(expected.shape)}"
        return Outcome(float("inf"), f"gives another shape than its q-dq op ({shapes})")
    if not expected.numel():
        return Outcome(0.0)
    if not trial.call.returns_floats:
        return Outcome(_steps_of_integers(found, expected, PerTensorQParams.of_node(trial.result)))
    return Outcome(steps_of_floats(trial.op, evaluate, expected, found))


def _steps_of_integers(found: Tensor, expected: Tensor, qparams: PerTensorQParams) -> float:
    integers = integers_of(found).int().clamp(qparams.quant_min, qparams.quant_max)
    return float((integers - expected.int()).abs().max())


def _value(
    trial: _Trial, source: Quantized | Floats, sizes: Sizes, index: int, generator: torch.Generator
) -> Tensor:
    node, shape = source.node, sizes[source.node]
    if isinstance(source, Quantized):
        qparams = trial.qparams_of[node]
        integers = fill_integers(qparams, trial.ends(node), shape, index, generator)
        made: Tensor = of_integers(integers, qparams.scale, qparams.zero_point)
        return made
    if node.target in DEQUANTIZES:
        low, high, dtype = node.args[-3:]
        integers = torch.randint(low, high + 1, shape, generator=generator).to(dtype)  # type: ignore[arg-type, operator]
        inputs = {node.args[0]: integers}
        value: Tensor = _Evaluation(trial.graph_module, inputs, {}).at(node)  # type: ignore[arg-type]
        return value
    indices = fill_indices(trial.graph_module, trial.op, node, shape, generator)
    return fill_floats(shape, index, generator) if indices is None else indices


def _dequantized(value: Tensor) -> Tensor:
    floats: Tensor = as_float(value)
    return floats


def _run_call(call: KernelCall, given: dict[Node, Tensor], evaluate: Callable[[Node], Any]) -> Tensor:
    def read(argument: Any) -> Any:
        if isinstance(argument, KernelCall):
            return _run_call(argument, given, evaluate)
        if isinstance(argument, list):
            return [read(each) for each in argument]
        if isinstance(argument, Quantized):
            return given[argument.node]
        if isinstance(argument, Floats):
            return _dequantized(given[argument.node])
        if isinstance(argument, Constant):
            return argument.value
        return map_arg(argument, evaluate)

    first, *others = (read(argument) for argument in call.args)
    if reads_by_layout(call.kernel):
        first = first.clone(**layout_read(first.dim()))
    result: Tensor = call.kernel(first, *others)
    return result


def _flat(argument: Any) -> Iterator[Any]:
    """Yield the arguments of a call and of the calls in it."""
    if isinstance(argument, KernelCall):
        for each in argument.args:
            yield from _flat(each)
    elif isinstance(argument, list):
        for each in argument:
            yield from _flat(each)
    else:
        yield argument


@dataclass
class _Evaluation:
    """Runs nodes of the reference graph from ``floats`` on; ``constants`` are kept for further sizes."""

    graph_module: GraphModule
    floats: dict[Node, Any]
    constants: dict[Node, Any]

    def at(self, node: Node) -> Any:
        for known in (self.floats, self.constants):
            if node in known:
                return known[node]
        if node.op == "get_attr":
            value = constant_of(self.graph_module, node)
            if value is not None and any(training_flag(user) for user in node.users):
                value = value.clone()  # A norm in training mode writes to its running statistics.
        elif node.op == "call_function":
            assert callable(node.target)
            value = node.target(*map_arg(node.args, self.at), **map_arg(node.kwargs, self.at))
        else:
            raise ValueError(f"the value of {node.name} is not known to the trial")
        is_constant = all(source in self.constants for source in node.all_input_nodes)
        (self.constants if is_constant else self.floats)[node] = value
        return value
