"""Checks of the model given to prepare, which must be float and not quantized in any part."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.fx import GraphModule

from torchq_compat.capture.call_signature import CallSignature
from torchq_compat.errors import ExampleInputsError, InputError
from torchq_compat.graph.graph_module import record_of
from torchq_compat.graph.other_engines import OBSERVED_KEY
from torchq_compat.support.torch_ao import FloatFunctional, FXFloatFunctional, QuantizedGraphModule

__all__ = ["check_float_model", "signature_of"]

#: Classes of ``torch.ao.nn.quantized`` that are float.
FUNCTIONALS = (FloatFunctional, FXFloatFunctional)


def check_float_model(model: nn.Module) -> None:
    """Raise if ``model`` is not a float model.

    Raises:
        InputError: ``model`` is not an nn.Module, or it or one of its submodules was prepared or converted,
            here or by FX.
    """
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise InputError(
            f"the model must be an nn.Module, got the class {model.__name__}.",
            hint=f"make one: {model.__name__}(...).",
        )
    if not isinstance(model, nn.Module):
        raise InputError(
            f"the model must be an nn.Module, got {type(model).__name__}.",
            hint="pass the float model itself.",
        )
    for path, module in model.named_modules():
        stage = _stage_of(module)
        if stage is not None:
            raise _already_quantized(path, stage)


def signature_of(model: nn.Module, args: tuple[Any, ...]) -> CallSignature:
    """Return the signature of the call of ``model`` with ``args``.

    Raises:
        ExampleInputsError: ``args`` do not fit its ``forward``.
    """
    try:
        return CallSignature.of(model, args)
    except ValueError as cause:
        raise ExampleInputsError.does_not_fit(type(model).__name__, cause) from cause


def _stage_of(module: nn.Module) -> str | None:
    """Return the stage that ``module`` has been through, here or in FX, or None if it is float."""
    record = record_of(module)
    if record is not None:
        return record.stage.value
    if not isinstance(module, GraphModule):
        return None
    if OBSERVED_KEY in module.meta:
        return "prepared"
    kinds = {type(inner).__module__ for inner in module.modules() if not isinstance(inner, FUNCTIONALS)}
    is_converted = isinstance(module, QuantizedGraphModule) or any(
        kind.startswith("torch.ao.nn.quantized") for kind in kinds
    )
    return "converted" if is_converted else None


def _already_quantized(path: str, stage: str) -> InputError:
    where = f"the module at {path!r}" if path else "the model"
    return InputError(
        f"{where} is {stage} already; prepare takes a float model.",
        hint="prepare the float model it was made from, and convert a prepared model once.",
    )
