"""Helpers for graph nodes and the modules around them, and copies of models."""

import copy
import ctypes
import mmap
import os
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import chain
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from torchq_compat.support import upstream
from torchq_compat.support.process_state import Lock
from torchq_compat.support.sharded import whole
from torchq_compat.support.user_warnings import is_of_treespec, silenced

# Helpers for graph nodes and the modules around them: attributes, names, module paths.


LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
#: The ``end`` of an ``aten.slice`` to the last element.
SLICE_END = sys.maxsize
#: An entry of a node's stack trace: file, line, text.
FRAME = re.compile(r'File "([^"]+)", line (\d+), in [^\n]*\n\s*([^\n]*)')


def copied_graph(graph: Graph) -> Graph:
    """Return a copy of ``graph``, with its nodes' ``meta`` and the structure of its arguments."""
    with silenced(is_of_treespec, FutureWarning):
        return copy.deepcopy(graph)


def attribute_of(owner: nn.Module, node: Node) -> Any:
    """Return the attribute of ``owner`` that a ``get_attr`` node reads."""
    return attribute_at(owner, str(node.target))


def constant_of(owner: nn.Module, node: Node) -> Tensor:
    """Return the tensor of ``owner`` that a ``get_attr`` node reads; the ranks gather it if it is sharded."""
    value: Tensor = attribute_of(owner, node)
    return whole(value, str(node.target))


def attribute_at(owner: nn.Module, path: str) -> Any:
    """Return the attribute, most often a tensor, at the dotted ``path`` in ``owner``."""
    value: Any = owner
    for name in path.split("."):  # Dynamo inlines five functions for each call of an attrgetter.
        value = getattr(value, name)
    return value


def module_at(model: nn.Module, path: str) -> nn.Module | None:
    """Return the module of ``model`` at the dotted ``path``; None if there is none."""
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def source_of(node: Node) -> Node:
    """Return the first input of ``node``: what an observer observes, or what a dequantize reads."""
    source = node.args[0]
    assert isinstance(source, Node)
    return source


def position_of(getitem: Node) -> int:
    """Return which result of a node ``getitem`` picks."""
    position = getitem.args[1]
    assert isinstance(position, int)
    return position


def replace_node(node: Node, result: Any) -> None:
    """Let what reads ``node`` read ``result``, and erase ``node``."""
    node.replace_all_uses_with(result)
    node.graph.erase_node(node)


def replace_results(node: Node, results: Sequence[Any]) -> None:
    """Replace the results that are picked of ``node`` by ``results``, and erase ``node``."""
    for getitem in list(node.users):
        replace_node(getitem, results[position_of(getitem)])
    node.graph.erase_node(node)


def called_modules(graph_module: GraphModule) -> Iterator[tuple[Node, nn.Module]]:
    """Yield each node that calls a module, with the module."""
    for node in graph_module.graph.find_nodes(op="call_module"):
        yield node, graph_module.get_submodule(str(node.target))


def behind(nodes: Iterable[Any], stops: Callable[[Node], bool] = lambda node: False) -> Iterator[Node]:
    """Yield the ``nodes`` and those they are computed from, each once, none behind one that ``stops``."""
    waiting, seen = list(nodes), set[Node]()
    while waiting:
        node = waiting.pop()
        if isinstance(node, Node) and node not in seen:
            seen.add(node)
            yield node
            waiting.extend(() if stops(node) else node.all_input_nodes)


def nodes_behind(last: Node) -> Iterator[Node]:
    """Yield the nodes of a graph that stand behind ``last``."""
    node = last.next
    while node.op != "root":
        yield node
        node = node.next


