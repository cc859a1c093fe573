"""Trial runs that change nothing, the inputs they take, and the comparison of their results."""

from __future__ import annotations

import copy
import math
import random
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from torchq_compat.capture.call_layouts import Structure
from torchq_compat.capture.opaque_stub import OPAQUE_OP, StubRegistry
from torchq_compat.capture.sizes.find_sizes import Group, SizeGroups, group_of, sizes_at
from torchq_compat.capture.sizes.input_sizes import InputSizes
from torchq_compat.capture.torch_export import copied_inputs
from torchq_compat.read.qdq import BLOCK
from torchq_compat.read.qdq import LARGE as LARGE_WEIGHT
from torchq_compat.support.graph_nodes import (
    copied_model,
    copied_values,
    copied_weights,
    give_back_freed,
    tensors_in,
)
from torchq_compat.support.process_state import alone, draws_kept, own_attribute
from torchq_compat.support.upstream import is_activation_post_process, pytree
from torchq_compat.support.user_warnings import silenced

# Inputs of other sizes than the example's, with values from the example.
#
# Sizes that are equal in the example change together: they may be the batch of all inputs, or the length of
# all sequences, even if torch.export did not detect that.


#: Sizes up to this one grow in trials; larger ones shrink, and very large ones more.
SMALL, LARGE = 8, 128
#: What counts as a long sequence, and the numbers of steps that are tried in its place.
LONG, SHORT = 32, (12, 7)


def trial_sizes(sizes: InputSizes, *, are_short: bool = False) -> Iterator[SizeGroups]:
    """Yield up to two sets of sizes other than the example's that ``sizes`` allows.

    Args:
        are_short: whether to try short sequences first: a prepared recurrent module runs step by step.
    """
    known = dict.fromkeys(group_of(item) for item in sizes.free if item.example > 0)
    if not known:
        return
    leading = next(iter(known))
    firsts = {group: _first(group[0], is_batch=group == leading) for group in known}
    seconds = {group: _second(group[0], is_batch=group == leading) for group in known}
    if are_short:
        longs = [group for group in known if group[0] > LONG]
        firsts.update((group, [SHORT[0], *firsts[group]]) for group in longs)
        seconds.update((group, [SHORT[1], *seconds[group]]) for group in longs if group != leading)
    first, second = _choose(sizes, firsts), _choose(sizes, seconds)
    seen: list[SizeGroups] = []
    for groups in (first, second):
        if groups and groups not in seen:
            seen.append(groups)
            yield groups


