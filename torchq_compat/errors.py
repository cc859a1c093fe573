"""The errors and the warning that this package raises on purpose; all of them are public.

Each error says what went wrong and where (module path, setting), and after ``Hint:`` what to do. Its wording
stands where it is raised; here is what several modules share.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = [
    "AnnotationError",
    "ArgumentError",
    "AtenLSTMError",
    "CalibrationError",
    "CallError",
    "CaptureError",
    "CaseError",
    "CheckpointError",
    "CodeError",
    "ConfigError",
    "ConvertError",
    "CustomModuleError",
    "ExampleInputsError",
    "ExecutorchError",
    "ExportError",
    "FxError",
    "InputError",
    "LeftFloatError",
    "ModuleAttributeError",
    "OnnxError",
    "OnnxFileError",
    "PartConfigError",
    "PathError",
    "QuantizationWarning",
    "RecurrentModuleError",
    "ReportError",
    "RewriteUsageError",
    "ScriptError",
    "StreamingError",
    "TorchQCompatError",
    "UserModuleError",
]


class TorchQCompatError(Exception):
    """Base of all errors of torchq_compat.

    Args:
        message: what is wrong and where (module path, setting).
        hint: what the user can do about it.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        self.message = message
        self.hint = hint
        super().__init__(f"{message}\nHint: {hint}" if hint else message)


class InputError(TorchQCompatError, ValueError):
    """Example inputs or call arguments that do not fit the model."""


class ExampleInputsError(InputError):
    """Example inputs that the float model itself does not run on."""

    @classmethod
    def does_not_fit(cls, model: str, cause: BaseException) -> ExampleInputsError:
        reason = cause.message if isinstance(cause, TorchQCompatError) else f"{type(cause).__name__}: {cause}"
        return cls(
            f"{model}.forward does not run on the example_inputs: {reason}",
            hint="check the number, shapes and dtypes of example_inputs by calling model(*example_inputs).",
        )


class ArgumentError(InputError, TypeError):
    """An argument of a public function that is not what the function takes; nothing was changed."""


class CallError(InputError, RuntimeError):
    """A prepared or converted model that failed on the arguments of a call."""


class ConfigError(TorchQCompatError, ValueError):
    """A setting that cannot be read or that contradicts another one."""

    @classmethod
    def wrong_type(cls, setting: str, expected: str, found: object) -> ConfigError:
        return cls(
            f"{setting} must be {expected}, got {type(found).__name__}.",
            hint=f"build it with the torch.ao class, or use the documented dict form of {setting}.",
        )

    @classmethod
    def not_supported(cls, setting: str, why: str, hint: str) -> ConfigError:
        return cls(f"{setting} is not supported: {why}.", hint=hint)


class CaptureError(TorchQCompatError):
    """torch.export could not capture the model."""

    @classmethod
    def differs(cls, model: str, stage: str, what: str) -> CaptureError:
        return cls(
            f"{model} cannot be quantized: {stage} computes something else than the float model on the "
            f"example inputs ({what}).",
            hint="the result would be wrong, so there is none. Give example_inputs without sizes of 1, or "
            "fix the sizes that the model's code depends on with dynamic_shapes=; if that does not help, "
            "it is a defect of torchq_compat: report it with the model's code. The model was not changed.",
        )

    @classmethod
    def lost_forward(cls, model: str, modules: str, what: str) -> CaptureError:
        return cls(
            f"{model} cannot be quantized: {modules} has a forward of its own, which is not called once its "
            f"class is mapped, and without it the model computes something else ({what}).",
            hint="map the class to an observed class of yours, whose from_float keeps the computation, or "
            "move the code into a module around the torch.nn one, and map that class. The model was not "
            "changed.",
        )


class ExportError(TorchQCompatError, ValueError):
    """A model cannot be exported as asked."""


class StreamingError(TorchQCompatError, ValueError):
    """A model cannot be fed its sequences in pieces."""


class CustomModuleError(TorchQCompatError):
    """A custom module whose classes do not do what the mapping promises."""

    @classmethod
    def call_failed(cls, path: str, problem: str) -> CustomModuleError:
        return cls(
            f"the call of module {path!r} is not valid: {problem}.",
            hint="the module takes the same arguments as the float module it replaces.",
        )

    @classmethod
    def not_observed_here(cls, found: str) -> CustomModuleError:
        return cls(
            f"{found} is not a custom module this package made.",
            hint="let from_float and from_observed return what the class they inherit them from returns.",
        )


