"""Checks that a BackendConfig allows the dtypes in which parts are observed.

FX checked a part's dtype only if its own prepare inserted the observer, and silently ignored the constructor
of a sigmoid if the config did not list its dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from torchq_compat.config.backend_configs import BackendTable
from torchq_compat.custom_modules.parts.part import Part, PartKind
from torchq_compat.custom_modules.parts.part_specs import PartSpecs
from torchq_compat.errors import PartConfigError
from torchq_compat.support.dtypes import dtype_name, is_integer, plain_dtype

__all__ = ["check_part_dtypes"]

PATTERN: dict[PartKind, Callable[..., Any]] = {
    PartKind.LINEAR: nn.Linear,
    PartKind.ADD: torch.add,
    PartKind.MUL: torch.mul,
    PartKind.SIGMOID: nn.Sigmoid,
    PartKind.TANH: nn.Tanh,
    PartKind.RELU: nn.ReLU,
    PartKind.IDENTITY: nn.Identity,
    # No BackendConfig has a pattern for 1 - a, which is an add with a constant.
    PartKind.COMPLEMENT: torch.add,
}


def check_part_dtypes(parts: Sequence[Part], specs: PartSpecs, backend: BackendTable) -> None:
    """Check the output dtype of every part that is quantized.

    Raises:
        ConfigError: if no static DTypeConfig of the part's operation lists the dtype; names the part.
    """
    for part in parts:
        pattern = PATTERN[part.kind]
        entry = backend.find((pattern,))
        allowed = {
            plain_dtype(config.output_dtype)
            for config in (entry.dtype_configs if entry else ())
            if config.output_dtype is not None and not config.is_dynamic
        }
        dtype = specs.output_constructor(part).settings.dtype
        if is_integer(dtype) and dtype not in allowed:
            raise PartConfigError(
                f"part {part.name!r} is observed as {dtype_name(dtype)}, which the backend config does not "
                f"allow for {pattern.__name__}.",
                hint=f"it allows {', '.join(sorted(map(dtype_name, allowed))) or 'nothing'}; add a "
                f"DTypeConfig for {pattern.__name__}, or choose another dtype for the part.",
            )
