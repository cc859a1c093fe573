"""``torchq_compat.suggest``: find the modules that cost the most accuracy, and a mapping without them.

The model is prepared and calibrated once. Then, for each quantized module in turn, all other quantized
modules are switched off at convert: the accuracy that is left is the sensitivity of that module. Leaving out
one module at a time would not work: a bad value is quantized both by the module that produces it and by the
module that reads it.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import nn
from torch.fx import GraphModule

from torchq_compat import errors
from torchq_compat.annotate.annotation import op_record
from torchq_compat.capture.trial_runs import sqnr
from torchq_compat.comparison.cases import Batch, Case
from torchq_compat.quantize.explain import explain
from torchq_compat.quantize.first_call import at_once
from torchq_compat.quantize_fx import convert_to_reference_fx, prepare_fx
from torchq_compat.support import torch_ao
from torchq_compat.support.argument_checks import INDEX, checked_arguments, instance_of, one_of
from torchq_compat.support.decisions import Action
from torchq_compat.support.report import slow_stages
from torchq_compat.support.user_warnings import warn_user

FLOAT, SIXTEEN_BITS = "float", "16-bit"
#: If the worst n together do not help, this times n modules are tried one by one.
TRIED = 4
#: Activations in 16 bits, weights as before; the backend must list the dtype.
QCONFIG_16 = torch_ao.QConfig(  # type: ignore[no-untyped-call]
    activation=torch_ao.MinMaxObserver.with_args(
        dtype=torch.int16, qscheme=torch.per_tensor_symmetric, quant_min=-(2**15), quant_max=2**15 - 1
    ),
    weight=torch_ao.default_per_channel_weight_observer,
)


#: The code of decisions on values that grow with a size.
GROWING = "TQ437"


@dataclass(frozen=True)
class Sensitivity:
    """The accuracy that one module costs.

    Attributes:
        sqnr: SQNR of the whole model against the float model, in dB, with only this module quantized.
    """

    path: str
    kind: str
    sqnr: float


class SuggestedMapping(torch_ao.QConfigMapping):
    """A QConfigMapping with the measurements it comes from.

    Attributes:
        sensitivities: those of all quantized modules, the worst first.
        chosen: the paths of the modules with an entry of their own in the mapping, and the names that
            ``explain`` shows of calls in the model's own code, whose values grow with a size.
        sqnr_before, sqnr_after: SQNR of the whole model, in dB, without and with the entries for ``chosen``.
        instead: the entries for ``chosen``: "float" or "16-bit".
    """

    sensitivities: tuple[Sensitivity, ...] = ()
    chosen: tuple[str, ...] = ()
    sqnr_before: float = 0.0
    sqnr_after: float = 0.0
    instead: str = FLOAT

    def __str__(self) -> str:
        how = "without the chosen modules" if self.instead == FLOAT else "with the chosen modules in 16 bits"
        lines = [f"SQNR {self.sqnr_before:.1f} dB, {self.sqnr_after:.1f} dB {how}"]
        for sensitivity in self.sensitivities:
            mark = "*" if sensitivity.path in self.chosen else " "
            lines.append(f"{mark} {sensitivity.path}  {sensitivity.kind}  {sensitivity.sqnr:.1f} dB")
        return "\n".join(lines)


@checked_arguments(
    model=instance_of(nn.Module, what="an nn.Module"), n=INDEX, instead=one_of(FLOAT, SIXTEEN_BITS)
)
def suggest(
    model: nn.Module,
    qconfig_mapping: Any,
    example_inputs: tuple[Any, ...],
    calibration_data: Any,
    *,
    n: int = 3,
    instead: Literal["float", "16-bit"] = "float",
    prepare_custom_config: Any = None,
    convert_custom_config: Any = None,
    backend_config: Any = None,
    evaluation_data: Any = None,
) -> SuggestedMapping:
    """Measure the accuracy each quantized module costs, and leave out the worst.

    Args:
        model: the float model; it is not changed.
        qconfig_mapping, example_inputs, prepare_custom_config, backend_config: as in ``prepare_fx``.
        calibration_data: batches, each a tuple of the model's positional arguments, or one tensor.
        n: the maximum number of modules to leave out.
        instead: "float", or "16-bit" for 16-bit activations, which the backend must support.
        convert_custom_config: as in ``convert_fx``.
        evaluation_data: batches to measure on; default: ``calibration_data``.

    Returns:
        ``qconfig_mapping`` with entries for the worst modules (``set_module_name``); ``print`` shows the
            measurements.

    Raises:
        ArgumentError: ``n`` is below 1.
        InputError: there are no batches to measure on, or the model does not accept one.
        ConfigError: ``qconfig_mapping`` is neither a QConfigMapping nor its dict form.
        TorchQCompatError: the model cannot be prepared; see ``prepare_fx``.

    Example:
        >>> import torch
        >>> from torch.ao.quantization import get_default_qconfig_mapping
        >>> from torchq_compat import suggest
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
        >>> batches = [(torch.randn(16, 4),) for _ in range(4)]
        >>> mapping = suggest(model, get_default_qconfig_mapping("x86"), batches[0], batches, n=1)
        >>> len(mapping.chosen) <= 1 and mapping.sqnr_after >= mapping.sqnr_before
        True
    """
    settings = prepare_custom_config, convert_custom_config, backend_config
    case = Case(model, qconfig_mapping, example_inputs, calibration_data, *settings, evaluation_data)
    return suggest_for(case, n, instead)


def suggest_for(case: Case, n: int, instead: str) -> SuggestedMapping:
    """Return what ``suggest`` does of the settings in ``case``, which is not checked yet."""
    if n < 1:
        raise errors.ArgumentError.of("TQ903.n", n=n)
    mapping = (
        torch_ao.QConfigMapping.from_dict(case.qconfig_mapping)
        if isinstance(case.qconfig_mapping, dict)
        else case.qconfig_mapping
    )
    if not isinstance(mapping, torch_ao.QConfigMapping):
        raise errors.ConfigError.wrong_type("qconfig_mapping", "a QConfigMapping", case.qconfig_mapping)
    case = case.checked()
    model, given = case.model, (case.example_inputs, case.prepare_custom_config)
    _check_batches(model, case.evaluation_data)

    def calibrated(mapping: torch_ao.QConfigMapping) -> _Measurement:
        prepared = at_once(prepare_fx)(model, mapping, *given, backend_config=case.backend_config)
        case.calibrate(prepared)
        return _Measurement(model, prepared, mapping, case.convert_custom_config, case.evaluation_data)

    trial = calibrated(mapping)
    before = trial.sqnr(())
    result = sorted(_sensitivities(model, trial), key=lambda element: element.sqnr)
    chosen, after = _best_together(trial, [item.path for item in result], n, before)
    # No batch shows what longer inputs make of values that grow with them.
    growing = {d.path.partition("/")[0]: None for d in explain(trial.prepared) if d.code == GROWING}
    known = {*trial.calls, *(entry.path for entry in result)}.difference(chosen)
    if more := tuple(path for path in growing if path in known):
        chosen, after = (*chosen, *more), trial.sqnr((*chosen, *more))
    if not chosen:
        warn_user("TQ417")
    suggested = trial.suggested(chosen, instead)
    suggested.sensitivities = tuple(result)
    if chosen and instead == SIXTEEN_BITS:
        after = _measured_in_16_bits(calibrated(suggested), chosen)
    suggested.sqnr_before, suggested.sqnr_after = before, after
    return suggested


def _measured_in_16_bits(trial: _Measurement, chosen: tuple[str, ...]) -> float:
    """Measure the mapping itself, and warn about modules for which the backend has no 16 bits."""
    left = {decision.path: decision.reason for decision in explain(trial.prepared).left_float()}
    if refused := [path for path in chosen if path in left]:
        warn_user("TQ418", paths=", ".join(map(repr, refused)), reason=left[refused[0]])
    return trial.sqnr(())


def _check_batches(model: nn.Module, batches: list[Batch]) -> None:
    if not batches:
        raise errors.InputError.of("TQ901.no_batches")
    for index, batch in enumerate(batches):
        try:
            with torch.no_grad():
                model(*batch)
        except Exception as cause:
            raise errors.InputError.of("TQ901.batch_does_not_fit", index=index, cause=cause) from cause


@dataclass(frozen=True)
class _Measurement:
    """Converts the model with some modules switched off, and measures its SQNR."""

    model: nn.Module
    prepared: GraphModule
    mapping: torch_ao.QConfigMapping
    convert_custom_config: Any
    batches: list[Batch]

    @cached_property
    def _of_float(self) -> list[Any]:
        return [self.model(*batch) for batch in self.batches]

    @cached_property
    def calls(self) -> dict[str, tuple[str, Any, int]]:
        """The calls of functions in the model's own code: the path of the decision -> (the model's path, what
        is called, how many such calls are before it)."""
        graphs = (module.graph for module in self.prepared.modules() if isinstance(module, GraphModule))
        records = filter(None, (op_record(node) for graph in graphs for node in graph.nodes))
        return {
            record.label: ("", record.origin.object_types[0], record.call_index)
            for record in records
            if not record.origin.module_path and record.origin.object_types
        }

    def suggested(self, chosen: tuple[str, ...], instead: str = FLOAT) -> SuggestedMapping:
        """Return the mapping with an entry for each of ``chosen``."""
        result = SuggestedMapping()
        vars(result).update(copy.deepcopy(vars(self.mapping)))
        qconfig = None if instead == FLOAT else QCONFIG_16
        for path in chosen:
            if path in self.calls:
                result.set_module_name_object_type_order(*self.calls[path], qconfig)
            else:
                result.set_module_name(path, qconfig)
        result.chosen, result.instead = chosen, instead
        return result

    def sqnr(self, switched_off: tuple[str, ...]) -> float:
        ignored = warnings.catch_warnings(action="ignore", category=errors.QuantizationWarning)
        with ignored, torch.no_grad():
            converted = convert_to_reference_fx(
                self.prepared, self.convert_custom_config, qconfig_mapping=self.suggested(switched_off)
            )
            measured = [
                sqnr(expected, converted(*batch))
                for expected, batch in zip(self._of_float, self.batches, strict=True)
            ]
        return sum(measured) / len(measured)

    def can_switch_off(self, *paths: str) -> bool:
        """Return whether the modules at ``paths`` can be switched off at convert, not only at prepare."""
        try:
            self.sqnr(paths)
        except errors.TorchQCompatError:
            return False
        return True


def _sensitivities(model: nn.Module, trial: _Measurement) -> Iterator[Sensitivity]:
    modules = dict(model.named_modules())
    decided = {
        path: decision.kind
        for decision in explain(trial.prepared)
        if decision.action is Action.QUANTIZED
        and (path := decision.path.partition("/")[0]) in modules
        and path
    }
    inside = {path for path in decided if any(path.startswith(f"{other}.") for other in decided)}
    paths = [path for path in decided if path not in inside]
    if not trial.can_switch_off(*paths):
        paths = [path for path in paths if trial.can_switch_off(path)]
    with slow_stages("suggest") as begin:
        for index, path in enumerate(paths, 1):
            begin(f"{path} ({index} of {len(paths)})")
            others = tuple(other for other in paths if other != path)
            yield Sensitivity(path, type(modules[path]).__name__, trial.sqnr(others))


def _best_together(
    trial: _Measurement, paths: list[str], n: int, before: float
) -> tuple[tuple[str, ...], float]:
    """Return the worst ``n`` of ``paths``; if they do not improve the model together, those that improve it
    when added one after another."""
    after = trial.sqnr(tuple(paths[:n]))
    if after > before:
        return tuple(paths[:n]), after
    chosen: tuple[str, ...] = ()
    for path in paths[: n * TRIED]:
        after = trial.sqnr((*chosen, path))
        if after > before:
            chosen, before = (*chosen, path), after
        if len(chosen) == n:
            break
    return chosen, before