def _first(size: int, *, is_batch: bool) -> list[int]:
    if is_batch:
        return [*([3] if size > SMALL else []), size + 1, 2 * size, size - 1]
    if size <= SMALL:
        return [2 * size, size + 1, 3 * size, size - 1]
    eighths = (2, 4, 5, 6) if size > LARGE else (4, 6)
    return [*(-(-size * eighth // 8) for eighth in eighths), 2 * size, size + 1]


def _second(size: int, *, is_batch: bool) -> list[int]:
    if is_batch:
        return [1, size - 1] if size > 1 else [3]
    if size <= SMALL:
        return [size + 1, size + 2, size - 1]
    return [*([size // 2 + 1, 5 * size // 8] if size > LARGE else []), size - size // 4, size + 1, size - 1]


def _choose(sizes: InputSizes, candidates: Mapping[Group, Iterable[int]]) -> SizeGroups:
    """Return the first candidate of each group that breaks no rule."""
    chosen: dict[Group, int] = {}
    for group, others in candidates.items():
        for other in others:
            trial = {**chosen, group: other}
            if other > 0 and sizes.broken_rule(sizes_at(sizes, trial)) is None:
                chosen = trial
                break
    return chosen


def resized(
    args: tuple[Any, ...], inputs: Mapping[str, Any], sizes: InputSizes, groups: SizeGroups
) -> tuple[Any, ...]:
    """Return ``args``, whose leaves by label are ``inputs``, resized to the sizes in ``groups``."""
    return with_sizes(args, inputs, sizes_at(sizes, groups))


def with_sizes(
    args: tuple[Any, ...], inputs: Mapping[str, Any], expected: Mapping[tuple[str, int], int]
) -> tuple[Any, ...]:
    """Return ``args`` resized to the sizes in ``expected``, by label and dimension."""
    labels = iter(inputs)
    tensors = {label: value for label, value in inputs.items() if isinstance(value, Tensor)}

    def other(leaf: Any) -> Any:
        label = next(labels)
        if not isinstance(leaf, Tensor):
            return leaf
        new = _repeated(leaf, [expected.get((label, index), size) for index, size in enumerate(leaf.shape)])
        if leaf.dim() != 1 or leaf.dtype not in (torch.int32, torch.int64) or not leaf.numel():
            return new
        others = {name: value for name, value in tensors.items() if name != label}
        return _as_lengths(_as_offsets(new, leaf, others, expected), leaf, others, expected)

    changed: tuple[Any, ...] = pytree.tree_map(other, args)
    return changed


def _repeated(leaf: Tensor, shape: Sequence[int]) -> Tensor:
    """Return ``leaf`` in ``shape``, its values repeated; squares along the diagonal, so that what may be a
    mask of a length by that length stays causal, a band or a table of distances."""
    *_, rows, columns = (0, 0, *leaf.shape)
    if 0 < rows == columns < shape[-1] == shape[-2]:
        places = torch.arange(shape[-1], device=leaf.device)
        over = (torch.maximum(places[:, None], places) - rows + 1).clamp(min=0)
        leaf = leaf[..., (places[:, None] - over).clamp(min=0), (places - over).clamp(min=0)]
    for index, (size, new) in enumerate(zip(leaf.shape, shape, strict=True)):
        if new != size and size > 0:
            leaf = leaf.index_select(index, torch.arange(new, device=leaf.device) % size)
    return leaf


def _as_offsets(
    leaf: Tensor, example: Tensor, others: Mapping[str, Tensor], expected: Mapping[tuple[str, int], int]
) -> Tensor:
    """Return ``leaf``, the resized ``example``; if ``example`` may be the offsets of an EmbeddingBag into one
    of the ``others``, return valid offsets, because with invalid ones the kernel reads memory beyond its
    indices. Offsets start at 0, never decrease, and are not a plain count 0, 1, 2, ..."""
    steps, last = example.diff(), int(example[-1])
    if example[0] != 0 or (steps < 0).any() or (steps == 1).all():
        return leaf
    for other, value in others.items():
        if value.dim() and value.shape[0] >= last:
            size = expected.get((other, 0), int(value.shape[0]))
            offsets = leaf.clamp(max=size).sort().values
            if last == value.shape[0] and offsets.numel():
                offsets[-1] = size
            return offsets
    return leaf


def _as_lengths(
    leaf: Tensor, example: Tensor, others: Mapping[str, Tensor], expected: Mapping[tuple[str, int], int]
) -> Tensor:
    """Return ``leaf``, or valid lengths if ``example`` may be the lengths of the sequences in another input.

    No returned length exceeds the size of that input. If the longest sequence of the example fills the input,
    so does the longest returned one; if the lengths of the example are in descending order, so are these.
    """
    if int(example.min()) < 1:
        return leaf
    for other, value in others.items():
        for batch, time in ((0, 1), (1, 0)) if value.dim() > 1 else ():
            steps = int(value.shape[time])
            if value.shape[batch] != example.numel() or steps < int(example.max()):
                continue
            longest = expected.get((other, time), steps)
            fitting = torch.where(leaf == steps, longest, leaf.clamp(max=longest))
            falling = bool((example.diff() <= 0).all())
            return fitting.sort(descending=True).values if falling else fitting
    return leaf


# Trial runs that change neither the model, its buffers and inputs, nor the state of any random generator.


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
        example: the example inputs, whose shapes the float model takes.
    """

    model: nn.Module
    stubs: StubRegistry
    modules: Mapping[str, nn.Module]
    example: tuple[Any, ...] = ()

    def of_float_model(
        self,
        args: tuple[Any, ...],
        *,
        double: bool = False,
        watching: Callable[[nn.Module], AbstractContextManager[Any]] = nullcontext,
    ) -> FloatRun:
        """Run a copy of the float model on ``args``, inside of ``watching`` the copy."""
        model = trial_copy(self.model)
        if _shapes(args) != _shapes(self.example):
            _check_packed_widths(model)
            if (error := _error_on_cpu(model, args)) is not None:
                return FloatRun(args, error=error)
        if double:
            model, args = copied_model(model).double(), in_double(args)
        try:
            with alone_and_seeded(), without_packing(model), watching(model):
                return FloatRun(args, model(*copied_inputs(args)))
        except Exception as cause:
            return FloatRun(args, error=cause)

    def draws_outside_torch(self, args: tuple[Any, ...]) -> bool:
        """Return whether the float model draws from Python's or NumPy's generator."""
        states = []

        @contextmanager
        def noting(model: nn.Module) -> Iterator[None]:
            states.append(_states())
            yield
            states.append(_states())

        self.of_float_model(args, watching=noting)
        return len({*states}) > 1

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
        with alone_and_seeded(), kept_buffers(graph_module), without_packing(graph_module, *modules.values()):
            return (runner or GraphRunner)(graph_module, self.stubs, modules).run(*copied_inputs(args))


def _shapes(args: tuple[Any, ...]) -> list[torch.Size]:
    return [tensor.shape for tensor in tensors_in(args)]


def _check_packed_widths(model: nn.Module) -> None:
    """Let recurrent modules of ``model`` refuse packed sequences of another width than theirs: torch does not
    where their lengths are equal, and reads beyond the input."""

    def check(module: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], PackedSequence) and args[0].data.size(-1) != module.input_size:
            raise RuntimeError(f"packed sequences are {args[0].data.size(-1)} wide, not {module.input_size}")

    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.register_forward_pre_hook(check)


def _error_on_cpu(model: nn.Module, args: tuple[Any, ...]) -> Exception | None:
    """Return what ``model`` raises on the CPU at sizes that no user asked for, if its inputs are on CUDA: an
    index out of range, as of a table of positions, would end every use of CUDA in this process."""
    if not any(tensor.is_cuda for tensor in tensors_in(args)):
        return None
    try:
        with alone_and_seeded():
            copied_model(model).cpu()(*pytree.tree_map_only(Tensor, Tensor.cpu, args))
    except Exception as error:
        return error
    return None


def trial_copy(model: nn.Module) -> nn.Module:
    """Return a copy of ``model`` with its own buffers and attributes, but the same parameters."""
    shared: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    return copy.deepcopy(model, copied_weights(model, shared))


def run_prepared(prepared: nn.Module, args: tuple[Any, ...], *, double: bool = False) -> Any:
    """Run a prepared model with its observers and fake-quantizes off."""
    if double:
        prepared, args = copy.deepcopy(prepared).double(), in_double(args)
    packing = without_packing(prepared)
    with observers_off(prepared) as off, kept_buffers(prepared, apart=off), alone_and_seeded(), packing:
        return prepared(*copied_inputs(args))


@contextmanager
def observers_off(prepared: nn.Module) -> Iterator[set[nn.Module]]:
    """Let observers and fake-quantizes, which the context gives, return their inputs while it is active."""
    off = {module for module in prepared.modules() if is_activation_post_process(module)}
    with ExitStack() as handing_on:
        for module in off:
            handing_on.enter_context(own_attribute(module, "forward", _hand_on))
        yield off


class GraphRunner(Interpreter):
    """Runs a captured graph node by node."""

    def __init__(
        self, graph_module: GraphModule, stubs: StubRegistry, modules: Mapping[str, nn.Module]
    ) -> None:
        super().__init__(graph_module)
        self.stubs, self._modules = stubs, modules

    def run_node(self, n: Node) -> Any:
        """Run ``n``, and let torch note nowhere that it does: that takes longer than most operators."""
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        return getattr(self, n.op)(n.target, args, kwargs)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return attrgetter(target)(self.module)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is not OPAQUE_OP:
            return super().call_function(target, args, kwargs)
        tensors, sizes, handle, layout = args
        inputs, named = self.stubs.layouts(handle)[layout].inputs.put_together(tensors, sizes)
        return Structure.take_apart(self._modules[handle](*inputs, **named))[1]


def _hand_on(x: Any) -> Any:
    if isinstance(x, Tensor) and x.numel() > BLOCK:
        give_back_freed()  # What the layers before made of their weights.
    return x


def in_double(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return ``args`` with floats in float64."""

    def widen(tensor: Tensor) -> Tensor:
        return tensor.double() if tensor.is_floating_point() else tensor

    widened: tuple[Any, ...] = pytree.tree_map_only(Tensor, widen, args)
    return widened


@contextmanager
def alone_and_seeded() -> Iterator[None]:
    """Run alone, without gradients and warnings; seed every random generator and restore it afterwards."""
    with alone(), _seeded():
        yield


def _states() -> tuple[Any, str]:
    numpy = sys.modules.get("numpy.random")
    return random.getstate(), "" if numpy is None else repr(numpy.get_state(legacy=False))


@contextmanager
def _seeded() -> Iterator[None]:
    python, numpy = random.getstate(), sys.modules.get("numpy.random")
    numpy_state: Any = numpy.get_state() if numpy is not None else None
    uses_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    # cuDNN's dropout in recurrent modules draws other numbers, and its TF32 rounds.
    plain: Any = torch.backends.cudnn.flags(enabled=False) if uses_cuda else nullcontext()
    try:
        with torch.no_grad(), draws_kept(), silenced(), plain:
            # torch.manual_seed queues a call and its stack for every kind of device that is not in use.
            torch.default_generator.manual_seed(0)
            if uses_cuda:
                torch.cuda.manual_seed_all(0)
            random.seed(0)
            if numpy is not None:
                numpy.seed(0)
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.set_state(numpy_state)


#: The names of folded weights, torchao's and ours, which nothing writes to.
FOLDED_WEIGHT = re.compile(r"(^|\.)(_frozen_param\d+|\w+_quantized(_\d+)?)$")


@contextmanager
def kept_buffers(
    module: nn.Module, *, but: torch.dtype | None = None, apart: Collection[nn.Module] = ()
) -> Iterator[None]:
    """Restore the values of the buffers of ``module`` afterwards, ``but`` those of a dtype that only weights
    have, and ``apart`` from those of modules that write to none."""
    before = [
        (buffer, copied_values(buffer))
        for item in module.modules()
        if item not in apart
        for name, buffer in item.named_buffers(recurse=False)
        if buffer.dtype is not but and not FOLDED_WEIGHT.search(name)
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                if not buffer.is_meta and not torch.equal(buffer, value):
                    # Observers of channels give their buffers another size. A buffer that a module's Python
                    # wrote to may need a gradient, and no such one can be resized.
                    if buffer.shape != value.shape:
                        buffer.resize_(value.shape)
                    buffer.copy_(value)


# Float LSTMs, computed without the copy of their weights that oneDNN packs at each call.


LSTM = torch.ops.aten.lstm.input


def without_packing(*models: nn.Module) -> AbstractContextManager[Any]:
    """Compute LSTMs without oneDNN while the context is active, if ``models`` have large ones."""
    return WithoutOneDNN() if any(map(_has_large_lstm, models)) else nullcontext()


def _has_large_lstm(model: nn.Module) -> bool:
    if not any(parameter.numel() > LARGE_WEIGHT for parameter in model.parameters()):
        return False
    return any(
        isinstance(module, nn.LSTM)
        or (isinstance(module, GraphModule) and module.graph.find_nodes(op="call_function", target=LSTM))
        for module in model.modules()
    )


class WithoutOneDNN(TorchFunctionMode):
    """Computes LSTMs by torch's own kernel; for threads that run alone, because torch's switch is for all."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_lstm = func in (torch.lstm, LSTM)
        with torch.backends.mkldnn.flags(enabled=False) if is_lstm else nullcontext():
            return func(*args, **(kwargs or {}))


# Comparison of the results of two models.


#: SQNR in dB from which float32 results count as equal: for a captured graph; after a batch norm was folded
#: into a weight; when the float model runs under autocast and the graph does not.
CAPTURED, FOLDED, CAST = 80.0, 60.0, 25.0
#: The SQNR in dB that a dtype can represent.
OF_DTYPE = {torch.float16: 45.0, torch.bfloat16: 30.0}
#: The least SQNR in dB that rounding may explain; the comparison is repeated in float64.
DOUBTFUL = 20.0
#: The dB by which a difference may exceed the rounding error of the float model itself, and still be
#: rounding.
AS_LARGE = 12.0


def difference(expected: Any, actual: Any, least: float) -> str | None:
    """Return how two results differ; None if they are equal, floats to an SQNR of ``least`` dB."""
    required, result = pytree.tree_leaves(expected), pytree.tree_leaves(actual)
    if len(required) != len(result):
        return f"{len(result)} results instead of {len(required)}"
    return next(
        (
            text
            for pair in zip(required, result, strict=True)
            if (text := _difference(*pair, least)) is not None
        ),
        None,
    )


def sqnr(expected: Any, actual: Any) -> float:
    """Return the least SQNR in dB of the pairs of float tensors of equal shape in two results."""
    pairs = zip(pytree.tree_leaves(expected), pytree.tree_leaves(actual), strict=False)
    floats = [(a, b) for a, b in pairs if isinstance(a, Tensor) and a.is_floating_point()]
    return min(
        (_sqnr(a, b) for a, b in floats if isinstance(b, Tensor) and a.shape == b.shape), default=math.inf
    )


def _difference(expected: Any, value: Any, least: float) -> str | None:
    if not isinstance(expected, Tensor) or not isinstance(value, Tensor):
        same_kind = isinstance(expected, Tensor) == isinstance(value, Tensor)
        plain = isinstance(expected, (bool, int, float, str))
        return (
            None if same_kind and (not plain or expected == value) else f"{value!r} instead of {expected!r}"
        )
    if expected.shape != value.shape:
        return f"shape {tuple(value.shape)} instead of {tuple(expected.shape)}"
    if expected.is_meta or value.is_meta:
        return None  # There are no values to compare.
    if expected.is_complex() and value.is_complex():
        return _difference(torch.view_as_real(expected), torch.view_as_real(value), least)
    if not expected.is_floating_point():
        return None if bool((expected == value).all()) else "other integers"
    if not torch.equal(expected.isfinite(), value.isfinite()) or not torch.equal(
        expected.isnan(), value.isnan()
    ):
        return "NaN or infinity in other places"
    measured = _sqnr(expected, value)
    least = min(least, OF_DTYPE.get(expected.dtype, least), OF_DTYPE.get(value.dtype, least))
    return None if measured >= least else f"{measured:.1f} dB"


def _sqnr(expected: Tensor, tensor: Tensor) -> float:
    if expected.is_meta or tensor.is_meta:
        return math.inf
    finite = expected.isfinite() & tensor.isfinite()
    signal = torch.where(finite, expected, 0).double()
    noise = torch.where(finite, tensor, 0).double() - signal
    power, error = float(signal.square().sum()), float(noise.square().sum())
    if error < 1e-24 * max(1, noise.numel()):
        return math.inf
    return 10 * math.log10(power / error) if power else -math.inf
