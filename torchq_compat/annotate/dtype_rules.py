"""Whether a backend supports an op in the dtypes and ranges of a QConfig.

FX's rule: some DTypeConfig of the op's pattern must match the QConfig's activation dtype, its ``is_dynamic``,
and, for a function, the weight and bias dtypes; and the observers must satisfy the constraints of the config:
quantization range, smallest scale, fixed scale and zero point.
"""

from __future__ import annotations

import torch

from torchq_compat.config.backend_configs import PatternEntry
from torchq_compat.qspecs.observers import ObserverConstructor
from torchq_compat.qspecs.quantization_specs import OpSpecs
from torchq_compat.support.dtypes import PACKED_DTYPES, dtype_name, plain_dtype
from torchq_compat.support.torch_ao import DTypeConfig, DTypeWithConstraints

__all__ = ["find_dtype_config", "is_half_static", "refusal", "takes_weight"]


def find_dtype_config(
    entry: PatternEntry, specs: OpSpecs, *, has_weight: bool, has_bias: bool
) -> DTypeConfig | None:
    """Return the first DTypeConfig of ``entry`` that allows ``specs``; None if none does.

    Args:
        has_weight: whether the op is a function with a weight argument; ``takes_weight`` checks the weight
            of a module.
        has_bias: whether the op is a function with a bias argument.
    """
    return next((c for c in entry.dtype_configs if not _violation(c, specs, has_weight, has_bias)), None)


def refusal(entry: PatternEntry, specs: OpSpecs, *, has_weight: bool, has_bias: bool) -> str:
    """Return the reason, for people, why ``find_dtype_config`` found nothing."""
    reasons = dict.fromkeys(_violation(c, specs, has_weight, has_bias) for c in entry.dtype_configs)
    return "the backend does not support its qconfig: " + (
        "; ".join(reasons) or "it has no dtype configs for it"
    )


def takes_weight(entry: PatternEntry, specs: OpSpecs) -> bool:
    """Return whether a module's weight is quantized: FX requires one DTypeConfig that matches all four
    dtypes."""
    bias = torch.float16 if is_half_static(specs) else torch.float32
    output = torch.float32 if specs.is_dynamic else specs.activation_dtype
    wanted = (specs.activation_dtype, output, specs.declared_weight_dtype)
    for config in entry.dtype_configs:
        given = (config.input_dtype, config.output_dtype, config.weight_dtype)
        same = all(_is_same(a, b) for a, b in zip(given, wanted, strict=True))
        same_bias = bool(config.is_dynamic) or _is_same(config.bias_dtype, bias)
        if same and same_bias and bool(config.is_dynamic) == specs.is_dynamic:
            return True
    return False


def _violation(config: DTypeConfig, specs: OpSpecs, has_weight: bool, has_bias: bool) -> str:
    """Return what in ``specs`` the DTypeConfig ``config`` does not allow, or an empty string."""
    return (
        _input_violation(config, specs)
        or (_weight_violation(config, specs) if has_weight else "")
        or (_bias_violation(config, specs) if has_bias else "")
        or _output_violation(config, specs)
    )


def _input_violation(config: DTypeConfig, specs: OpSpecs) -> str:
    if config.input_dtype is None:
        return ""
    if bool(config.is_dynamic) != specs.is_dynamic:
        return f"activations have to be {'dynamic' if config.is_dynamic else 'static'}"
    return _dtype_violation(
        "activation", config.input_dtype, specs.activation_dtype
    ) or _constraint_violation(
        "activation", config.input_dtype_with_constraints, specs.activation_constructor
    )


def _weight_violation(config: DTypeConfig, specs: OpSpecs) -> str:
    if config.weight_dtype is None:
        return ""
    return _dtype_violation(
        "weight", config.weight_dtype, specs.declared_weight_dtype
    ) or _constraint_violation("weight", config.weight_dtype_with_constraints, specs.weight_constructor)


def _bias_violation(config: DTypeConfig, specs: OpSpecs) -> str:
    if config.bias_dtype is None:
        return ""
    asked = torch.float16 if is_half_static(specs) else torch.float32
    return _dtype_violation("bias", config.bias_dtype, asked)


def _output_violation(config: DTypeConfig, specs: OpSpecs) -> str:
    if config.output_dtype is None:
        return ""
    asked = torch.float32 if specs.is_dynamic else specs.activation_dtype
    return _dtype_violation("output", config.output_dtype, asked) or _constraint_violation(
        "activation", config.output_dtype_with_constraints, specs.activation_constructor
    )


def _dtype_violation(what: str, allowed: torch.dtype, asked: torch.dtype) -> str:
    if _is_same(allowed, asked):
        return ""
    return f"{what} {dtype_name(asked)} where it takes {dtype_name(allowed)}"


def _constraint_violation(what: str, allowed: DTypeWithConstraints, constructor: ObserverConstructor) -> str:
    if allowed.dtype is None or plain_dtype(allowed.dtype) != constructor.settings.dtype:
        return ""
    return _range_violation(what, allowed, constructor) or _fixed_violation(what, allowed, constructor)


def _range_violation(what: str, allowed: DTypeWithConstraints, constructor: ObserverConstructor) -> str:
    given = constructor.settings.limits
    low, high = allowed.quant_min_lower_bound, allowed.quant_max_upper_bound
    if low is not None and high is not None:
        if given.quant_min is None or given.quant_max is None:
            return f"{what} has no quant_min and quant_max, they have to be within [{low}, {high}]"
        if given.quant_min < low or given.quant_max > high:
            found = f"[{given.quant_min}, {given.quant_max}]"
            return f"{what} quant_min and quant_max are {found}, they have to be within [{low}, {high}]"
    smallest = allowed.scale_min_lower_bound
    if smallest is not None and (given.eps is None or given.eps < smallest):
        return f"{what} eps is {given.eps}, it has to be at least scale_min {smallest}"
    return ""


def _fixed_violation(what: str, allowed: DTypeWithConstraints, constructor: ObserverConstructor) -> str:
    scale, zero_point = allowed.scale_exact_match, allowed.zero_point_exact_match
    if scale is None or zero_point is None:
        return ""
    wanted = f"fixed qparams with scale {scale:.6g} and zero point {zero_point}"
    given = constructor.settings.limits
    if given.fixed_scale is None:
        return f"{what} has no fixed qparams, it takes {wanted}"
    if (given.fixed_scale, given.fixed_zero_point) != (scale, zero_point):
        found = f"scale {given.fixed_scale:.6g} and zero point {given.fixed_zero_point}"
        return f"{what} has fixed qparams with {found}, it takes {wanted}"
    return ""


def is_half_static(specs: OpSpecs) -> bool:
    """Return whether activations and weights are rounded to float16, with no qparams."""
    dtypes = {specs.activation_dtype, specs.weight_dtype}
    return dtypes == {torch.float16} and not specs.is_dynamic


def _is_same(allowed: torch.dtype | None, asked: torch.dtype) -> bool:
    """Return whether two dtypes are the same; quint8 and uint8 are, but quint4x2 is only equal to itself."""
    allowed = allowed or torch.float32
    if PACKED_DTYPES & {allowed, asked}:
        return allowed is asked
    return plain_dtype(allowed) == plain_dtype(asked)
