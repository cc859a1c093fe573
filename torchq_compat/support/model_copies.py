"""Deep copies of float models, those with computed weights among them."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from torch import Tensor, nn

__all__ = ["copied_model", "copied_weights"]

Model = TypeVar("Model", bound=nn.Module)


def copied_model(model: Model) -> Model:
    """A deep copy of ``model``, with the values of its computed weights, until they are computed again."""
    return copy.deepcopy(model, copied_weights(model))


def copied_weights(model: nn.Module) -> dict[int, Any]:
    """A memo for ``copy.deepcopy`` with the weights that parametrizations and ``torch.nn.utils.weight_norm``
    compute, and buffers that were written with gradients on: they hang on an autograd graph, which torch does
    not copy."""
    computed = {}
    for module in model.modules():
        for value in (*vars(module).values(), *module._buffers.values()):
            # A recurrent module has its weights once more, in a list.
            for tensor in value if isinstance(value, list) else [value]:
                if isinstance(tensor, Tensor) and not tensor.is_leaf:
                    computed[id(tensor)] = tensor.detach().clone()
    return computed
