"""Deep copies of float models, those with computed weights among them."""

from __future__ import annotations

import copy
from typing import TypeVar

from torch import Tensor, nn

__all__ = ["copied_model"]

Model = TypeVar("Model", bound=nn.Module)


def copied_model(model: Model) -> Model:
    """A deep copy of ``model``. The weight that ``torch.nn.utils.weight_norm`` computes hangs on an autograd
    graph, which torch does not copy; the copy has its value, until it is computed again."""
    computed = {
        id(value): value.detach().clone()
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, Tensor) and not value.is_leaf
    }
    return copy.deepcopy(model, computed)
