"""The float model's training flags: they do not decide that prepare_fx calibrates and prepare_qat_fx trains.

In FX the flag of an LSTM, not the function called, chose between observers and fake-quantizes.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from torchq_compat.support.decisions import Action, Decision
from torchq_compat.support.upstream import BatchNormBase, DropoutBase

__all__ = ["decide_training_flags", "set_training_flags"]

TRAINS = (
    "prepare_qat_fx trains every module; batch norms freeze with "
    "prepared.apply(torch.ao.nn.intrinsic.qat.freeze_bn_stats)"
)
KEPT = (
    "it was set apart in a model in evaluation: it trains in every mode of the prepared and converted model"
)
CALIBRATES = "prepare_fx calibrates in evaluation mode; prepare_qat_fx is for training"


def decide_training_flags(model: nn.Module, *, is_qat: bool) -> Iterator[Decision]:
    """Yield a decision about each outermost module of ``model``, itself included, whose flag is overridden.

    If ``model`` itself has the right flag, a submodule with the other one was set apart on purpose, so its
    decision is a warning.
    """
    kept = set(_trained_on_purpose(model, is_qat=is_qat))
    found, reason = ("evaluation", TRAINS) if is_qat else ("training", CALIBRATES)
    reported: list[str] = []
    for path, module in model.named_modules():
        # torch.fx.symbolic_trace makes plain modules as containers, whose flags nobody set.
        is_container = type(module) is nn.Module
        if module.training == is_qat or is_container or any(_is_inside(path, outer) for outer in reported):
            continue
        if module in kept:
            yield Decision(path, f"training mode of {type(module).__name__}", Action.FLOAT, KEPT)
            continue
        reported.append(path)
        kind = f"{found} mode of {type(module).__name__}"
        yield Decision(path, kind, Action.DROPPED, reason, warn=bool(path))


def set_training_flags(working: nn.Module, *, is_qat: bool) -> None:
    """Put ``working``, the package's own copy, into the mode it is captured in.

    A dropout or batch norm in training in a model in evaluation, such as Monte Carlo dropout, was set on
    purpose, and keeps its flag.
    """
    kept = _trained_on_purpose(working, is_qat=is_qat)
    working.train(is_qat)
    for module in kept:
        module.training = True


def _trained_on_purpose(model: nn.Module, *, is_qat: bool) -> list[nn.Module]:
    if is_qat or model.training:
        return []
    return [m for m in model.modules() if m.training and isinstance(m, (DropoutBase, BatchNormBase))]


def _is_inside(path: str, outer: str) -> bool:
    return not outer or path.startswith(f"{outer}.")
