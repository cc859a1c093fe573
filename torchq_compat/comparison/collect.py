"""Run the float model, this package and FX on the same weights and batches, and measure everything."""

import copy
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchq_compat.codes import error_line
from torchq_compat.comparison import sides
from torchq_compat.comparison.cases import Case, bad_data
from torchq_compat.comparison.causes import judge
from torchq_compat.comparison.our_side import KeyFacts, OurSide, quantize_by_us
from torchq_compat.comparison.page import Comparison
from torchq_compat.comparison.results import Capture, Costs, FxOutcome, FxRun, Kind, Point, Series
from torchq_compat.errors import ScriptError
from torchq_compat.support.argument_checks import FLAG, checked_arguments, instance_of, one_of
from torchq_compat.support.graph_nodes import tensors_in
from torchq_compat.support.report import slow_stages

FxSetting = bool | Literal["auto"]
MAX_POINTS = 400
#: A dimension with fewer values is not treated as time.
FEWEST_STEPS = 4


def capture(case: Case, fx: FxSetting) -> Capture:
    """Quantize ``case`` on both sides and measure.

    Raises:
        TorchQCompatError: this package cannot quantize the model.
        ScriptError: ``fx`` is True and FX cannot run the model.
    """
    with slow_stages("compare") as begin:
        begin("quantize here")
        ours = quantize_by_us(case)
        begin("quantize by FX")
        theirs, fx_run = None, FxRun(FxOutcome.NOT_ASKED)
        if fx:
            from torchq_compat.comparison.fx_side import quantize_by_fx

            try:
                theirs = quantize_by_fx(case, ours.places)
                fx_run = FxRun(FxOutcome.RAN, lowering_error=theirs.deployed_error)
            except Exception as cause:
                fx_run = FxRun(FxOutcome.RAISED, error_line(cause))
        begin("measure values")
        if theirs is not None:
            try:
                measured = _measure(case, ours, theirs)
            except _FxFailedError as error:
                theirs, fx_run = None, FxRun(FxOutcome.RAISED, str(error))
        if fx is True and theirs is None:
            raise ScriptError.of("TQ972.fx_fails", error=fx_run.error)
        if theirs is None:
            measured = _measure(case, ours, None)
        begin("measure time")
        costs = _costs(case, ours, theirs)
    outputs, points, series = measured
    of_ours = ours.cells, ours.left_float, ours.unlike_fx, ours.quantized_count
    return Capture(type(case.model).__name__, outputs, points, *of_ours, series, costs, fx_run)


class _FxFailedError(Exception):
    """FX's converted model does not run."""


def _measure(
    case: Case, ours: OurSide, theirs: sides.QuantizedModel | None
) -> tuple[tuple[Point, ...], tuple[Point, ...], tuple[Series, ...]]:
    """Run all sides on every batch; return the measurements of outputs and places, and the series to plot."""
    float_model = copy.deepcopy(case.model).eval()
    places = {key: sides.PlaceMeasures() for key in ours.places}
    outputs: list[sides.PlaceMeasures] = []
    series: list[Series] = []
    # The time dimension of three-dimensional tensors; None for a model without recurrent modules.
    recurrent = [module for module in float_model.modules() if isinstance(module, nn.RNNBase)]
    time_axis = int(any(module.batch_first for module in recurrent)) if recurrent else None
    for batch in case.evaluation_data:
        exact = _exact(float_model, batch)
        _, exact_readings = ours.exact.run(batch)
        our_result, our_readings = ours.quantized.run(batch)
        fx_result, fx_readings = _run_fx(theirs, batch)
        for key, measures in places.items():
            if key in exact_readings and key in our_readings:
                measures.add(exact_readings[key].value, our_readings[key], fx_readings.get(key))
        our_outputs = _output_readings(ours.quantized, our_result)
        fx_outputs: Sequence[sides.Reading | None] = _output_readings(theirs, fx_result) if theirs else ()
        if len(fx_outputs) != len(exact):
            fx_outputs = (None,) * len(exact)
        outputs = outputs or [sides.PlaceMeasures() for _ in exact]
        for index, value in enumerate(exact):
            outputs[index].add(value, our_outputs[index], fx_outputs[index])
        lines = [
            output_series(f"output {i}", time_axis, value, our.value, None if their is None else their.value)
            for i, (value, our, their) in enumerate(zip(exact, our_outputs, fx_outputs, strict=True))
            if our.value.shape == value.shape and (their is None or their.value.shape == value.shape)
        ]
        series = series or [line for line in lines if line is not None]
    return (
        tuple(_output_point(i, measures) for i, measures in enumerate(outputs) if measures.seen),
        tuple(_point(ours.places[key], measures) for key, measures in places.items() if measures.seen),
        tuple(series),
    )


