"""The places of a model where both sides can be read, the taps that read them, and what is measured there,
accumulated over batches."""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from torchq_compat.comparison.results import Histogram, QParamsView, Side, Steps
from torchq_compat.read.qparams import PerChannelQParams, QParams
from torchq_compat.support.dtypes import dtype_name
from torchq_compat.support.graph_nodes import free_name
from torchq_compat.support.quantized_tensors import channel_qparams, is_per_channel, is_quantized
from torchq_compat.support.upstream import pytree

# The facts of both sides about a model: the places where values can be read, and their qparams.


class OpKey(NamedTuple):
    """Call number ``call`` of the module at ``path`` (``function`` is empty) or of a function in its code."""

    path: str
    function: str
    call: int


class ResultKey(NamedTuple):
    """Flat result ``position`` of the first call of the custom module at ``path``."""

    path: str
    position: int


class PartKey(NamedTuple):
    """A part of the cell at ``cell``."""

    cell: str
    part: str


Key = OpKey | ResultKey | PartKey
KeyT = TypeVar("KeyT")


@dataclass(frozen=True)
class Reading:
    """The value at a place in one run, dequantized, and its qparams, None if it is float."""

    value: Tensor
    qparams: QParams | None


Run = Callable[[tuple[Any, ...]], tuple[Any, Mapping[Key, Reading]]]


@dataclass(frozen=True)
class QuantizedModel:
    """One side, ready to run.

    Attributes:
        run: calls the model and returns its result, and the readings at every place.
        output_qparams: returns the qparams of each tensor of a result; None for a float tensor.
        deployed: the model that the script would ship, for size and latency; None if it could not be made.
    """

    run: Run
    output_qparams: Callable[[Any], tuple[QParams | None, ...]]
    deployed: nn.Module | None
    deployed_error: str = ""


# Taps, which keep the values that pass a node of a graph, or that a module returns.


