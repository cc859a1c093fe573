"""Whether a backend takes an op in the dtypes a QConfig asks for.

FX's rule: some DTypeConfig of the op's pattern must match the QConfig's activation dtype, whether it is
dynamic, and, for a function, the weight dtype; and the observers must satisfy the config's constraints.
"""

from __future__ import annotations

import torch
from torch.ao.quantization.backend_config import DTypeConfig

from torchq_compat.legacy.backend_configs import PatternEntry
from torchq_compat.specs.dtypes import plain_dtype
from torchq_compat.specs.quantization_specs import OpSpecs

__all__ = ["find_dtype_config", "refusal"]


def find_dtype_config(entry: PatternEntry, specs: OpSpecs, *, check_weight: bool) -> DTypeConfig | None:
    """The first DTypeConfig of ``entry`` that allows what ``specs`` ask for."""
    return next((c for c in entry.dtype_configs if _matches(c, specs, check_weight)), None)


def refusal(entry: PatternEntry, specs: OpSpecs) -> str:
    """Why ``find_dtype_config`` found nothing, for people."""
    asked = f"activation {_name(specs.activation_dtype)}, weight {_name(specs.weight_dtype)}"
    dynamic = "dynamic, " if specs.is_dynamic else ""
    allowed = "; ".join(
        f"{'dynamic ' if c.is_dynamic else ''}input {_name(c.input_dtype)}, output {_name(c.output_dtype)}, "
        f"weight {_name(c.weight_dtype)}"
        for c in entry.dtype_configs
    )
    return f"the backend does not take {dynamic}{asked} here; it takes: {allowed}"


def _matches(config: DTypeConfig, specs: OpSpecs, check_weight: bool) -> bool:
    if bool(config.is_dynamic) != specs.is_dynamic or not _same(config.input_dtype, specs.activation_dtype):
        return False
    output = torch.float32 if specs.is_dynamic else specs.activation_dtype
    if not _same(config.output_dtype, output):
        return False
    return not check_weight or _same(config.weight_dtype, specs.weight_dtype)


def _same(allowed: torch.dtype | None, asked: torch.dtype) -> bool:
    return allowed is None or plain_dtype(allowed) == asked


def _name(dtype: torch.dtype | None) -> str:
    return "any" if dtype is None else str(dtype).removeprefix("torch.")