def follow_devices(model: nn.Module, move: Callable[[Tensor], Tensor]) -> None:
    """Let the graphs in ``model``, whose state ``move`` has moved, make their constants where the state is.

    torch.export writes ``device=x.device`` as the device that the example was on.
    """

    @cache
    def moved(device: torch.device) -> torch.device:
        return move(torch.empty(0, device=device)).device

    def new(value: Any) -> Any:
        return moved(value) if isinstance(value, torch.device) else value

    def unasked(value: Any) -> Any:
        return None if value != new(value) else value

    for graph_module in (module for module in model.modules() if isinstance(module, GraphModule)):
        changed = False
        for node in graph_module._graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, Tensor) and moved(value.device) != value.device:
                node.meta["val"] = move(value)
            # The lengths of packed sequences, which torch.export asserts to be on the CPU, may stay there.
            change = unasked if node.target is torch.ops.aten._assert_tensor_metadata.default else new
            arguments = map_aggregate((node.args, node.kwargs), change)
            if arguments != (node.args, node.kwargs):
                node.args, node.kwargs = arguments
                changed = True
        if changed:
            graph_module.recompile()


def tensors_in(nested: Any) -> list[Tensor]:
    """Return the tensors in a nested structure, in order."""
    return [leaf for leaf in upstream.pytree.tree_leaves(nested) if isinstance(leaf, Tensor)]


def module_path_of(node: Node) -> str:
    """Return the path of the innermost module that called the op at ``node``; empty for the model itself.

    The path of a module's second call ends in ``@1``.
    """
    stack = node.meta.get("nn_module_stack") or {}
    return str(list(stack.values())[-1][0]) if stack else ""


def is_inside(path: str, outer: str) -> bool:
    """Return whether the module at ``path`` is the one at ``outer`` or in it; all are in the model itself."""
    return not outer or path == outer or path.startswith(f"{outer}.")


def free_name(graph_module: nn.Module, expected: str) -> str:
    """Return ``expected``, or with ``_1``, ``_2``, ... behind it the first that ``graph_module`` has not."""
    name, count = expected, 0
    while hasattr(graph_module, name):
        count += 1
        name = f"{expected}_{count}"
    return name


def user_line_of(node: Node) -> str | None:
    """Return file, line and text of the innermost line, outside torch and this package, behind ``node``."""
    for path, line, text in reversed(FRAME.findall(node.meta.get("stack_trace") or "")):
        if not path.startswith(LIBRARIES):
            return f"{Path(path).name}:{line} ({text.strip()})"
    return None


def delete_unused_modules(graph_module: GraphModule) -> None:
    """Do what torch's ``delete_all_unused_submodules`` does, whose time grows with the cube of the depth."""
    used = set[str]()
    for node in graph_module.graph.nodes:
        if node.op not in ("call_module", "get_attr"):
            continue
        if node.op == "call_module" and node.target not in used:
            with suppress(AttributeError):
                inside = graph_module.get_submodule(node.target).named_modules(prefix=node.target)
                used.update(name for name, _ in inside)
        path = str(node.target)
        while path:
            used.add(path)
            path = path.rpartition(".")[0]
            if path in used:
                break
    for name in [name for name, _ in graph_module.named_modules() if name not in used]:
        graph_module.delete_submodule(name)


# Deep copies of models, which share the memory of their tensors until one side writes to it.
#
# The first write to a shared storage copies it for the side that writes: either side may be trained, loaded,
# moved or changed in place. Of a mapped file, as by ``torch.load(mmap=True)``, the copy is another mapping.
# What cannot be shared so, and what others could write to behind torch's back, is copied at once.


#: What ``storage_uses`` returns if one tensor holds the storage: that tensor, and the storage's own object.
USES_BY_ONE = 2
#: Fewer elements are not worth sharing: who writes gets another address, and modules may grow a buffer in
#: place, which torch (2.13) refuses if it is shared.
SMALL, SMALL_BUFFER = 1 << 14, 1 << 18
Model = TypeVar("Model", bound=nn.Module)
#: Two threads must not make one storage a shared one at a time.
_SHARING = Lock()
#: Their kernels (torch 2.13) ask for the memory of weights as if to write to it, which would copy it at each
#: first call, and twice at a time if two threads call.
WRITES_TO_WEIGHTS = (nn.LSTM,)
#: What holds no tensors of its own, or is walked on its own.
NO_TENSORS = (nn.Module, Graph, type, ModuleType, FunctionType, MethodType, str, int, float, type(None))
#: What modules hold most, and nothing in it.
MOST = {OrderedDict, dict, set, tuple, bool, int, type(None)}


