"""Lower the graphs inside an opaque module one by one; it calls them as it called its q-dq graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule

from torchq_compat.custom_modules.parts.part_owner import PartOwner
from torchq_compat.lower.x86.lowering_pass import write_lowered_graph
from torchq_compat.lower.x86.plan import Plan, plan_graph
from torchq_compat.support.decisions import Decision

__all__ = ["MADE", "share_state", "with_lowered_graphs"]

#: The attribute that holds what a lowered graph reads beside the state of its reference graph. It is no
#: module: a module would be registered beside the state it was made from, and torch.export cannot trace
#: packed weights.
MADE = "lowered"
#: The attribute of a lowered graph that holds the one that torch.compile sees.
COMPILED = "compiled"
STATE = ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules")


def share_state(module: nn.Module, reference: nn.Module) -> None:
    """Give ``module`` the parameters, buffers and submodules of ``reference`` themselves, not copies."""
    vars(module).update({name: vars(reference)[name] for name in STATE})


def with_lowered_graphs(
    opaque: PartOwner, path: str, compiled_form: Callable[[GraphModule, Plan], GraphModule | None]
) -> tuple[PartOwner, tuple[Decision, ...]]:
    """Return a copy of ``opaque`` whose graphs are lowered, and the decisions about them.

    Args:
        compiled_form: return what torch.compile sees of a graph; None: the lowered graph.
    """
    lowered, decisions = copy.deepcopy(opaque), []
    for name, graph in list(lowered.graphs()):
        plan = plan_graph(graph, opaque.named_input_qparams())
        decisions += [replace(each, path=f"{path}.{name}/{each.node}", node="") for each in plan.decisions]
        written = write_lowered_graph(graph, plan, {}, {}, MADE)
        module = GraphModule(nn.Module(), Graph())
        share_state(module, graph)
        vars(module)[MADE] = SimpleNamespace(**written.constants)
        module.graph = written.graph
        _show_to_the_compiler(module, compiled_form(graph, plan) or graph)
        lowered.set_submodule(name, module)
    return lowered, tuple(decisions)


def _show_to_the_compiler(module: GraphModule, compiled: GraphModule) -> None:
    vars(module)[COMPILED] = compiled
    lowered = type(module).forward

    @wraps(lowered)
    def forward(self: GraphModule, *args: Any) -> Any:
        return vars(self)[COMPILED].forward(*args) if torch.compiler.is_compiling() else lowered(self, *args)

    type(module).forward = forward