def _exact(float_model: nn.Module, batch: tuple[Any, ...]) -> list[Tensor]:
    try:
        with torch.no_grad():
            return tensors_in(float_model(*batch))
    except Exception as cause:
        problem = f"has a batch the float model does not run on: {type(cause).__name__}: {cause}"
        raise bad_data("evaluation_data", problem) from cause


def _run_fx(
    theirs: sides.QuantizedModel | None, batch: tuple[Any, ...]
) -> tuple[Any, Mapping[sides.Key, sides.Reading]]:
    if theirs is None:
        return (), {}
    try:
        with warnings.catch_warnings(action="ignore"):  # Their effects show in the measurements.
            return theirs.run(batch)
    except Exception as cause:
        raise _FxFailedError(error_line(cause)) from cause


def _output_readings(side: sides.QuantizedModel, result: Any) -> list[sides.Reading]:
    values = tensors_in(result)
    all_qparams = side.output_qparams(result)
    return [sides.Reading(value, qparams) for value, qparams in zip(values, all_qparams, strict=True)]


def _point(place: KeyFacts, measures: sides.PlaceMeasures) -> Point:
    return Point(place.name, place.kind, place.operation, place.reason, *measures.sides())


def _output_point(index: int, measures: sides.PlaceMeasures) -> Point:
    return Point(f"output {index}", Kind.OUTPUT, "result of the model", "", *measures.sides())


def _costs(case: Case, ours: OurSide, theirs: sides.QuantizedModel | None) -> Costs:
    float_model = copy.deepcopy(case.model).eval()
    models = [float_model, ours.quantized.deployed, theirs.deployed if theirs else None]
    sizes: Any = [sides.state_bytes(model) if model is not None else None for model in models]
    with warnings.catch_warnings(action="ignore"):
        times: Any = sides.milliseconds([model and partial(model, *case.example_inputs) for model in models])
    (float_bytes, our_bytes, fx_bytes), (float_ms, our_ms, fx_ms) = sizes, times
    return Costs(float_bytes, our_bytes, fx_bytes, float_ms, our_ms, fx_ms)


def output_series(
    name: str, axis: int | None, exact: Tensor, ours: Tensor, fx: Tensor | None
) -> Series | None:
    """Return the values along time at the position where either side is farthest from float; None if there is
    no time to draw.

    Time is dimension ``axis`` of a three-dimensional tensor. Other tensors are not drawn: a line over a
    batch, or over classes, would be meaningless.
    """
    if axis is None or exact.dim() != 3 or exact.shape[axis] < FEWEST_STEPS or not exact.is_floating_point():
        return None
    error = (ours - exact).abs() if fx is None else torch.maximum((ours - exact).abs(), (fx - exact).abs())
    rows = error.movedim(axis, 0).reshape(error.shape[axis], -1)
    worst = int(rows.amax(0).argmax())

    def along(value: Tensor) -> tuple[float, ...]:
        line = value.detach().movedim(axis, 0).reshape(value.shape[axis], -1)[:MAX_POINTS, worst]
        return tuple(float(number) for number in line)

    index = torch.unravel_index(torch.tensor(worst), [s for i, s in enumerate(exact.shape) if i != axis])
    where = ", ".join(str(int(number)) for number in index)
    place = f"At [{where}] of the other dimensions" if where else ""
    return Series(name, "time", place, along(exact), along(ours), None if fx is None else along(fx))


# ``torchq_compat.compare``: FX and this package on the same weights and calibration data.


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
    settings = prepare_custom_config, convert_custom_config, backend_config, evaluation_data, fx_state
    data = example_inputs, calibration_data
    case = Case(model, qconfig_mapping, *data, *settings, is_qat, observer_qparams)
    return compare_case(case.checked(), fx)


@checked_arguments(case=instance_of(Case), fx=FX_SETTING)
def compare_case(case: Case, fx: FxSetting = "auto") -> Comparison:
    """Compare the two sides of a checked case."""
    captured = capture(case, fx)
    return Comparison(captured, judge(captured))