def copied_model(model: Model, known: Mapping[int, Any] | None = None) -> Model:
    """Return a deep copy of ``model``; its computed weights have their current values until recomputed."""
    return copy.deepcopy(model, copied_weights(model, known))


def copied_weights(model: nn.Module, known: Mapping[int, Any] | None = None) -> dict[int, Any]:
    """Return a memo for ``copy.deepcopy``: what is ``known``, copies of the other tensors of ``model`` and of
    empty hooks, which make up most of the time that a copy takes.

    torch does not copy tensors that have an autograd graph. These are the weights that parametrizations and
    ``torch.nn.utils.weight_norm`` compute, buffers that were written with gradients on, and what a model kept
    of an earlier call, in whatever it keeps it.
    """
    copies: dict[int, Any] = dict(known or {})
    unshared = {id(p) for m in model.modules() if isinstance(m, WRITES_TO_WEIGHTS) for p in m.parameters()}
    passed: set[int] = set()
    for module in model.modules():
        empty = (value for value in vars(module).values() if type(value) in (OrderedDict, set) and not value)
        copies.update((id(value), type(value)()) for value in empty)
        for tensor in _tensors_held(vars(module), passed):
            if id(tensor) in copies:
                continue
            if not tensor.is_leaf:
                copies[id(tensor)] = tensor.detach().clone()
            elif id(tensor) not in unshared and _is_plain(tensor):
                shared = _shared(tensor)
                if shared is None and _is_sole(tensor):
                    shared = tensor.detach().clone()  # Twenty times as fast as a deep copy of a small one.
                if shared is not None:
                    needs_grad = tensor.requires_grad
                    is_parameter = isinstance(tensor, nn.Parameter)
                    copies[id(tensor)] = (
                        nn.Parameter(shared, needs_grad)
                        if is_parameter
                        else shared.requires_grad_(needs_grad)
                    )
    return copies


def _tensors_held(attributes: dict[str, Any], passed: set[int]) -> Iterator[Tensor]:
    """Yield the tensors in a module's ``attributes``, in containers and in plain objects' attributes too."""
    pending: list[Any] = [attributes]
    while pending:
        value = pending.pop()
        if type(value) in MOST and not value:
            continue
        if isinstance(value, Tensor):
            yield value
        elif not isinstance(value, NO_TENSORS) and id(value) not in passed:
            passed.add(id(value))
            inner = value if isinstance(value, dict) else getattr(value, "__dict__", {})
            pending.extend(value if isinstance(value, (list, tuple, set)) else inner.values())


def copied_values(tensor: Tensor) -> Tensor:
    """Return a detached copy of ``tensor``, which may share its memory until one of both is written to."""
    shared = _shared(tensor)
    return tensor.detach().clone() if shared is None else shared


