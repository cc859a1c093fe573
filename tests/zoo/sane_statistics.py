"""Random weights with the statistics of a trained model: norms that have seen data, active branches.

A deep stack of random convolutions, each normed to mean 0 before its ReLU, amplifies every perturbation from
layer to layer: float against float with rounded inputs is then only some dB, and the SQNR of a quantized
model says nothing. Trained norms shift, so that more of what follows is linear; so do these.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from tests.zoo.entry import Inputs

__all__ = ["settle"]

#: Ranges for the weight and bias of a batch norm that still has its initial values.
SCALES, SHIFTS = (0.5, 1.0), (0.5, 1.5)

#: Initial values of residual branches and layer scales, which training moves away from.
NEGLIGIBLE = 1e-3


def settle(model: nn.Module, batches: Sequence[Inputs]) -> nn.Module:
    """Give ``model`` the statistics of ``batches``, in place, and set it to evaluation."""
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.dim() == 1 and _is_scale(module, parameter):
                nn.init.uniform_(parameter, 0.5, 1.5)
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        _shift(norm)
        norm.momentum = None  # the mean over all batches
        norm.reset_running_stats()
    model.train()
    with torch.no_grad():
        for batch in batches:
            model(*batch)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    return model.eval()


def _is_scale(module: nn.Module, parameter: nn.Parameter) -> bool:
    """Return whether ``parameter`` is a norm's weight or a layer scale that is nearly zero initially."""
    is_constant = bool((parameter == parameter[0]).all())
    return getattr(module, "bias", None) is not parameter and is_constant and abs(parameter[0]) < NEGLIGIBLE


def _shift(norm: nn.modules.batchnorm._BatchNorm) -> None:
    if norm.affine and not norm.bias.any():
        nn.init.uniform_(norm.weight, *SCALES)
        nn.init.uniform_(norm.bias, *SHIFTS)
