"""Decisions about modules with a parametrized weight, which stay float as in FX.

FX does not quantize them because parametrization changes the class of a module.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.utils import parametrize

from torchq_compat.config.qconfig_mappings import QConfigRules
from torchq_compat.qspecs.selectors import select_for_module
from torchq_compat.support.decisions import Action, Decision

__all__ = ["decide_parametrizations"]

WEIGHTED = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.Linear, nn.Embedding, nn.EmbeddingBag),
)


def decide_parametrizations(model: nn.Module, rules: QConfigRules) -> Iterator[Decision]:
    """Yield a decision about each module of ``model`` that only its parametrized weight keeps float."""
    for path, module in model.named_modules():
        if not isinstance(module, WEIGHTED) or not parametrize.is_parametrized(module, "weight"):
            continue
        plain = type(module).__mro__[1]
        if select_for_module(rules, plain, path).qconfig is not None:
            yield Decision(path, plain.__name__, Action.FLOAT, _reason(path), warn=True)


def _reason(path: str) -> str:
    where = f'model.get_submodule("{path}")' if path else "model"
    call = f'torch.nn.utils.parametrize.remove_parametrizations({where}, "weight")'
    return (
        "its weight is computed by a parametrization, and FX quantizes no such module. "
        f"Hint: {call} before preparing makes it a plain one."
    )
