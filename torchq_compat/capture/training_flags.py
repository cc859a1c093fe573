"""The float model's training flags: prepare_fx is calibration, prepare_qat_fx is training, whatever they say.

In FX the flag of an LSTM, not the function called, chose between observers and fake-quantizes.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from torchq_compat.decisions import Action, Decision

__all__ = ["decide_training_flags"]

TRAINS = (
    "prepare_qat_fx trains every module; batch norms freeze with "
    "prepared.apply(torch.ao.nn.intrinsic.qat.freeze_bn_stats)"
)
CALIBRATES = "prepare_fx calibrates in evaluation mode; prepare_qat_fx is for training"


def decide_training_flags(model: nn.Module, *, is_qat: bool) -> Iterator[Decision]:
    """A decision about ``model``, or about each outermost module in it, whose flag is the other one.

    A module that differs from the model it is in was set apart by someone: that is warned about.
    """
    found, reason = ("evaluation", TRAINS) if is_qat else ("training", CALIBRATES)
    reported: list[str] = []
    for path, module in model.named_modules():
        if module.training == is_qat or any(_is_inside(path, outer) for outer in reported):
            continue
        reported.append(path)
        kind = f"{found} mode of {type(module).__name__}"
        yield Decision(path, kind, Action.DROPPED, reason, warn=bool(path))


def _is_inside(path: str, outer: str) -> bool:
    return not outer or path.startswith(f"{outer}.")
