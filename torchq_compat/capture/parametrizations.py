"""Modules whose weight a parametrization computes, such as ``weight_norm``.

After training the weight is a constant: it is computed once and the module becomes a plain one, so that its
weight is quantized and its batch norm folded. FX does so only with a module that is fused with a ReLU; of the
others it quantizes the activations. In QAT the weight changes with every step, and the module stays float.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.utils import parametrize

from torchq_compat.config.qconfig_mappings import QConfigRules
from torchq_compat.qspecs.selectors import select_for_module
from torchq_compat.support.decisions import Action, Decision

__all__ = ["compute_weights", "decide_parametrizations"]

WEIGHTED = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.Linear, nn.Embedding, nn.EmbeddingBag),
)
COMPUTED = (
    "prepare computes the weight once, and it is quantized; FX quantizes it where a ReLU is fused with it"
)


def compute_weights(working: nn.Module, rules: QConfigRules) -> None:
    """Make each module of ``working`` whose parametrized weight is to be quantized a plain one, with the
    weight as it is computed now.

    Args:
        working: the package's own copy of the model, in evaluation mode.
        rules: the rules that say what is to be quantized.
    """
    for _, module, plain in _to_quantize(working, rules):
        _make_plain(module, plain)


def decide_parametrizations(model: nn.Module, rules: QConfigRules, *, is_qat: bool) -> Iterator[Decision]:
    """Yield a decision about each module of ``model`` whose parametrized weight is to be quantized."""
    for path, _, plain in _to_quantize(model, rules):
        if is_qat:
            yield Decision(path, plain.__name__, Action.FLOAT, _why_float(path), warn=True)
        else:
            yield Decision(path, f"parametrization of {plain.__name__}", Action.DROPPED, COMPUTED)


def _to_quantize(model: nn.Module, rules: QConfigRules) -> list[tuple[str, nn.Module, type[nn.Module]]]:
    """Return path, module and the class that the module had before it was parametrized."""
    found: list[tuple[str, nn.Module, type[nn.Module]]] = []
    for path, module in model.named_modules():
        if not isinstance(module, WEIGHTED) or not parametrize.is_parametrized(module, "weight"):
            continue
        plain = type(module).__mro__[1]
        if select_for_module(rules, plain, path).qconfig is not None:
            found.append((path, module, plain))
    return found


def _make_plain(module: nn.Module, plain: type[nn.Module]) -> None:
    """Replace the parametrized tensors of ``module`` by parameters with their values.

    ``remove_parametrizations`` would take the tensors from the class, which copies of a module share, and
    write the values into what they are computed from, which may be another module's parameter as well.
    """
    with torch.no_grad():
        values = {name: getattr(module, name).detach().clone() for name in module.parametrizations}  # type: ignore[union-attr]
    del module.parametrizations
    module.__class__ = plain
    for name, value in values.items():
        module.register_parameter(name, nn.Parameter(value))


def _why_float(path: str) -> str:
    where = f'model.get_submodule("{path}")' if path else "model"
    call = f'torch.nn.utils.parametrize.remove_parametrizations({where}, "weight")'
    return (
        "a parametrization computes its weight anew in every step of training. "
        f"Hint: {call} before preparing makes it a plain one."
    )
