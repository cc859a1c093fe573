"""Whether a model can run on integers where its state is, and in the dtype it computes in."""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from torchq_compat.qspecs.qdq import DEQUANTIZES
from torchq_compat.support.decisions import Action, Decision

__all__ = ["why_not_here"]


def why_not_here(reference: GraphModule) -> Decision | None:
    """Return the decision to run ``reference`` as it is; None if it can run on integers."""
    elsewhere = {str(tensor.device) for tensor in (*reference.parameters(), *reference.buffers())} - {"cpu"}
    others = _float_dtypes(reference) - {torch.float32}
    if not elsewhere and not others:
        return None
    reason = f"it computes in {', '.join(sorted(map(str, others)))}; the kernels take torch.float32"
    if elsewhere:
        reason = f"its state is on {', '.join(sorted(elsewhere))}; the kernels run on the CPU"
    return Decision("", "convert_fx", Action.REFERENCE, reason)


def _float_dtypes(reference: GraphModule) -> set[torch.dtype]:
    """Return the float dtypes of the inputs and of the dequantized values."""
    placeholders = reference.graph.find_nodes(op="placeholder")
    values = [node.meta.get("val") for node in placeholders]
    given = {value.dtype for value in values if isinstance(value, torch.Tensor)}
    found = {node.kwargs.get("out_dtype") for node in reference.graph.nodes if node.target in DEQUANTIZES}
    return {dtype for dtype in given | found if isinstance(dtype, torch.dtype) and dtype.is_floating_point}
