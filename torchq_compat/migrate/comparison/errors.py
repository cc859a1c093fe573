"""Errors of ``compare``."""

from __future__ import annotations

from torchq_compat.errors import TorchQCompatError

__all__ = ["CaseError", "FxError", "ReportError"]


class CaseError(TorchQCompatError):
    """What is to be compared cannot be had: the function, what it returned, or the script."""

    @classmethod
    def bad_target(cls, target: str) -> CaseError:
        return cls(
            f"{target!r} is neither a script nor module:function.",
            hint="give the path of a script, or a function that returns the case, as in "
            "mymodels.cases:tagger.",
        )

    @classmethod
    def not_importable(cls, module: str, cause: BaseException) -> CaseError:
        return cls(
            f"the module {module!r} cannot be imported: {type(cause).__name__}: {cause}",
            hint="run the command where 'import' finds it: the current directory is searched first.",
        )

    @classmethod
    def no_function(cls, module: str, name: str) -> CaseError:
        return cls(
            f"the module {module!r} has no function {name!r}.", hint="check the name behind the colon."
        )

    @classmethod
    def function_failed(cls, target: str, cause: BaseException) -> CaseError:
        return cls(
            f"{target}() raised {type(cause).__name__}: {cause}",
            hint="call it by itself; it takes no arguments and returns the case.",
        )

    @classmethod
    def not_a_case(cls, what: str, problem: str) -> CaseError:
        return cls(
            f"{what} is no case: {problem}.",
            hint="a case has model, qconfig_mapping, example_inputs and calibration_data, as a dict or any "
            "object with these attributes; the other arguments of torchq_compat.compare may be given.",
        )

    @classmethod
    def bad_data(cls, name: str, problem: str) -> CaseError:
        return cls(
            f"{name} {problem}.",
            hint="give a list of batches, each a tuple of the model's positional arguments (or one tensor).",
        )

    @classmethod
    def script_failed(cls, script: str, ending: str) -> CaseError:
        return cls(
            f"{script} {ending}, so there is nothing to compare.",
            hint="its own output stands above; make it run with 'torchq-compat run' first.",
        )

    @classmethod
    def nothing_prepared(cls, script: str) -> CaseError:
        return cls(
            f"{script} ended without preparing and converting a model with prepare_fx and convert_fx.",
            hint="name the script that quantizes, or write a function that returns the case.",
        )

    @classmethod
    def trained(cls, model: str) -> CaseError:
        return cls(
            f"{model} goes through prepare_qat_fx: two trainings do not end with the same weights.",
            hint="compare the trained float model by a function that returns the case.",
        )

    @classmethod
    def timed_out(cls, target: str, seconds: float) -> CaseError:
        return cls(
            f"{target} did not end within {seconds:g} seconds and was stopped.",
            hint="give --timeout more seconds, or less to do: fewer calibration batches, shorter sequences.",
        )

    @classmethod
    def died(cls, target: str, code: int) -> CaseError:
        return cls(
            f"the process that compared {target} ended with code {code} and no result.",
            hint="its own output stands above; a negative code is the signal that ended it.",
        )


class FxError(TorchQCompatError):
    """FX was demanded and cannot run the model."""

    @classmethod
    def raised(cls, what: str) -> FxError:
        return cls(
            f"FX cannot run this model: {what}",
            hint='leave fx at "auto" to compare with the float model alone.',
        )


class ReportError(TorchQCompatError):
    """The page cannot be written."""

    @classmethod
    def missing_extra(cls, package: str) -> ReportError:
        return cls(
            f"the HTML page needs {package}, which is not installed.",
            hint="pip install 'torchq-compat[report]'; the table and --json need nothing more.",
        )

    @classmethod
    def no_place(cls, path: str, problem: str) -> ReportError:
        return cls(
            f"the page cannot be written to {path!r}: {problem}.", hint="name a file in a folder there is."
        )
