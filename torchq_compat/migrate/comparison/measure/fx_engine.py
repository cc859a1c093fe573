"""FX's side: the only module of this package that calls the FX engine.

The library never calls it. ``compare`` shows the result of FX for a model, so it has to run FX; it imports
this module for that, and goes on without it if FX cannot run the model.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from torchq_compat.migrate.comparison.measure.cases import Case
from torchq_compat.migrate.comparison.measure.fx_places import observe_places
from torchq_compat.migrate.comparison.measure.our_side import Place
from torchq_compat.migrate.comparison.measure.sides import Key, QuantizedModel
from torchq_compat.migrate.running.fx_switch import calling_fx
from torchq_compat.support.torch_ao import (
    ConvertCustomConfig,
    PrepareCustomConfig,
    fx_engine,
    get_default_custom_config_dict,
)

__all__ = ["first_line", "quantize_by_fx"]

OURS = "torchq_compat."


def quantize_by_fx(case: Case, places: Mapping[Key, Place]) -> QuantizedModel:
    """Prepare, calibrate and convert a copy of ``case.model`` with FX, to be measured at ``places``.

    Classes of this package in a float-to-observed mapping become torch.ao's own; torch.ao's mapping to
    quantized classes is added if the script gives none.

    Raises:
        ImportError: this torch has no FX engine.
        Exception: any exception that FX raises.
    """
    fx = fx_engine()
    observed, quantized = _custom_configs(case)
    with calling_fx(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        is_qat = case.is_qat
        prepared = (fx.prepare_qat_fx if is_qat else fx.prepare_fx)(
            case.as_trained() if is_qat else copy.deepcopy(case.model).eval(),
            copy.deepcopy(case.qconfig_mapping),
            case.example_inputs,
            observed,
            backend_config=case.backend_config,
        ).eval()
        if case.fx_state is not None:
            prepared.load_state_dict(case.fx_state)
        with torch.no_grad():
            for batch in case.calibration_data if case.fx_state is None else ():
                prepared(*batch)
        reference = fx.convert_to_reference_fx(
            copy.deepcopy(prepared), quantized, backend_config=case.backend_config
        )
        deployed, error = _deployed(prepared, quantized, case)
        run, output_qparams = observe_places(prepared, reference, places)
    return QuantizedModel(run, output_qparams, deployed, error)


def _deployed(
    prepared: GraphModule, quantized: ConvertCustomConfig | None, case: Case
) -> tuple[nn.Module | None, str]:
    """Return FX's lowered model, as the script would ship it, or None and the error that FX raised."""
    try:
        deployed = fx_engine().convert_fx(copy.deepcopy(prepared), quantized)
        with torch.no_grad():
            deployed(*case.example_inputs)
    except Exception as cause:
        return None, first_line(cause)
    return deployed, ""


def first_line(cause: BaseException) -> str:
    return f"{type(cause).__name__}: {(str(cause).strip() or 'no message').splitlines()[0]}"


def _custom_configs(case: Case) -> tuple[PrepareCustomConfig | None, ConvertCustomConfig | None]:
    prepare = case.prepare_custom_config
    if isinstance(prepare, dict):
        prepare = PrepareCustomConfig.from_dict(prepare)
    convert = case.convert_custom_config
    if isinstance(convert, dict):
        convert = ConvertCustomConfig.from_dict(convert)
    if prepare is None:
        return None, convert
    prepare, mapped = copy.deepcopy(prepare), False
    for classes in prepare.float_to_observed_mapping.values():
        for float_class, observed in classes.items():
            classes[float_class] = _of_torch(observed, "float_to_observed_custom_module_class", float_class)
            mapped = True
    if convert is None and mapped:
        convert = ConvertCustomConfig()
    if convert is not None:
        convert = _with_torch_classes(convert)
    return prepare, convert


def _with_torch_classes(config: ConvertCustomConfig) -> ConvertCustomConfig:
    """Return ``config`` with torch.ao's own mapping for classes that it does not map, or maps to classes of
    this package."""
    known = _torch_classes("observed_to_quantized_custom_module_class")
    result = copy.deepcopy(config)
    for observed, quantized in known.items():
        given = [
            c for m in config.observed_to_quantized_mapping.values() for o, c in m.items() if o is observed
        ]
        if not given or given[0].__module__.startswith(OURS):
            result.set_observed_to_quantized_mapping(observed, quantized)
    return result


def _torch_classes(table: str) -> dict[Any, Any]:
    config: dict[str, dict[Any, Any]] = get_default_custom_config_dict()  # type: ignore[no-untyped-call]
    return config[table]


def _of_torch(cls: Any, table: str, key: Any) -> Any:
    known = _torch_classes(table)
    return known[key] if cls.__module__.startswith(OURS) and key in known else cls
