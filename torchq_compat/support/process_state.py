"""What Python, torch and torchao have once in a process, and the lock around this package's use of it.

``torch.export`` is not thread-safe: it sets flags and replaces methods for the whole process. What calls it
or torchao's prepare and convert runs ``alone``, as does what seeds generators.
"""

import linecache
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any, Generic, TypeVar, TypeVarTuple
from weakref import WeakSet

import torch
import torchao.quantization.pt2e.quantize_pt2e as flow
from torch import nn
from torch.fx import Graph, GraphModule
from torchao.quantization.pt2e.quantizer import Quantizer

from torchq_compat.support import upstream

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


class Lock:
    """A reentrant lock; in the child of a fork it is free, unless the thread that forks holds it."""

    def __init__(self) -> None:
        self._owner, self._depth = 0, 0
        self._lock = threading.RLock()
        _LOCKS.add(self)

    @property
    def is_mine(self) -> bool:
        """Whether this thread holds it."""
        return self._owner == threading.get_ident()

    def acquire(self, seconds: float = -1) -> bool:
        """Wait for the lock, no longer than ``seconds``; return whether this thread holds it now."""
        if not self._lock.acquire(timeout=seconds):
            return False
        self._owner, self._depth = threading.get_ident(), self._depth + 1
        return True

    def release(self) -> None:
        """Undo one ``acquire``."""
        self._depth -= 1
        if not self._depth:
            self._owner = 0
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def forget_other_threads(self) -> None:
        """Be free in the child of a fork, where the thread that held it does not exist."""
        if not self.is_mine:
            self._owner, self._depth, self._lock = 0, 0, threading.RLock()


_LOCKS: WeakSet[Lock] = WeakSet()


def once(function: Callable[[*Arguments], Result]) -> Callable[[*Arguments], Result]:
    """Call ``function`` once in the process for each arguments, however many threads ask; the child of a fork
    in the middle of the call calls it again."""
    lock, results = Lock(), dict[Any, Result]()

    @wraps(function)
    def result(*args: *Arguments) -> Result:
        if args not in results:
            with lock:
                if args not in results:
                    results[args] = function(*args)
        return results[args]

    return result


class Kept(Generic[Result]):
    """Results by key, at most ``most``. Threads that ask for the same at once may both compute it."""

    def __init__(self, most: int) -> None:
        self._most, self._results = most, dict[Any, Result]()

    def of(self, key: Any, compute: Callable[[], Result]) -> Result:
        """Return the result for ``key``, computed if it is not kept."""
        kept = self._results.get(key)
        if kept is None:
            kept = compute()
            if len(self._results) >= self._most:
                self._results.clear()
            self._results[key] = kept
        return kept

    def clear(self) -> None:
        """Keep none of the results."""
        self._results.clear()


#: Whoever is ``alone``, and calls of prepared models, take turns: observers read, compare and write back, and
#: a trace switches oneDNN off for all threads, which changes the last bits of what they observe.
TURNS = Lock()
#: The values of ``SET_FOR_ALL_THREADS`` before the thread that is alone changed them.
_BEFORE: list[Any] = []


@contextmanager
def alone() -> Iterator[None]:
    """Run while no other thread is in such a context, and without effect on what other threads call."""
    with TURNS:
        if _BEFORE:
            yield
            return
        _BEFORE[:] = [getattr(owner, name) for owner, name in upstream.SET_FOR_ALL_THREADS]
        swaps = {upstream.PATCHER: _PatcherOfThread, upstream.MODE_STACK: _ModesOfThread()}  # type: ignore[no-untyped-call]
        before = {place: getattr(*place) for place in swaps}
        try:
            for place, value in swaps.items():
                setattr(*place, value)
            yield
        finally:
            for place, value in before.items():
                setattr(*place, value)
            _BEFORE.clear()


class _ModesOfThread(threading.local, upstream.ModeStack):
    """A stack of modes for each thread. torch has one for all, and whoever prints a tensor empties it for the
    while: a trace in another thread would fail."""


