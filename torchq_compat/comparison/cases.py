"""Cases to compare: a float model with all that FX needs, given, or recorded from a legacy script."""

from __future__ import annotations

import copy
import functools
import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.modules.module import register_module_forward_pre_hook

from torchq_compat.errors import ScriptError
from torchq_compat.port.process import progress
from torchq_compat.port.running import redirections
from torchq_compat.port.running.fx_draws import drawing_as_fx
from torchq_compat.read.example_inputs import read_example_inputs
from torchq_compat.support import metadata
from torchq_compat.support.argument_checks import checked_arguments, instance_of
from torchq_compat.support.process_state import own_attribute
from torchq_compat.support.upstream import pytree

# A case: a float model with everything that FX needs to quantize it.


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

    def calibrate(self, prepared: Callable[..., Any]) -> None:
        """Call ``prepared`` with the calibration data, with a bar on a terminal, unless a state is loaded."""
        if self.fx_state is None:
            call_with_batches(prepared, self.calibration_data)

    def checked(self) -> Case:
        """Return the case with the example inputs as a tuple and the data as lists of tuples.

        Raises:
            ScriptError: there is no model, or the data are not batches.
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
        return replace(
            self, calibration_data=calibration, evaluation_data=evaluation, example_inputs=example_inputs
        )


def read_case(what: str, value: Any) -> Case:
    """Return ``value``, a dict or any object with the attributes of a Case, as a checked Case.

    Raises:
        ScriptError: an attribute is missing or unknown.
    """
    if isinstance(value, Mapping):
        given = dict(value)
        if unknown := set(given) - {field.name for field in fields(Case)}:
            raise _not_a_case(what, f"it has an unknown {sorted(map(str, unknown))[0]!r}")
    else:
        names = [field.name for field in fields(Case)]
        given = {name: getattr(value, name) for name in names if hasattr(value, name)}
    for setting in fields(Case):
        if setting.default is MISSING and setting.name not in given:
            raise _not_a_case(what, f"it has no {setting.name!r}")
    return Case(**given).checked()


@checked_arguments(prepared=instance_of(nn.Module, what="what prepare_fx returned"))
def calibrate(prepared: nn.Module, batches: Iterable[Any]) -> None:
    """Call a prepared model with batches, without gradients; on a terminal with a bar.

    Args:
        prepared: what ``prepare_fx`` returned.
        batches: each a tuple or list of the model's positional arguments, or one tensor, as a DataLoader has
            them. Targets among them have to be taken out before.

    Raises:
        ScriptError: ``batches`` are no batches.
        InputError: the model does not take one.

    Example:
        >>> import torch
        >>> from torch.ao.quantization import get_default_qconfig_mapping
        >>> from torchq_compat import calibrate, convert_fx, prepare_fx
        >>> model, batches = torch.nn.Sequential(torch.nn.Linear(4, 2)).eval(), torch.randn(8, 16, 4)
        >>> prepared = prepare_fx(model, get_default_qconfig_mapping("x86"), (batches[0],))
        >>> calibrate(prepared, list(batches))
        >>> convert_fx(prepared)(batches[0]).shape
        torch.Size([16, 2])
    """
    call_with_batches(prepared, _checked("batches", batches))


def call_with_batches(prepared: Callable[..., Any], batches: Iterable[Any]) -> None:
    with torch.no_grad():
        for batch in progress("calibrating", batches):
            prepared(*_batch(batch))


def _batches(name: str, data: Any) -> list[Batch]:
    return [_batch(batch) for batch in _checked(name, data)]


def _checked(name: str, data: Any) -> Iterable[Any]:
    if isinstance(data, (Tensor, str, bytes, torch.Size, Mapping)) or not isinstance(data, Iterable):
        raise bad_data(name, f"is a {type(data).__name__} and no list of batches")
    return data


def _batch(batch: Any) -> Batch:
    # A DataLoader yields lists.
    return tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)


def bad_data(name: str, problem: str) -> ScriptError:
    """Return the error of data that are no batches of the float model."""
    return ScriptError.of("TQ973.data", name=name, problem=problem)


def _not_a_case(what: str, problem: str) -> ScriptError:
    return ScriptError.of("TQ973.not_a_case", what=what, problem=problem)


# Record what a legacy script quantizes as it runs: its models, configurations and calibration batches.
#
# The script runs on this package, as under ``torchq-compat run``. Afterwards FX is given the same float
# models and batches; meanwhile the redirected functions are FX's own again (``fx_switch``).


#: The number of last batches kept from a training, which may be long.
LAST_BATCHES = 8

Function = Callable[..., Any]


@dataclass
class Recording:
    """One prepared model: its case, whose calibration data are the batches it has been called with since.

    Copies of the model share the recording, so the script may calibrate any of them.
    """

    case: Case
    is_converted: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class ScriptRecorder:
    """Records the calls of prepare_fx and convert_fx.

    Args:
        trained_qparams: whether trained models convert with the qparams they trained with, not with FX's.

    Attributes:
        remarks: remarks to print with the report.
    """

    def __init__(self, *, trained_qparams: bool = False) -> None:
        self._trained_qparams = trained_qparams
        self.remarks: list[str] = []
        self._recordings: list[Recording] = []
        self._is_recording = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Redirect FX's functions permanently, and record calls of prepared models inside the ``with`` block.

        The functions of this package are recorded too: a script that was ported can be compared as well.
        """
        redirections.redirect(self._wrap_redirected, wrap_ours=self._wrap)
        with register_module_forward_pre_hook(_note_call), own_attribute(self, "_is_recording", True):
            yield

    def cases(self, script: str) -> tuple[Case, ...]:
        """Return a case for every model that was prepared, calibrated and converted.

        Raises:
            ScriptError: there is no such model.
        """
        converted = [recording for recording in self._recordings if recording.is_converted]
        if not converted:
            raise ScriptError.of("TQ973.no_case", script=script)
        return tuple(recording.case.checked() for recording in converted)

    def _wrap_redirected(self, function: Function, original: Function) -> Function:
        converting = function if self._trained_qparams else redirections.converting_as_fx(function)
        return self._wrap(drawing_as_fx(converting, original), original)

    def _wrap(self, function: Function, original: Function) -> Function:
        record = getattr(self, f"_{function.__name__}", None)

        @functools.wraps(function)
        def redirected(*args: Any, **kwargs: Any) -> Any:
            if redirections.fx_is_called():
                return original(*args, **kwargs)
            if record is None or not self._is_recording:
                return function(*args, **kwargs)
            arguments = inspect.signature(function).bind(*args, **kwargs).arguments
            return record(functools.partial(function, *args, **kwargs), arguments)

        return redirected

    def _prepare_fx(self, call: Function, arguments: dict[str, Any], *, is_qat: bool = False) -> Any:
        known = {setting.name for setting in fields(Case)}
        given = {name: copy.deepcopy(value) for name, value in arguments.items() if name in known}
        batches = deque[Batch](maxlen=LAST_BATCHES if is_qat else None)
        recording = Recording(Case(**given, calibration_data=batches, is_qat=is_qat))
        prepared = call()
        metadata.RECORDING.write(prepared, recording)
        self._recordings.append(recording)
        return prepared

    def _prepare_qat_fx(self, call: Function, arguments: dict[str, Any]) -> Any:
        return self._prepare_fx(call, arguments, is_qat=True)

    def _convert_fx(self, call: Function, arguments: dict[str, Any]) -> Any:
        recording = metadata.RECORDING.of(arguments["graph_module"])
        if recording is None or recording.is_converted:
            return call()
        # Without the batches on which convert tries what it makes.
        trained, batches = arguments["graph_module"].state_dict(), list(recording.case.calibration_data)
        converted = call()
        recording.is_converted = True
        recording.case = replace(
            recording.case,
            calibration_data=batches,
            convert_custom_config=arguments.get("convert_custom_config"),
            observer_qparams=converted.record.observer_qparams,
        )
        if recording.case.is_qat:
            self.remarks.append(_take_trained(recording.case, trained))
        return converted

    _convert_to_reference_fx = _convert_fx


def _take_trained(case: Case, trained: Mapping[str, Any]) -> str:
    """Load the tensors that the script trained into the recorded model, and return the remark about it."""
    own = case.model.state_dict()
    result = {
        name: value.detach().clone()
        for name, value in trained.items()
        if isinstance(value, Tensor) and name in own and own[name].shape == value.shape
    }
    case.model.load_state_dict(result, strict=False)
    untrained = sorted(own.keys() - result.keys())
    kept = f"; {', '.join(untrained[:3])} as before the training" if untrained else ""
    return (
        f"{type(case.model).__name__} goes through prepare_qat_fx: both sides have the weights it was "
        f"trained to{kept}, and observe the last {len(case.calibration_data)} batches anew"
    )


def _note_call(module: nn.Module, args: tuple[Any, ...]) -> None:
    if isinstance(module, GraphModule):
        recording = metadata.RECORDING.of(module)
        if isinstance(recording, Recording) and not recording.is_converted:
            # Copies of the tensors, since a script may reuse the same buffers.
            kept = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), args)
            recording.case.calibration_data.append(kept)
