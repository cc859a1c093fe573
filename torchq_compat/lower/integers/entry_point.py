"""Lower a model that ``convert_fx`` converted."""

from __future__ import annotations

from typing import Any

import torch

from torchq_compat.errors import ConfigError
from torchq_compat.graph.graph_module import ConvertedGraphModule, ConvertedModel
from torchq_compat.lower.integers.dropout_qparams import hand_on_through_dropout
from torchq_compat.lower.integers.lowered_module import lower
from torchq_compat.support.user_warnings import warn_user

__all__ = ["lower_to_integers"]

#: The engines that torch knows; ``none`` if it was built without any. All run on the same kernels here: their
#: names only chose the qparams, in the QConfig.
KNOWN_ENGINES = ("x86", "onednn", "fbgemm", "qnnpack", "none")


def lower_to_integers(
    reference: ConvertedGraphModule, trial_inputs: tuple[Any, ...] | None
) -> ConvertedModel:
    """Return ``reference`` on plain integers.

    Args:
        trial_inputs: arguments to run both on.

    Raises:
        ConfigError: an engine that torch does not have.
    """
    name = torch.backends.quantized.engine
    if name not in KNOWN_ENGINES:
        raise ConfigError(
            f"torch.backends.quantized.engine is {name!r}, an engine convert_fx does not know.",
            hint=f"set it to one of {', '.join(KNOWN_ENGINES)}; or call convert_to_reference_fx, which "
            "needs none.",
        )
    hand_on_through_dropout(reference)
    lowered = lower(reference, trial_inputs)
    for decision in lowered.lowering:
        if decision.warn:
            warn_user(f"{decision.kind} at {decision.path!r} {decision.reason}")
    return lowered