class _PatcherOfThread(upstream.Patcher):
    """Replaces methods of ``nn.Module`` in the thread that traces. torch's replaces them in all: models that
    another thread calls would be recorded in the graph, and their modules exchanged for stand-ins."""

    def patch_method(
        self, cls: type, name: str, new_fn: Callable[..., Any], deduplicate: bool = True
    ) -> None:
        """See ``torch.fx._symbolic_trace``."""
        others, thread = getattr(cls, name), threading.get_ident()

        @wraps(new_fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (new_fn if threading.get_ident() == thread else others)(*args, **kwargs)

        super().patch_method(cls, name, call, deduplicate)


@contextmanager
def draws_kept() -> Iterator[None]:
    """Restore torch's random generators afterwards."""
    # Asking for a device's generator would start CUDA, after which this process has no forks that use it.
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    keeping = torch.random.fork_rng(devices=devices)
    with alone():
        keeping.__enter__()
    try:
        yield
    finally:
        with alone():
            keeping.__exit__(None, None, None)


@contextmanager
def without_autocast() -> Iterator[None]:
    """Run without the caller's autocast, of which FX's graphs know nothing: torch would write its casts into
    the graphs that are made, for every later call."""
    devices = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    with ExitStack() as left:
        for kind in devices:
            left.enter_context(torch.autocast(kind, enabled=False))
        yield


# Python's stack, and the texts of graphs.


#: The Python frames for each module around a module that torch.export, a deep copy and users' wrappers take,
#: and the most that are asked for.
FRAMES_OF_LEVEL, MOST_FRAMES = 30, 20_000
_DEPTHS, _DEPTHS_LOCK = list[int](), Lock()


@contextmanager
def deep_enough_for(model: Any) -> Iterator[None]:
    """Have Python's recursion limit high enough for all modules in modules of ``model``."""
    level: set[nn.Module] = {model} if isinstance(model, nn.Module) else set()
    known, depth = {*level}, 0
    while level:
        level = {child for module in level for child in module.children()} - known
        known |= level
        depth += 1
    own = min(500 + depth * FRAMES_OF_LEVEL, MOST_FRAMES)
    with _DEPTHS_LOCK:
        if not _DEPTHS:
            _DEPTHS.append(sys.getrecursionlimit())
        _DEPTHS.append(own)
        sys.setrecursionlimit(max(_DEPTHS))
    try:
        yield
    finally:
        with _DEPTHS_LOCK:
            _DEPTHS.remove(own)  # The last one may be of another thread, which still needs it.
            if len(_DEPTHS) == 1:
                sys.setrecursionlimit(_DEPTHS.pop())


def forget_sources() -> None:
    """Drop the sources that torch.fx (2.13) keeps for ever of graphs that are gone, for tracebacks: a prepare
    and a convert leave forty. Their code objects have the keys, and nothing else has."""
    sources = upstream.graph_sources.eval_cache
    unread = upstream.graph_sources.cache("", {})
    names = list(sources)
    count = sys.getrefcount(unread)
    for name in names:
        if name.startswith("<eval_with_key>") and sys.getrefcount(name) <= count:
            sources.pop(name, None)
            linecache.cache.pop(name, None)


# Whether this thread traces.
#
# torch's flags are of the process: another thread may be exporting, and two exports at once leave them set
# for good. The context of a trace is of its thread.


def is_exporting() -> bool:
    """Return whether this thread runs a model for ``torch.export``."""
    return torch.compiler.is_exporting() and _is_traced_here()


def is_compiling() -> bool:
    """Return whether this thread runs a model for ``torch.compile`` or ``torch.export``."""
    return torch.compiler.is_compiling() and _is_traced_here()


def _is_traced_here() -> bool:
    # Dynamo takes the first for True, and cannot read the second.
    return torch.compiler.is_dynamo_compiling() or upstream.TracingContext.try_get() is not None


# Forks.


def _in_child() -> None:
    """Free the locks, and undo what a thread of the parent was about to undo itself."""
    for lock in list(_LOCKS):
        lock.forget_other_threads()
    if not _BEFORE or TURNS.is_mine:
        return
    if upstream.fx_tracing.CURRENT_PATCHER is not None:
        upstream.fx_tracing.CURRENT_PATCHER.revert_all_patches()
    for (owner, name), value in zip(upstream.SET_FOR_ALL_THREADS, _BEFORE, strict=True):
        setattr(owner, name, value)
    _BEFORE.clear()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_in_child)


