"""The errors and the warning that this package raises on purpose; all of them are public.

Each error says what went wrong and where (module path, setting), and after ``Hint:`` what to do. The
texts stand in the register, ``codes.toml``.
"""

from __future__ import annotations

from typing import Self

from torchq_compat.codes import TEXTS, filled

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

    @classmethod
    def of(cls, key: str, /, **places: object) -> Self:
        """Return the error with a text of the register.

        Args:
            key: its code, and behind a dot its name where the code has several: ``TQ901.rank``.
            places: what the text and its hint name in braces.
        """
        message, hint = (filled(text, places) for text in TEXTS[key])
        return cls(message, hint=hint, code=key.partition(".")[0])


class InputError(TorchQCompatError, ValueError):
    """Raised if example inputs or call arguments do not fit the model."""

    code = "TQ901"

    @classmethod
    def does_not_fit(cls, model: str, cause: BaseException) -> InputError:
        reason = cause.message if isinstance(cause, TorchQCompatError) else f"{type(cause).__name__}: {cause}"
        return cls.of("TQ902.does_not_run", model=model, reason=reason)


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
        return cls.of("TQ910.wrong_type", setting=setting, expected=expected, value=value)


class CaptureError(TorchQCompatError):
    """Raised if torch.export cannot capture the model, or the captured model computes something else."""

    code = "TQ920"


class ExportError(TorchQCompatError, ValueError):
    """Raised if a model cannot be exported as requested, or become TorchScript."""

    code = "TQ930"


class CustomModuleError(TorchQCompatError):
    """Raised if the classes of a custom module do not do what the mapping requires of them."""

    code = "TQ940"

    @classmethod
    def call_failed(cls, path: str, problem: str) -> CustomModuleError:
        return cls.of("TQ940.call", path=path, problem=problem)


class ConvertError(TorchQCompatError):
    """Raised if an observer fails on a batch, or ``convert_fx``, or another engine's function, is given a
    model it cannot convert."""

    code = "TQ950"


class CheckpointError(TorchQCompatError):
    """Raised if a checkpoint or state cannot be saved or read, or does not fit the model (left unchanged)."""

    code = "TQ960"

    @classmethod
    def bad_value(cls, name: str, problem: str) -> CheckpointError:
        return cls.of("TQ960.bad_value", name=name, problem=problem)

    @classmethod
    def other_model(cls, problem: str) -> CheckpointError:
        return cls.of("TQ960.other_model", problem=problem)


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
