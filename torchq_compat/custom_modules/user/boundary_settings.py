"""Reads which inputs and outputs of a user's module are quantized, and in which dtype.

The default is FX's convention: every float input and output is quantized by the module's QConfig. The
observed class changes this with attributes:

    class ObservedAttention(nn.Module):
        quantized_inputs = {"mask": None, "state.0": torch.int16}
        quantized_outputs = {"1": None}

Keys are labels (see ``tensor_labels``); the key of a structure applies to all tensors in it. Values: None
leaves a tensor float, a dtype observes it in this dtype, an observer constructor with this observer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torchao.quantization.pt2e.quantizer import QuantizationSpec

from torchq_compat.errors import UserModuleError
from torchq_compat.opaque_calls.tensor_labels import most_specific
from torchq_compat.qspecs.observers import translate_constructor
from torchq_compat.qspecs.quantization_specs import OpSpecs, make_spec
from torchq_compat.support.dtypes import dtype_name, dtype_range, is_integer
from torchq_compat.support.torch_ao import FakeQuantize, HistogramObserver, MovingAverageMinMaxObserver

__all__ = ["check_keys", "choose_specs"]


def choose_specs(
    settings: dict[Any, Any], labels: list[str], specs: OpSpecs, path: str, setting: str
) -> tuple[QuantizationSpec | None, ...]:
    """Return the spec of every labelled tensor.

    Raises:
        ConfigError: if a value is not None, a dtype or a constructor.
        CustomModuleError: if a dtype is not an integer dtype.
    """
    by_label = {str(key): value for key, value in settings.items()}
    chosen = []
    for label in labels:
        key = most_specific(by_label, label)
        named = f"{setting}[{key!r}] of the module at {path!r}"
        chosen.append(specs.activation if key is None else _spec(by_label[key], specs, named))
    return tuple(chosen)


def check_keys(settings: Any, labels: Iterable[str], path: str, setting: str) -> None:
    """Check that settings are a dict whose keys are labels of some call.

    Raises:
        CustomModuleError: if they are not; names the key and the labels.
    """
    if not isinstance(settings, Mapping):
        raise UserModuleError(
            f"{setting} of the module at {path!r} must be a dict, got {type(settings).__name__}.",
            hint=f'write {setting} = {{"name": choice}}; a choice is None (floats), an integer dtype, or '
            "an observer constructor.",
        )
    known = sorted(set(labels))
    for key in map(str, settings):
        if not any(label == key or label.startswith(f"{key}.") for label in known):
            raise UserModuleError(
                f"{setting} of the module at {path!r} names {key!r}, which its calls do not have.",
                hint="they have " + (", ".join(repr(k) for k in known) or "none") + ".",
            )


def _spec(value: Any, specs: OpSpecs, named: str) -> QuantizationSpec | None:
    if value is None:
        return None
    if not isinstance(value, torch.dtype):
        return make_spec(translate_constructor(value, named))
    if value == specs.activation_dtype:
        return specs.activation
    if not is_integer(value):
        raise UserModuleError(
            f"{named} is {dtype_name(value)}, which is no integer dtype.",
            hint="None leaves a tensor in floats.",
        )
    low, high = dtype_range(value)
    if specs.activation_constructor.settings.is_fake_quantize:
        kind: Any = FakeQuantize.with_args(observer=MovingAverageMinMaxObserver)  # type: ignore[no-untyped-call]
    else:
        kind = HistogramObserver
    constructor = kind.with_args(dtype=value, quant_min=low, quant_max=high)
    return make_spec(translate_constructor(constructor, named))
