"""The errors and the warning that this package raises on purpose; all of them are public.

Each error says what went wrong and where (module path, setting), and after ``Hint:`` what to do. A message is
written where it is raised, or here if several modules raise it.
"""

from __future__ import annotations

__all__ = [
    "AnnotationError",
    "ArgumentError",
    "CallError",
    "CaptureError",
    "CheckpointError",
    "ConfigError",
    "ConvertError",
    "CustomModuleError",
    "ExportError",
    "InputError",
    "ModuleAttributeError",
    "PathError",
    "QuantizationNote",
    "QuantizationWarning",
    "ScriptError",
    "TorchQCompatError",
]


class TorchQCompatError(Exception):
    """Base of all errors of torchq_compat.

    The text ends with the code in brackets, which ``torchq-compat explain CODE`` explains.

    Args:
        message: what is wrong and where (module path, setting).
        hint: what the user can do about it.
        code: the code in the register, ``codes.toml``: TQ9xx; the class's own by default.
    """

    code = "TQ900"

    def __init__(self, message: str, *, hint: str = "", code: str = "") -> None:
        self.message = message
        self.hint = hint
        self.code = code or type(self).code
        text = f"{message}\nHint: {hint}" if hint else message
        super().__init__(f"{text} [{self.code}]")


class InputError(TorchQCompatError, ValueError):
    """Raised if example inputs or call arguments do not fit the model."""

    code = "TQ901"

    @classmethod
    def does_not_fit(cls, model: str, cause: BaseException) -> InputError:
        reason = cause.message if isinstance(cause, TorchQCompatError) else f"{type(cause).__name__}: {cause}"
        return cls(
            f"{model}.forward does not run on the example_inputs: {reason}",
            hint="check the number, shapes and dtypes of example_inputs by calling model(*example_inputs).",
            code="TQ902",
        )


class ArgumentError(InputError, TypeError):
    """Raised if a public function does not accept an argument; nothing was changed."""

    code = "TQ903"


class CallError(InputError, RuntimeError):
    """Raised if a prepared or converted model fails on the arguments of a call."""

    code = "TQ904"


class ConfigError(TorchQCompatError, ValueError):
    """Raised if a setting cannot be read, is not supported, contradicts another one, or cannot be applied."""

    code = "TQ910"

    @classmethod
    def wrong_type(cls, setting: str, expected: str, value: object) -> ConfigError:
        return cls(
            f"{setting} must be {expected}, got {type(value).__name__}.",
            hint=f"build it with the torch.ao class, or use the documented dict form of {setting}.",
        )

    @classmethod
    def not_supported(cls, setting: str, why: str, hint: str) -> ConfigError:
        return cls(f"{setting} is not supported: {why}.", hint=hint)


class CaptureError(TorchQCompatError):
    """Raised if torch.export cannot capture the model, or the captured model computes something else."""

    code = "TQ920"

    @classmethod
    def differs(cls, model: str, stage: str, what: str) -> CaptureError:
        return cls(
            f"{model} cannot be quantized: {stage} computes something else than the float model on the "
            f"example inputs ({what}).",
            hint="the result would be wrong, so there is none. Fix the sizes that the model's code depends "
            "on with dynamic_shapes=; if that does not help, it is a defect of torchq_compat: report it with "
            "the model's code. The model was not changed.",
        )

    @classmethod
    def is_random(cls, model: str, what: str) -> CaptureError:
        return cls(
            f"{model} cannot be quantized: the float model gives other results on each run of the example "
            f"inputs ({what}), so nothing can be held to it.",
            hint="draw with torch's global generator, which is seeded for each run, or give the model what "
            "it draws, or counts from call to call, as an argument. The model was not changed.",
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
    """Raised if a model cannot be exported as requested, or become TorchScript."""

    code = "TQ930"


class CustomModuleError(TorchQCompatError):
    """Raised if the classes of a custom module do not do what the mapping requires of them."""

    code = "TQ940"

    @classmethod
    def call_failed(cls, path: str, problem: str) -> CustomModuleError:
        return cls(
            f"the call of module {path!r} is not valid: {problem}.",
            hint="the module takes the same arguments as the float module it replaces.",
        )

    @classmethod
    def not_observed_here(cls, result: str) -> CustomModuleError:
        return cls(
            f"{result} is not a custom module this package made.",
            hint="let from_float and from_observed return what the class they inherit them from returns.",
        )

    @classmethod
    def unusable_result(cls, path: str, method: str, value: object) -> CustomModuleError:
        return cls(
            f"{method} of the custom module at {path!r} returned {type(value).__name__}, "
            "which this package cannot run.",
            hint="return the object made by torchq_compat.recurrent_parts or torchq_compat.lstm_utils, "
            "or, for an LSTM, a torch.ao.nn.quantizable.LSTM.",
            code="TQ941",
        )

    @classmethod
    def other_results(cls, path: str, owner: type, expected: str, result: str) -> CustomModuleError:
        return cls(
            f"{owner.__qualname__} at {path!r} returns {result}, where the float module returns {expected}.",
            hint="its forward has to take the arguments and return the structure of the float module's.",
            code="TQ942",
        )


class ConvertError(TorchQCompatError):
    """Raised if an observer fails on a batch, or ``convert_fx``, or another engine's function, is given a
    model it cannot convert."""

    code = "TQ950"


class CheckpointError(TorchQCompatError):
    """Raised if a checkpoint or state cannot be saved or read, or does not fit the model (left unchanged)."""

    code = "TQ960"

    @classmethod
    def not_a_state(cls, result: str) -> CheckpointError:
        return cls(
            f"the state must be a mapping from names to tensors, as state_dict() gives it, got {result}.",
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


class ScriptError(TorchQCompatError):
    """Raised if what a command is given cannot be used: a script, a case to compare, a report, a code."""

    code = "TQ980"


class AnnotationError(TorchQCompatError, ValueError):
    """Raised if specs cannot be applied to the graph they are for, or an exported LSTM, GRU or RNN cannot be
    decomposed."""

    code = "TQ943"


class PathError(TorchQCompatError, OSError):
    """Raised if a path does not exist, or its file cannot be written or must not be replaced."""

    code = "TQ981"


class ModuleAttributeError(TorchQCompatError, AttributeError):
    """Raised if a view of a float module, in a prepared or converted model, has no such attribute, call or
    hook."""

    code = "TQ970"


class QuantizationWarning(UserWarning):
    """Warning about a setting without effect, a result other than configured, or an untested version of
    torch.

    Its first line ends with the code in brackets: ``warnings.filterwarnings("ignore", message=r".*TQ405")``.

    Attributes:
        code: the code in the register, ``codes.toml``: TQ3xx to TQ8xx; ``torchq-compat explain CODE`` has
            the cause and what to do.
    """

    def __init__(self, message: str, *, code: str = "") -> None:
        self.code = code
        # A pattern such as ``.*TQ405`` matches within the first line.
        first, *remaining = message.replace("\nHint:", " Hint:").split("\n")
        super().__init__(
            "\n".join([f"{first} [{code}]", *remaining]) + f" [{code}]" * bool(remaining) if code else message
        )


class QuantizationNote(QuantizationWarning):
    """A warning of severity note: nothing is lost, but FX or the setting would have had it otherwise."""


def install_extra(extra: str) -> str:
    """Return how to install an optional part of the package: the one place to change once it is published."""
    return f"install the extra: pip install -e '.[{extra}]' in a clone of the project"