def shared_tensors(model: nn.Module, copied: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Return the tensors of ``model`` that share their memory with ``copied``, each with its copy."""
    pairs = zip(*(chain(item.parameters(), item.buffers()) for item in (model, copied)), strict=False)
    return [pair for pair in pairs if all(map(upstream.is_shared, pair))]


def stop_sharing_written(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Give the original of each pair memory of its own if its copy does not share any more: what wrote to the
    one, perhaps an operator that only asks for the memory as if to write, would do so to the other."""
    for original, copied in pairs:
        if upstream.is_shared(original) and not upstream.is_shared(copied):
            with _SHARING:
                original.untyped_storage().data_ptr()  # It could be written to through this pointer.


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a deep copy of ``tensor`` is its values and nothing else."""
    return type(tensor) is nn.Parameter or (
        type(tensor) is Tensor and tensor.grad is None and not vars(tensor)
    )


def _shared(tensor: Tensor) -> Tensor | None:
    """Return a detached copy of ``tensor`` that shares its memory; None if there can be none."""
    if not _is_in_memory(tensor):
        return None
    if tensor.numel() < (SMALL if isinstance(tensor, nn.Parameter) else SMALL_BUFFER):
        return None
    if not tensor.untyped_storage().resizable():
        return _mapped_again(tensor)
    with _SHARING:
        if not _is_sole(tensor) or not tensor.numel():
            return None
        try:
            copied: Tensor = upstream.lazy_clone(tensor.detach())
        except RuntimeError:
            return None  # Memory of another process or another library.
    return copied if type(copied) is Tensor else None


def _is_in_memory(tensor: Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not isinstance(tensor, upstream.FakeTensor)
    )


def _is_sole(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is all of its storage, and nothing else holds that: a NumPy array, and what
    reads it by DLPack, could write to it past torch."""
    if not _is_in_memory(tensor):
        return False
    storage = tensor.untyped_storage()
    is_sole = upstream.storage_uses(storage._cdata) == USES_BY_ONE and upstream.tensor_uses(tensor) == 1
    return is_sole and storage.nbytes() == tensor.numel() * tensor.element_size()


#: A line of /proc/self/maps for memory that is private to the process and of a file: start, end, place in the
#: file, device, inode, path.
PRIVATE_MAPPING = re.compile(r"(\w+)-(\w+) r.?.?p (\w+) (\w+:\w+) ([1-9]\d*) +(/.*)")
#: What Linux tells of a page: it is the file's, as nothing was written to it; it is in memory or swapped out.
PAGE_OF_FILE, PAGE_IS_USED = 1 << 61, 3 << 62


def _mapped_again(tensor: Tensor) -> Tensor | None:
    """Return a detached copy of a tensor in a mapped file, as private as the tensor; None for memory of any
    other kind, or if something was written to it, or without Linux."""
    reach = sum((count - 1) * step for count, step in zip(tensor.shape, tensor.stride(), strict=True))
    start, size = upstream.data_address(tensor), (reach + 1) * tensor.element_size()
    try:
        memory = _file_at(start, size)
        if memory is None or _is_written(start, size):
            return None
    except (OSError, ValueError):
        return None
    values = torch.frombuffer(memory, dtype=tensor.dtype, offset=len(memory) - size)
    return values.as_strided(tensor.shape, tensor.stride())


def _file_at(start: int, size: int) -> mmap.mmap | None:
    """Return a mapping, whose last bytes are those of the file that is mapped around ``start``."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        result = PRIVATE_MAPPING.match(line)
        if result is None:
            continue
        begin, end, place = (int(number, 16) for number in result.group(1, 2, 3))
        if begin <= start and start + size <= end:
            with Path(result[6]).open("rb") as file:
                status, at = os.fstat(file.fileno()), start - begin + place
                device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
                if (device, str(status.st_ino)) != result.group(4, 5):
                    return None  # Another file has its name now.
                before = at % mmap.ALLOCATIONGRANULARITY
                return mmap.mmap(file.fileno(), before + size, access=mmap.ACCESS_COPY, offset=at - before)
    return None


def _is_written(start: int, size: int) -> bool:
    """Return whether a page of a private mapping was written to."""
    page = os.sysconf("SC_PAGESIZE")
    first, last = start // page, (start + size - 1) // page
    with Path("/proc/self/pagemap").open("rb") as pages:
        pages.seek(8 * first)
        words = memoryview(pages.read(8 * (last - first + 1))).cast("Q")
    return len(words) != last - first + 1 or any(w & PAGE_IS_USED and not w & PAGE_OF_FILE for w in words)


def give_back_freed() -> None:
    """Give freed memory back to the system. glibc keeps the holes that aligned blocks leave, which the next
    block of the same size does not fit into."""
    if (trim := _trim()) is not None:
        trim(0)


@cache
def _trim() -> Callable[[int], int] | None:
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None  # Not glibc.
    return trim
