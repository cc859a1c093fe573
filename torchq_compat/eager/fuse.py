"""``fuse_fx``: a GraphModule in which chains of modules that run as one are one.

Legacy: torch.ao's fused modules of ``torch.ao.nn.intrinsic``, at the path of the first of a chain; the others
are gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch.nn.functional as F
from torch import nn
from torch.fx import Graph, GraphModule, Node, Tracer

from torchq_compat.capture.origins import is_fx_leaf
from torchq_compat.errors import InputError
from torchq_compat.support.model_copies import copied_model
from torchq_compat.support.torch_ao import fuse_known_modules
from torchq_compat.support.upstream import USER_PRESERVED_ATTRIBUTES_KEY
from torchq_compat.support.user_warnings import warn_user

__all__ = ["fuse"]

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
#: FX leaves torch.relu and the method to prepare.
RELU_FUNCTIONS = (F.relu,)
#: Chains of modules that torch.ao has a fused module for, the longest first.
CHAINS: tuple[tuple[type[nn.Module], ...], ...] = (
    *((conv, norm, nn.ReLU) for conv, norm in zip(CONVOLUTIONS, BATCH_NORMS, strict=True)),
    *((conv, norm) for conv, norm in zip(CONVOLUTIONS, BATCH_NORMS, strict=True)),
    *((conv, norm) for conv, norm in zip(TRANSPOSED, BATCH_NORMS, strict=True)),
    (nn.Linear, nn.BatchNorm1d),
    *((conv, nn.ReLU) for conv in CONVOLUTIONS),
    (nn.Linear, nn.ReLU),
    (nn.BatchNorm2d, nn.ReLU),
    (nn.BatchNorm3d, nn.ReLU),
)


class _ModuleTracer(Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return is_fx_leaf(m)


def fuse(model: nn.Module, preserved: Iterable[str]) -> nn.Module:
    """Fuse a traced copy of ``model``; ``model`` itself, with a warning, where it cannot be traced.

    Raises:
        InputError: a batch norm in training mode behind a convolution or linear.
    """
    working = copied_model(model)
    try:
        graph = _ModuleTracer().trace(working)
    except Exception as cause:
        warn_user(
            f"fuse_fx returns the model as it is: torch.fx cannot trace {type(model).__name__} "
            f"({type(cause).__name__}: {str(cause).splitlines()[0] if str(cause) else ''}). prepare_fx fuses."
        )
        return model
    fused = GraphModule(working, graph, type(model).__name__)
    while (chain := next(_chains(fused), None)) is not None:
        _fuse_chain(fused, chain)
    fused.graph.eliminate_dead_code()
    fused.delete_all_unused_submodules()
    fused.recompile()
    fused.train(model.training)
    kept = {name: getattr(working, name) for name in preserved if hasattr(working, name)}
    # GraphModule.__deepcopy__ carries what stands under this key, and only that.
    fused.meta[USER_PRESERVED_ATTRIBUTES_KEY] = kept
    for name, value in kept.items():
        setattr(fused, name, value)
    return fused


def _chains(fused: GraphModule) -> Iterator[list[Node]]:
    modules = dict(fused.named_modules())
    calls = [str(node.target) for node in fused.graph.nodes if node.op == "call_module"]
    for node in fused.graph.nodes:
        for kinds in CHAINS:
            chain = _chain_from(node, kinds, modules)
            # A module called twice is two ops; torch.ao fuses it into one, and is wrong.
            if chain and all(calls.count(str(each.target)) < 2 for each in chain if each.op == "call_module"):
                yield chain
                break


def _chain_from(
    node: Node, kinds: tuple[type[nn.Module], ...], modules: dict[str, nn.Module]
) -> list[Node] | None:
    chain: list[Node] = []
    following: Node | None = node
    for kind in kinds:
        if following is None or not _is_of(following, kind, modules):
            return None
        chain.append(following)
        users = list(following.users)
        following = users[0] if len(users) == 1 else None
    return chain


def _is_of(node: Node, kind: type[nn.Module], modules: dict[str, nn.Module]) -> bool:
    if kind is nn.ReLU and node.op == "call_function":
        return node.target in RELU_FUNCTIONS
    return node.op == "call_module" and type(modules.get(str(node.target))) is kind


def _fuse_chain(fused: GraphModule, chain: list[Node]) -> None:
    modules = [
        fused.get_submodule(str(node.target)) if node.op == "call_module" else nn.ReLU() for node in chain
    ]
    norms = [module for module in modules if isinstance(module, BATCH_NORMS)]
    if any(module.training for module in norms) and not isinstance(modules[0], BATCH_NORMS):
        raise InputError(
            f"fuse_fx cannot fold the batch norm at {str(chain[1].target)!r}, which is in training mode.",
            hint="call model.eval() first; prepare_qat_fx trains convolution and batch norm as one.",
        )
    for module in modules:
        module.training = modules[0].training
    first, *others = chain
    made: Any = fuse_known_modules(modules, is_qat=False)[0]  # type: ignore[no-untyped-call]
    fused.set_submodule(str(first.target), made)
    graph: Graph = fused.graph
    for node in reversed(others):
        node.replace_all_uses_with(first)
        graph.erase_node(node)
