"""Find the decisions about ops that compute nothing: ops that move values, or make constants.

FX leaves them float if their input is not quantized, and nothing is lost; a summary that counted them as
"float" would hide the modules that matter. If their input is quantized, they are quantized without effect, as
a dropout is.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.fx import GraphModule, Node

from torchq_compat.annotate.passthrough_ops import preserves_values
from torchq_compat.graph.graph_module import QuantizationGraphModule
from torchq_compat.support.decisions import Action, Decision

__all__ = ["computes_nothing"]

RELU = torch.ops.aten.relu.default
#: Base names of aten operators that make constants.
MAKES_CONSTANTS = ("arange", "empty", "full", "ones", "zeros")


def computes_nothing(model: nn.Module, decision: Decision) -> bool:
    """Return whether ``decision`` is about an op of ``model`` that only moves values or makes constants."""
    is_of_one_op = decision.action in (Action.FLOAT, Action.QUANTIZED) and " + " not in decision.kind
    if not is_of_one_op or not isinstance(model, GraphModule):
        return False
    name = decision.node or decision.path.rpartition("/")[2]
    captured = model.reference if isinstance(model, QuantizationGraphModule) else model
    node = next((node for node in captured.graph.nodes if node.name == name), None)
    # A relu counts as preserving values, but users count it as a layer.
    moves = node is not None and node.target is not RELU and preserves_values(node)
    return moves or (node is not None and _makes_constants(node))


def _makes_constants(node: Node) -> bool:
    name = getattr(node.target, "__name__", "").partition(".")[0]
    return name.removeprefix("new_").removesuffix("_like") in MAKES_CONSTANTS
