"""Deep copies of float models, including models with computed weights."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from torch import Tensor, nn

__all__ = ["copied_model", "copied_weights"]

Model = TypeVar("Model", bound=nn.Module)


def copied_model(model: Model) -> Model:
    """Return a deep copy of ``model``; its computed weights have their current values until recomputed."""
    return copy.deepcopy(model, copied_weights(model))


def copied_weights(model: nn.Module) -> dict[int, Any]:
    """Return a memo for ``copy.deepcopy`` with copies of the tensors that have an autograd graph, which torch
    does not copy.

    These are the weights that parametrizations and ``torch.nn.utils.weight_norm`` compute, and buffers that
    were written with gradients on.
    """
    computed = {}
    for module in model.modules():
        for value in (*vars(module).values(), *module._buffers.values()):
            # A recurrent module has its weights in a list, too.
            for tensor in value if isinstance(value, list) else [value]:
                if isinstance(tensor, Tensor) and not tensor.is_leaf:
                    computed[id(tensor)] = tensor.detach().clone()
    return computed
