"""A case: a float model with everything that FX needs to quantize it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from torchq_compat.capture.example_inputs import read_example_inputs
from torchq_compat.errors import CaseError

__all__ = ["Case", "read_case"]

Batch = tuple[Any, ...]


@dataclass(frozen=True)
class Case:
    """The arguments of ``compare``.

    Attributes:
        model: the float model.
        calibration_data: batches, each the tuple of the model's positional arguments.
        evaluation_data: batches on which both sides are measured; default: the calibration data, or the
            example inputs if there are none.
        fx_state: the state of a model that FX calibrated, loaded on both sides instead of calibrating.
        is_qat: whether to prepare with ``prepare_qat_fx``; ``model`` has the weights that training ended
            with, and the fake-quantizes observe the calibration data.
        observer_qparams: as in ``convert_fx``; None: as the caller of ``compare`` wants it.
    """

    model: nn.Module
    qconfig_mapping: Any
    example_inputs: Any
    calibration_data: Any
    prepare_custom_config: Any = None
    convert_custom_config: Any = None
    backend_config: Any = None
    evaluation_data: Any = None
    fx_state: Any = None
    is_qat: bool = False
    observer_qparams: bool | None = None

    def as_trained(self) -> nn.Module:
        """Return a copy of the model in training mode, for ``prepare_qat_fx``."""
        return copy.deepcopy(self.model).train()

    def checked(self) -> Case:
        """Return the case with the example inputs as a tuple and the data as lists of tuples.

        Raises:
            CaseError: there is no model, or the data are not batches.
            InputError: see ``read_example_inputs``.
        """
        if not isinstance(self.model, nn.Module):
            raise _not_a_case("this", f"the model is a {type(self.model).__name__}")
        example_inputs = read_example_inputs(self.example_inputs, self.model)
        calibration = _batches("calibration_data", self.calibration_data)
        given = self.evaluation_data
        # Dynamic quantization needs no calibration.
        measured_on = calibration or [example_inputs]
        evaluation = measured_on if given is None else _batches("evaluation_data", given)
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        read = {"calibration_data": calibration, "evaluation_data": evaluation}
        return Case(**{**values, **read, "example_inputs": example_inputs})


def read_case(what: str, value: Any) -> Case:
    """Return ``value``, a dict or any object with the attributes of a Case, as a checked Case.

    Raises:
        CaseError: an attribute is missing or unknown.
    """
    if isinstance(value, Mapping):
        given = dict(value)
        unknown = set(given) - {field.name for field in fields(Case)}
        if unknown:
            raise _not_a_case(what, f"it has an unknown {sorted(map(str, unknown))[0]!r}")
    else:
        given = {
            field.name: getattr(value, field.name) for field in fields(Case) if hasattr(value, field.name)
        }
    for field in fields(Case):
        if field.default is MISSING and field.name not in given:
            raise _not_a_case(what, f"it has no {field.name!r}")
    return Case(**given).checked()


def _batches(name: str, data: Any) -> list[Batch]:
    if isinstance(data, (Tensor, str, bytes, torch.Size, Mapping)) or not isinstance(data, Iterable):
        raise CaseError.bad_data(name, f"is a {type(data).__name__} and no list of batches")
    return [_batch(batch) for batch in data]


def _batch(batch: Any) -> Batch:
    # A DataLoader yields lists.
    return tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)


def _not_a_case(what: str, problem: str) -> CaseError:
    return CaseError(
        f"{what} is no case: {problem}.",
        hint="a case has model, qconfig_mapping, example_inputs and calibration_data, as a dict or any "
        "object with these attributes; the other arguments of torchq_compat.compare may be given.",
    )
