"""Reads the constructors given for groups of parts, and checks the other arguments given with them."""

from __future__ import annotations

from typing import Any

from torch import nn

from torchq_compat.config.backend_configs import read_backend_config
from torchq_compat.custom_modules.parts.part_dtypes import check_part_dtypes
from torchq_compat.custom_modules.parts.part_specs import PartConstructors, PartSpecs
from torchq_compat.custom_modules.recurrent.cell.kinds import kind_of
from torchq_compat.custom_modules.recurrent.modules.contract import check_example_inputs
from torchq_compat.errors import PartConfigError
from torchq_compat.qspecs.quantization_specs import OpSpecs

__all__ = ["given_specs"]

SUFFIX = "_obs_ctr"


def given_specs(
    float_module: nn.Module,
    example_inputs: tuple[Any, ...] | None,
    backend_config: Any,
    *,
    split_gates: bool,
    constructors: dict[str, Any],
) -> PartSpecs:
    """Return the specs that the arguments of ``get_individually_observed_parts`` give for ``float_module``.

    Raises:
        ConfigError: as ``get_individually_observed_parts`` does; also if the module has no qconfig.
        CustomModuleError: if the example inputs do not fit the module's sizes.
    """
    kind = kind_of(float_module)
    qconfig = getattr(float_module, "qconfig", None)
    if qconfig is None:
        raise PartConfigError(
            f"the float {kind.name} has no qconfig, so its parts without a constructor cannot be observed.",
            hint="prepare_fx sets it before it calls from_float; on your own, set its qconfig first.",
        )
    allowed = {f"{group}{SUFFIX}" for group in kind.groups}
    for name in constructors:
        if name not in allowed:
            raise PartConfigError(
                f"{name} is no constructor of the parts of {kind.name}.",
                hint=f"it has {', '.join(sorted(allowed))}.",
            )
    if split_gates and not kind.float_cell.gate_names:
        raise PartConfigError(
            f"split_gates=True, but {kind.name} has no gates to split.",
            hint="leave split_gates out.",
        )
    by_group = {name.removesuffix(SUFFIX): value for name, value in constructors.items()}
    specs = PartSpecs(OpSpecs(qconfig), PartConstructors.from_legacy(**by_group))
    if backend_config is not None:
        parts = kind.parts(split_gates=split_gates, projected=getattr(float_module, "proj_size", 0) > 0)
        check_part_dtypes(parts, specs, read_backend_config(backend_config))
    if example_inputs is not None:
        check_example_inputs(float_module, example_inputs)
    return specs
