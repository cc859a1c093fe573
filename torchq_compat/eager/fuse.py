"""``fuse_fx``: trace a model to a GraphModule in which each chain of fusable modules is one module.

Legacy: torch.ao's fused modules of ``torch.ao.nn.intrinsic``, at the path of the first module of a chain; the
other modules are deleted.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule, Node, Tracer

from torchq_compat.capture.origins import is_fx_leaf
from torchq_compat.codes import error_line
from torchq_compat.errors import ConfigError, InputError
from torchq_compat.read.backend_configs import BackendTable
from torchq_compat.support.graph_nodes import copied_model, delete_unused_modules, replace_node
from torchq_compat.support.upstream import USER_PRESERVED_ATTRIBUTES_KEY
from torchq_compat.support.user_warnings import warn_user

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


#: Module classes and functions that run one after the other, and the function that fuses them.
_Fusion = tuple[tuple[Any, ...], Callable[..., Any]]


class _ModuleTracer(Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return is_fx_leaf(m)


def fuse(model: nn.Module, preserved: Iterable[str], backend: BackendTable) -> nn.Module:
    """Fuse a traced copy of ``model``; return ``model`` itself, with a warning, if it cannot be traced.

    Args:
        backend: the patterns to fuse, with their fuser methods.

    Raises:
        InputError: a batch norm in training mode follows a convolution or linear.
        ConfigError: a fuser method fails, or returns no module.
    """
    working = copied_model(model)
    try:
        graph = _ModuleTracer().trace(working)
    except Exception as cause:
        warn_user("TQ317", model=type(model).__name__, cause=error_line(cause))
        return model
    fused = GraphModule(working, graph, type(model).__name__)
    for chain, fusion in _find_chains(fused, _fusions_of(backend)):
        _fuse_chain(fused, chain, fusion)
    fused.graph.eliminate_dead_code()
    delete_unused_modules(fused)
    fused.recompile()
    fused.train(model.training)
    kept = {name: getattr(working, name) for name in preserved if hasattr(working, name)}
    # GraphModule.__deepcopy__ copies the attributes under this key, and no others.
    fused.meta[USER_PRESERVED_ATTRIBUTES_KEY] = kept
    for name, value in kept.items():
        setattr(fused, name, value)
    return fused


def _fusions_of(backend: BackendTable) -> list[_Fusion]:
    """Return the chains of modules that ``backend`` fuses, the longest first."""
    chains: list[_Fusion] = [
        (pattern, entry.fuser_method)
        for pattern, entry in backend.entries.items()
        if entry.fuser_method is not None and isinstance(pattern, tuple) and isinstance(pattern[0], type)
    ]
    return sorted((c for c in chains if issubclass(c[0][0], nn.Module)), key=lambda chain: -len(chain[0]))


def _find_chains(fused: GraphModule, fusions: Iterable[_Fusion]) -> list[tuple[list[Node], _Fusion]]:
    """Return the chains to fuse, matched from the end of the graph as in FX; they share no node."""
    modules = dict(fused.named_modules())
    calls = Counter(str(node.target) for node in fused.graph.nodes if node.op == "call_module")
    matches: list[tuple[list[Node], _Fusion]] = []
    taken: set[Node] = set()
    for node in reversed(fused.graph.nodes):
        for fusion in fusions:
            chain = _chain_to(node, fusion[0], modules)
            # A module that is called twice is two ops; torch.ao wrongly fuses it into one.
            is_called_once = all(calls[str(item.target)] < 2 for item in chain if item.op == "call_module")
            if chain and is_called_once and taken.isdisjoint(chain):
                matches.append((chain, fusion))
                taken.update(chain)
                break
    return matches[::-1]


def _chain_to(last: Node, kinds: tuple[Any, ...], modules: dict[str, nn.Module]) -> list[Node]:
    """Return the nodes of ``kinds`` that end with ``last``; empty if a node differs or has another reader."""
    chain: list[Node] = []
    node: Any = last
    for kind in reversed(kinds):
        is_read_elsewhere = bool(chain) and isinstance(node, Node) and len(node.users) > 1
        if not isinstance(node, Node) or is_read_elsewhere or not _is_of(node, kind, modules):
            return []
        chain.insert(0, node)
        node = node.args[0] if node.args else None
    return chain


def _is_of(node: Node, kind: Any, modules: dict[str, nn.Module]) -> bool:
    if node.op in ("call_function", "call_method"):
        return bool(node.target == kind)
    return node.op == "call_module" and type(modules.get(str(node.target))) is kind


def _fuse_chain(fused: GraphModule, chain: list[Node], fusion: _Fusion) -> None:
    first, *others = chain
    modules = [_module_of(fused, node) for node in chain]
    norms = [module for module in modules if isinstance(module, BATCH_NORMS)]
    is_folded = not isinstance(modules[0], BATCH_NORMS)
    if is_folded and any(module.training for module in norms):
        raise InputError.of("TQ901.training_batch_norm", path=str(chain[1].target))
    for module in modules:
        if isinstance(module, nn.Module):
            module.training = modules[0].training
    fused.set_submodule(str(first.target), _fused_by(fusion[1], modules, str(first.target)))
    for node in reversed(others):
        replace_node(node, first)


def _module_of(fused: GraphModule, node: Node) -> Any:
    """Return what a fuser method gets for ``node``: its module, an nn.ReLU for F.relu, or its function."""
    if node.op == "call_module":
        return fused.get_submodule(str(node.target))
    return nn.ReLU() if node.target is F.relu else node.target


def _fused_by(fuser: Callable[..., Any], modules: list[Any], path: str) -> nn.Module:
    try:
        result = fuser(False, *modules)
    except Exception as cause:  # The fuser method may be the user's own.
        name = getattr(fuser, "__name__", repr(fuser))
        raise ConfigError.of("TQ910.fuser_method", name=name, path=path, cause=cause) from cause
    if not isinstance(result, nn.Module):
        raise ConfigError.wrong_type("backend_config: the result of a fuser method", "an nn.Module", result)
    return result