class ConvertError(TorchQCompatError):
    """convert_fx was given something it cannot convert."""


class CheckpointError(TorchQCompatError):
    """A checkpoint that cannot be read, or that does not belong to the model; the model is unchanged."""

    @classmethod
    def not_a_state(cls, found: str) -> CheckpointError:
        return cls(
            f"the state must be a mapping from names to tensors, as state_dict() gives it, got {found}.",
            hint="load what model.state_dict() or load_checkpoint(path) returned.",
        )

    @classmethod
    def bad_value(cls, name: str, problem: str) -> CheckpointError:
        return cls(
            f"the state has a value that cannot be loaded: {name} {problem}.",
            hint="save it again from the model it came from; the model to load into was left as it was.",
        )

    @classmethod
    def other_model(cls, problem: str) -> CheckpointError:
        return cls(
            f"the state does not belong to this model: {problem}",
            hint="prepare the same float model with the same configuration before loading; "
            "a checkpoint of the float model is loaded into the float model, before prepare.",
        )


class CalibrationError(TorchQCompatError):
    """An observer that could not take a batch."""


class ScriptError(TorchQCompatError):
    """A script the command line was asked for cannot be run."""


class PartConfigError(ConfigError):
    """A setting of parts that cannot be carried out."""


class RecurrentModuleError(CustomModuleError):
    """A recurrent module that was observed, called or converted in a way it cannot be."""

    @classmethod
    def unusable_result(cls, path: str, method: str, found: object) -> RecurrentModuleError:
        return cls(
            f"{method} of the custom module at {path!r} returned {type(found).__name__}, "
            "which this package cannot run.",
            hint="return the object made by torchq_compat.recurrent_parts or torchq_compat.lstm_utils, "
            "or, for an LSTM, a torch.ao.nn.quantizable.LSTM.",
        )


class UserModuleError(CustomModuleError):
    """Classes of a user's custom module that do not do what the mapping promises."""

    @classmethod
    def other_results(cls, path: str, owner: type, expected: str, found: str) -> UserModuleError:
        return cls(
            f"{owner.__qualname__} at {path!r} returns {found}, where the float module returns {expected}.",
            hint="its forward has to take the arguments and return the structure of the float module's.",
        )


class AnnotationError(TorchQCompatError, ValueError):
    """Specs that cannot be carried out on the graph they are for."""


class AtenLSTMError(TorchQCompatError, ValueError):
    """An exported LSTM that cannot be broken up as asked."""


class ExecutorchError(TorchQCompatError):
    """A model that cannot become an ExecuTorch program, or a program that cannot be run."""

    @classmethod
    def other_inputs(cls, problem: str, expected: Iterable[str]) -> ExecutorchError:
        return cls(
            f"the program cannot be called like this: {problem}.",
            hint=f"its inputs, flat, are ({', '.join(expected)}).",
        )


class OnnxError(TorchQCompatError):
    """A model that cannot become an ONNX file."""


class OnnxFileError(OnnxError, OSError):
    """An ONNX file that cannot be written where it shall be."""


class CaseError(TorchQCompatError):
    """The models to compare cannot be made: the function, its result, or the script is at fault."""

    @classmethod
    def bad_data(cls, name: str, problem: str) -> CaseError:
        return cls(
            f"{name} {problem}.",
            hint="give a list of batches, each a tuple of the model's positional arguments (or one tensor).",
        )


class FxError(TorchQCompatError):
    """FX was demanded and cannot run the model."""


class ReportError(TorchQCompatError):
    """The page cannot be written."""


class PathError(TorchQCompatError):
    """A path of the command line that is not there, or that must not be replaced."""


class CodeError(TorchQCompatError):
    """A code of a finding that there is not."""


class RewriteUsageError(TorchQCompatError):
    """Arguments of ``torchq-compat rewrite`` that do not go together."""


class ModuleAttributeError(TorchQCompatError, AttributeError):
    """What a view of a float module in a converted model cannot give."""


class LeftFloatError(TorchQCompatError):
    """Modules that stay float under ``torchq-compat run --strict``."""


class QuantizationWarning(UserWarning):
    """Something of the model is not what its configuration asks for."""
