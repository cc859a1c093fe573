"""Observes the parts of a recurrent module one by one, each with the constructor given for its group."""

from __future__ import annotations

from typing import Any

from torch import nn

from torchq_compat.custom_modules.recurrent.modules.families import FAMILIES, family_of
from torchq_compat.custom_modules.recurrent.modules.given_specs import given_specs
from torchq_compat.custom_modules.recurrent.modules.recurrent_module import ObservedRecurrent
from torchq_compat.errors import CustomModuleError
from torchq_compat.support.argument_checks import FLAG, Expected, checked_arguments, optional

__all__ = ["CELL_INPUTS", "get_individually_observed_parts"]

#: ``given_specs`` checks them against the module's sizes.
CELL_INPUTS = optional(
    Expected("a tuple, as (x, state)", lambda value: type(value) in (tuple, list) and bool(value))
)


@checked_arguments(example_inputs=CELL_INPUTS, split_gates=FLAG)
def get_individually_observed_parts(
    float_module: nn.Module,
    example_inputs: tuple[Any, ...] | None = None,
    backend_config: Any = None,
    *,
    split_gates: bool = False,
    **constructors: Any,
) -> ObservedRecurrent:
    """Observe the parts of ``float_module``, in both directions, with the given constructors.

    A constructor is an observer or fake-quantize class of torch.ao or torchao, or ``Class.with_args(...)``.
    A part without one follows ``float_module.qconfig``; sigmoid and tanh then have fixed qparams over [0, 1)
    and [-1, 1).

    Args:
        float_module: an ``nn.LSTM``, ``GRU``, ``RNN`` or one of their cells with a ``qconfig`` attribute.
        example_inputs: ``(x, state)``, checked against the module's sizes if given.
        backend_config: the BackendConfig that lists the dtypes parts may have; default: any integer dtype.
        split_gates: one projection pair and one sum per gate instead of one for all gates.
        constructors: ``<group>_obs_ctr=constructor`` for the groups of the module's parts: ``igates``,
            ``hgates``, ``linear_output``, ``hidden_state`` and ``weight`` of every kind (RNN with ReLU has no
            ``linear_output``); ``sigmoid``, ``tanh`` and ``sigmoid_input`` of LSTM and GRU; ``tanh_input`` of
            every kind but RNN with ReLU; ``cell_state`` and ``tanh_cell_state`` of LSTM; ``hidden_product``,
            the products ``(1 - z) * n`` and ``z * h``, of GRU. None leaves a group out.

    Raises:
        ConfigError: a group the module does not have, a value that is no constructor, a dtype that
            ``backend_config`` does not allow (the message names the part), or a module without a qconfig.
        CustomModuleError: ``float_module`` is not recurrent, or ``example_inputs`` do not fit its sizes.

    Returns:
        The observed module, called like ``float_module``.

    Example:
        >>> import torch
        >>> from torch.ao.quantization import get_default_qconfig
        >>> from torchq_compat.profiles import int16_parts
        >>> from torchq_compat.recurrent_parts import get_individually_observed_parts
        >>> gru = torch.nn.GRU(4, 8).eval()
        >>> gru.qconfig = get_default_qconfig("x86")
        >>> observed = get_individually_observed_parts(gru, **int16_parts(gru))
        >>> observed(torch.randn(5, 2, 4))[0].shape
        torch.Size([5, 2, 8])
    """
    family = family_of(float_module)
    if family is None:
        raise CustomModuleError.call_failed(
            "float_module",
            f"one of {', '.join(f.float_class.__name__ for f in FAMILIES)} is needed, "
            f"got {type(float_module).__name__}",
        )
    specs = given_specs(
        float_module, example_inputs, backend_config, split_gates=split_gates, constructors=constructors
    )
    return family.observed.observe(float_module, specs, split_gates=split_gates)