class Tap(nn.Module):
    """Returns its input and keeps a copy if it is a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[Tensor] = []

    def forward(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            # A later op may write in place.
            self.values.append(value.detach().clone())
        return value

    def take(self) -> list[Tensor]:
        """Return the tensors since the last call of ``take``, one for each pass."""
        values, self.values = self.values, []
        return values


def tap_nodes(places: Mapping[KeyT, tuple[GraphModule, Node]]) -> dict[KeyT, Tap]:
    """Insert a tap after each node, and return the taps; keys of one node share its tap. This changes the
    graphs: pass copies."""
    taps: dict[Node, Tap] = {}
    for graph_module, node in dict.fromkeys(places.values()):
        taps[node] = Tap()
        name = free_name(graph_module, f"torchq_compat_tap_of_{node.name}")
        graph_module.add_submodule(name, taps[node])
        with graph_module.graph.inserting_after(node):
            graph_module.graph.call_module(name, (node,))
    for graph_module in {owner for owner, _ in places.values()}:
        graph_module.recompile()
    return {key: taps[node] for key, (_, node) in places.items()}


def runner(model: nn.Module, taps: Mapping[Key, Tap], read: Callable[[Key, list[Tensor]], Reading]) -> Run:
    """Return a function that runs ``model``; ``read`` makes a reading of what the tap of a key has kept."""

    def run(batch: tuple[Any, ...]) -> tuple[Any, Mapping[Key, Reading]]:
        with torch.no_grad():
            result = model(*batch)
        taken = {tap: tap.take() for tap in set(taps.values())}
        return result, {key: read(key, taken[tap]) for key, tap in taps.items() if taken[tap]}

    return run


def tap_module(module: nn.Module, position: int | None = None) -> Tap:
    """Return a tap that keeps the results of ``module``, or the flat result at ``position``."""
    tap = Tap()

    def keep(_: nn.Module, args: Any, result: Any) -> None:
        for leaf in [result] if position is None else pytree.tree_leaves(result)[position : position + 1]:
            tap(leaf)

    module.register_forward_hook(keep)
    return tap


BINS = 64
RANGE_STEPS = 255
LATENCY_RUNS = 7


class SideMeasures:
    """Sums over batches for one side of one place."""

    def __init__(self) -> None:
        self.qparams: QParams | None = None
        self._signal = self._noise = 0.0
        self._saturated = self._count = 0

    def add(self, exact: Tensor, reading: Reading) -> None:
        self.qparams = qparams = reading.qparams
        exact = exact.double()
        self._signal += float(exact.pow(2).sum())
        self._noise += float((exact - reading.value.double()).pow(2).sum())
        if qparams is not None:
            scale, zero_point = _qparams(exact, qparams)
            q = exact / scale + zero_point
            outside = (q < qparams.quant_min - 0.5) | (q > qparams.quant_max + 0.5)
            self._saturated += int(outside.sum())
            self._count += exact.numel()

    def result(self) -> Side:
        share = self._saturated / self._count if self._count else None
        return Side(_view(self.qparams), _decibel(self._signal, self._noise), share)


class StepMeasures:
    """Differences between the two sides in steps, accumulated over batches."""

    def __init__(self) -> None:
        self._counts = [0, 0, 0]
        self._total = 0
        self._largest = self._size = 0.0
        self._from_range = False

    def add(self, exact: Tensor, ours: Reading, fx: Reading, qparams: QParams | None) -> None:
        step = _step(exact, qparams)
        self._from_range = qparams is None
        self._size = float(step.max())
        differences = (ours.value.double() - fx.value.double()).abs()
        steps = differences / step.clamp_min(torch.finfo(torch.float64).tiny)
        rounded = steps.round()
        for index, met in enumerate((rounded == 1, rounded == 2, rounded > 2)):
            self._counts[index] += int(met.sum())
        self._total += steps.numel()
        self._largest = max(self._largest, float(steps.max()) if steps.numel() else 0.0)

    def result(self) -> Steps | None:
        if not self._total:
            return None
        one, two, more = (count / self._total for count in self._counts)
        share = sum(self._counts) / self._total
        return Steps(self._size, share, one, two, more, self._largest, self._from_range)


class PlaceMeasures:
    """Everything measured at one place."""

    def __init__(self) -> None:
        self.ours = SideMeasures()
        self._fx: SideMeasures | None = None
        self._steps = StepMeasures()
        self._histogram: Histogram | None = None

    def add(self, exact: Tensor, ours: Reading, fx: Reading | None) -> None:
        """Add one batch; ``exact`` is the float model's value. A side with another shape has another value
        there and is left out."""
        if ours.value.shape != exact.shape or not exact.is_floating_point():
            return
        self.ours.add(exact, ours)
        if self._histogram is None:
            self._histogram = _histogram(exact)
        if fx is not None and fx.value.shape == exact.shape:
            self._fx = self._fx or SideMeasures()
            self._fx.add(exact, fx)
            self._steps.add(exact, ours, fx, ours.qparams or fx.qparams)

    @property
    def seen(self) -> bool:
        return self._histogram is not None

    def sides(self) -> tuple[Side, Side | None, Steps | None, Histogram | None]:
        fx = None if self._fx is None else self._fx.result()
        return self.ours.result(), fx, self._steps.result(), self._histogram


def _decibel(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


def _qparams(exact: Tensor, qparams: QParams) -> tuple[Tensor, Tensor]:
    """Return scale and zero point, shaped to broadcast over ``exact``."""
    shape = [1] * exact.dim()
    if isinstance(qparams, PerChannelQParams):
        shape[qparams.axis] = -1
    scale, zero_point = torch.tensor(qparams.scales), torch.tensor(qparams.zero_points)
    device = exact.device
    return scale.double().reshape(shape).to(device), zero_point.double().reshape(shape).to(device)


def _step(exact: Tensor, qparams: QParams | None) -> Tensor:
    if qparams is not None:
        return _qparams(exact, qparams)[0]
    return (exact.max() - exact.min()).double().reshape([1] * exact.dim()) / RANGE_STEPS


def _view(qparams: QParams | None) -> QParamsView | None:
    if qparams is None:
        return None
    dtype = dtype_name(qparams.dtype)
    pairs = dict.fromkeys(zip(qparams.scales, qparams.zero_points, strict=True))
    scales, zero_points = zip(*pairs, strict=True)
    return QParamsView(dtype, scales, zero_points, qparams.quant_min, qparams.quant_max)


def _histogram(exact: Tensor) -> Histogram | None:
    values = exact.detach().double().flatten()
    values = values[values.isfinite()].cpu()
    if not values.numel():
        return None
    low, high = float(values.min()), float(values.max())
    if low == high:
        low, high = low - 0.5, high + 0.5
    counts = torch.histc(values, BINS, low, high)
    return Histogram(low, high, tuple(int(count) for count in counts))


def state_bytes(model: nn.Module) -> int:
    """Return the bytes of all tensors in the ``state_dict``, including packed weights; a tensor that occurs
    twice counts once."""
    # The dict keeps all tensors alive: the address of a freed unpacked weight would be used again.
    tensors = {(t.data_ptr(), t.numel()): t for t in _tensors(dict(model.state_dict()))}
    return sum(_bytes(tensor) for tensor in tensors.values())


def _tensors(state: Any) -> Iterator[Tensor]:
    for leaf in pytree.tree_leaves(state):
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, torch.ScriptObject):
            # Packed weights.
            yield from _tensors(leaf.unpack() if hasattr(leaf, "unpack") else leaf.__getstate__())


def _bytes(tensor: Tensor) -> int:
    size = tensor.numel() * tensor.element_size()
    if is_quantized(tensor) and is_per_channel(tensor):
        scales, zero_points = channel_qparams(tensor)
        size += scales.numel() * scales.element_size() + zero_points.numel() * zero_points.element_size()
    return size


def milliseconds(calls: list[Callable[[], Any] | None]) -> list[float | None]:
    """Return the median time of each call in ms; the calls take turns, so that other load slows all of them
    alike."""
    times: list[list[float]] = [[] for _ in calls]
    with torch.no_grad():
        for _ in range(LATENCY_RUNS + 1):
            for call, own in zip(calls, times, strict=True):
                if call is not None:
                    start = time.perf_counter()
                    call()
                    own.append(1000 * (time.perf_counter() - start))
    # The first round is for warm-up.
    return [statistics.median(own[1:]) if own else None for own in times]
