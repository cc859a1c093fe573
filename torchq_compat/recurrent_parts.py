"""Recurrent modules whose parts are observed one by one: LSTM, GRU, RNN and their cells.

Legacy has this for LSTM alone, ``torch.ao.quantization.fx.lstm_utils``; ``torchq_compat.lstm_utils`` keeps
its signatures. The parts of every kind of cell are listed in ``custom_modules.recurrent.parts``.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from torchq_compat.custom_modules.part_dtypes import check_part_dtypes
from torchq_compat.custom_modules.part_errors import PartConfigError
from torchq_compat.custom_modules.part_specs import PartConstructors, PartSpecs
from torchq_compat.custom_modules.recurrent.cell_owner import ObservedModule
from torchq_compat.custom_modules.recurrent.contract import check_example_inputs
from torchq_compat.custom_modules.recurrent.families import FAMILIES, family_of
from torchq_compat.custom_modules.recurrent.kinds import kind_of
from torchq_compat.errors import CustomModuleError
from torchq_compat.legacy.backend_configs import read_backend_config
from torchq_compat.specs.quantization_specs import OpSpecs

__all__ = ["get_individually_observed_parts"]

SUFFIX = "_obs_ctr"


def get_individually_observed_parts(
    float_module: nn.Module,
    example_inputs: tuple[Any, ...] | None = None,
    backend_config: Any = None,
    *,
    split_gates: bool = False,
    **constructors: Any,
) -> ObservedModule:
    """An observed module, in both directions, with the given constructors on its parts.

    A constructor is an observer or fake-quantize class of torch.ao or torchao, or ``Class.with_args(...)``.
    A part without one follows ``float_module.qconfig``; sigmoid and tanh then have fixed qparams over [0, 1)
    and [-1, 1).

    Args:
        float_module: an ``nn.LSTM``, ``GRU``, ``RNN`` or one of their cells with a ``qconfig`` attribute.
        example_inputs: ``(x, state)``, checked against the module's sizes when given.
        backend_config: which dtypes the parts may have; default: any integer dtype.
        split_gates: one projection pair and one sum per gate instead of one for all gates.
        constructors: ``<group>_obs_ctr=constructor`` for the groups of the module's parts: ``igates``,
            ``hgates``, ``linear_output``, ``hidden_state`` and ``weight`` of every kind (RNN with ReLU has no
            ``linear_output``); ``sigmoid``, ``tanh``, ``sigmoid_input`` and ``tanh_input`` where there are
            gates; ``cell_state`` and ``tanh_cell_state`` of LSTM; ``hidden_product``, the products
            ``(1 - z) * n`` and ``z * h``, of GRU. None is a group left out.

    Raises:
        ConfigError: a group the module does not have, a constructor that is none, or a dtype
            ``backend_config`` does not allow; the message names the part.
        CustomModuleError: no recurrent module, no qconfig, or example inputs that do not fit its sizes.
    """
    family = family_of(float_module)
    if family is None:
        raise CustomModuleError.call_failed(
            "float_module",
            f"one of {', '.join(f.float_class.__name__ for f in FAMILIES)} is needed, "
            f"got {type(float_module).__name__}",
        )
    kind = kind_of(float_module)
    qconfig = getattr(float_module, "qconfig", None)
    if qconfig is None:
        raise PartConfigError.missing_qconfig(kind.name)
    allowed = {f"{group}{SUFFIX}" for group in kind.groups}
    for name in constructors:
        if name not in allowed:
            raise PartConfigError.unknown_group(name, kind.name, allowed)
    if split_gates and not kind.float_cell.gate_names:
        raise PartConfigError.no_gates(kind.name)
    by_group = {name.removesuffix(SUFFIX): value for name, value in constructors.items()}
    specs = PartSpecs(OpSpecs(qconfig), PartConstructors.from_legacy(**by_group))
    if backend_config is not None:
        parts = kind.parts(split_gates=split_gates, projected=getattr(float_module, "proj_size", 0) > 0)
        check_part_dtypes(parts, specs, read_backend_config(backend_config))
    if example_inputs is not None:
        check_example_inputs(float_module, example_inputs)
    return family.observed.observe(float_module, specs, split_gates=split_gates)