# torchao's prepare and convert, without the cache that keeps every model they were given alive.
#
# Their function for the device of a model is a ``functools.cache`` keyed by the model (torchao 0.18), as is
# its predecessor in torch.ao.


def prepare_pt2e(model: GraphModule, quantizer: Quantizer, *, is_qat: bool = False) -> GraphModule:
    """Call torchao's ``prepare_pt2e``, or ``prepare_qat_pt2e``."""
    prepare = flow.prepare_qat_pt2e if is_qat else flow.prepare_pt2e
    with alone(), _forgetting_models():
        return _on_device_of_inputs(prepare(model, quantizer))


def _on_device_of_inputs(prepared: GraphModule) -> GraphModule:
    """Move the observers of a graph without parameters to its inputs: torchao finds no device for them."""
    values = [node.meta.get("val") for node in prepared.graph.find_nodes(op="placeholder")]
    devices = {value.device for value in values if isinstance(value, torch.Tensor)} - {torch.device("cpu")}
    has_own = any(buffer.device in devices for buffer in prepared.buffers())
    is_alone = len(devices) == 1 and not has_own and next(prepared.parameters(), None) is None
    return prepared.to(devices.pop()) if is_alone else prepared


def convert_pt2e(
    model: GraphModule, fold: Callable[[GraphModule], None] | None = None, **options: bool
) -> GraphModule:
    """Call torchao's ``convert_pt2e`` with its ``options``.

    Its constant folding runs the graph with placeholder objects in place of values. A PackedSequence, and any
    class that inspects its contents, cannot be built from them, so the result has no structure meanwhile.

    Args:
        fold: folds weights, in place, instead of torchao: it computes the floats of every weight again, and
            keeps all of them and of their integers until its end.
    """
    if fold is not None:
        options["fold_quantize"] = False
    info = getattr(model.graph._codegen, "pytree_info", None)
    with alone(), _forgetting_models():
        if info is not None:
            _set_structure(model, info._replace(out_spec=None))
        try:
            converted: GraphModule = flow.convert_pt2e(model, **options)
            if fold is not None:
                fold(converted)
                converted.graph.eliminate_dead_code()
                converted.recompile()
        finally:
            if info is not None:
                _set_structure(model, info)
        if info is not None:
            _set_structure(converted, info)
            converted.recompile()
        return converted


@contextmanager
def held(variable: ContextVar[Result], value: Result) -> Iterator[None]:
    """Give ``variable`` the ``value`` inside the ``with`` block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextmanager
def own_attribute(owner: object, name: str, value: Any) -> Iterator[None]:
    """Give ``owner`` an attribute in front of its own, or its class's, inside the ``with`` block."""
    attributes = vars(owner)
    before = {name: attributes[name]} if name in attributes else {}
    attributes[name] = value
    try:
        yield
    finally:
        attributes.pop(name, None)
        attributes.update(before)


@contextmanager
def without_code(graph: Graph) -> Iterator[None]:
    """Let passes change ``graph``, and copies that they make of it, each of which has the code generated that
    nobody runs in between."""
    nothing = Graph().python_code("self")
    with ExitStack() as stack:

        def watch(item: Graph) -> Graph:
            copied = partial(type(item).__deepcopy__, item)
            stack.enter_context(own_attribute(item, "python_code", lambda *_, **__: nothing))
            stack.enter_context(own_attribute(item, "__deepcopy__", lambda memo: watch(copied(memo))))
            return item

        watch(graph)
        yield


def _set_structure(model: GraphModule, info: Any) -> None:
    codegen: Any = model.graph._codegen
    codegen.pytree_info = info


@contextmanager
def _forgetting_models() -> Iterator[None]:
    try:
        yield
    finally:
        for module, name in upstream.DEVICE_CACHES:
            cached: Any = getattr(module, name, None)
            if cached is not None:
                cached.cache_clear()
