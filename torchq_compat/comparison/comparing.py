"""``torchq_compat.compare``: FX and this package on the same weights and calibration data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from torchq_compat.comparison.cases import Case
from torchq_compat.comparison.causes import judge
from torchq_compat.comparison.collect import FxSetting, capture
from torchq_compat.comparison.page import Comparison
from torchq_compat.support.argument_checks import FLAG, checked_arguments, instance_of, one_of

FX_SETTING = one_of("auto", True, False)


@checked_arguments(fx=FX_SETTING, is_qat=FLAG, observer_qparams=FLAG)
def compare(
    model: nn.Module,
    qconfig_mapping: Any,
    example_inputs: tuple[Any, ...],
    calibration_data: Any,
    *,
    prepare_custom_config: Any = None,
    convert_custom_config: Any = None,
    backend_config: Any = None,
    evaluation_data: Any = None,
    fx_state: Mapping[str, Any] | None = None,
    fx: FxSetting = "auto",
    is_qat: bool = False,
    observer_qparams: bool = False,
) -> Comparison:
    """Quantize ``model`` by FX and by this package, after training, and measure both against the float model.

    The float model is not changed. Values are compared on the reference conversions, quantize and dequantize
    around float ops; size and latency are those of ``convert_fx``.

    Args:
        model: the float model, in evaluation mode.
        example_inputs: as in ``prepare_fx``.
        qconfig_mapping, prepare_custom_config, backend_config: as in ``prepare_fx``.
        convert_custom_config: as in ``convert_fx``.
        calibration_data: batches, each a tuple of the model's positional arguments, or one tensor.
        evaluation_data: batches to measure on; default: ``calibration_data``, or ``example_inputs`` if that
            is empty.
        fx_state: the ``state_dict()`` of a model that FX prepared and calibrated; it is loaded on both sides,
            and the calibration data are only used to measure.
        fx: whether FX runs too; "auto": if it can.
        is_qat: whether to prepare with ``prepare_qat_fx``. Two trainings do not end with the same weights:
            give ``model`` the weights of one training; the fake-quantizes of both sides observe the
            calibration data.
        observer_qparams: as in ``convert_fx``; the commands ``run`` and ``compare`` set it.

    Returns:
        The verdict and all measurements; ``print`` it, or see ``to_json`` and ``write_html``.

    Raises:
        ScriptError: the data are not batches.
        CheckpointError: ``fx_state`` does not fit the model.
        ScriptError: ``fx`` is True and FX cannot run the model.
        TorchQCompatError: this package cannot quantize the model; see ``prepare_fx``.

    Example:
        >>> import torch
        >>> from torch.ao.quantization import get_default_qconfig_mapping
        >>> from torchq_compat import compare
        >>> model, x = torch.nn.Sequential(torch.nn.Linear(4, 2)).eval(), torch.randn(64, 4)
        >>> found = compare(model, get_default_qconfig_mapping("x86"), (x,), [x], fx=False)
        >>> found.verdict.status
        <Status.WITHOUT_FX: 'without FX'>
    """
    case = Case(
        model,
        qconfig_mapping,
        example_inputs,
        calibration_data,
        prepare_custom_config,
        convert_custom_config,
        backend_config,
        evaluation_data,
        fx_state,
        is_qat,
        observer_qparams,
    )
    return compare_case(case.checked(), fx)


@checked_arguments(case=instance_of(Case), fx=FX_SETTING)
def compare_case(case: Case, fx: FxSetting = "auto") -> Comparison:
    """Compare the two sides of a checked case."""
    captured = capture(case, fx)
    return Comparison(captured, judge(captured))
