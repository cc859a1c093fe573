"""The process in which ``torchq-compat compare`` makes its cases and compares them.

It is started as ``python -P -c ... PACKAGE_PARENT TARGET RESULT`` by ``comparison.compare_command``, and
writes a pickle of the comparisons, or of the error to report, to RESULT.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torchq_compat.comparison.results import Target
from torchq_compat.errors import QuantizationWarning, ScriptError, TorchQCompatError
from torchq_compat.port.process import import_noise_held_back
from torchq_compat.port.running.script_process import execute_script, show_script_error

if TYPE_CHECKING:
    from torchq_compat.comparison.cases import Case


def main() -> int:
    _, _, target_text, result = sys.argv
    target = Target.from_json(target_text)
    # The parent made this path; it must not change if the script changes the directory.
    path = Path(result).absolute()
    try:
        with import_noise_held_back():
            from torchq_compat.comparison.collect import compare_case
        cases = case_of_function(target) if target.is_function else _cases_of_script(target)
        with _warnings_without_lines(is_known=not target.is_function):
            outcome: object = tuple(compare_case(case, target.fx_setting) for case in cases)
    except TorchQCompatError as error:
        outcome = TorchQCompatError(error.message, hint=error.hint, code=error.code)
    path.write_bytes(pickle.dumps(outcome))
    return 0


@contextlib.contextmanager
def _warnings_without_lines(*, is_known: bool) -> Iterator[None]:
    """Print our warnings without a line, which would be in this tool; none if a script gave them already."""
    with warnings.catch_warnings(record=True) as caught:
        yield
    ours = [entry for entry in caught if issubclass(entry.category, QuantizationWarning)]
    for message in dict.fromkeys(str(our.message) for our in ours if not is_known):
        print(f"torchq-compat: warning: {message}", file=sys.stderr)
    for item in caught:
        if item not in ours:
            warnings.showwarning(item.message, item.category, item.filename, item.lineno)


def case_of_function(target: Target) -> tuple[Case, ...]:
    """Return the case that the function returns, in a tuple.

    Raises:
        ScriptError: there is no such function, it raises, or it does not return a case.
    """
    from torchq_compat.comparison.cases import read_case

    module_name, _, name = target.name.partition(":")
    sys.path[0] = os.getcwd()
    try:
        result: object = importlib.import_module(module_name)
    except Exception as cause:
        raise ScriptError.of("TQ973.import", module_name=module_name, cause=cause) from cause
    for part in name.split("."):
        result = getattr(result, part, None)
    if not callable(result):
        raise ScriptError.of("TQ973.no_function", module_name=module_name, name=name)
    try:
        value = result()
    except Exception as cause:
        raise ScriptError.of("TQ973.raised", target=target.name, cause=cause) from cause
    case = read_case(f"what {target.name}() returned", value)
    if case.observer_qparams is None:
        case = replace(case, observer_qparams=not target.trained_qparams)
    return (case,)


def _cases_of_script(target: Target) -> tuple[Case, ...]:
    from torchq_compat.comparison.cases import ScriptRecorder

    recorder = ScriptRecorder(trained_qparams=target.trained_qparams)
    with recorder.recording():
        exit_code = _execute(target)
    try:
        cases = recorder.cases(target.name)
    except ScriptError as nothing:
        raise _script_failed(target.name, f"exited with {exit_code!r}") if exit_code else nothing from None
    if exit_code:
        print(
            f"torchq-compat: problem: {target.name} exited with {exit_code!r}; what it quantized is compared",
            file=sys.stderr,
        )
    for remark in recorder.remarks:
        print(f"torchq-compat: {remark}", file=sys.stderr)
    return cases


def _execute(target: Target) -> object:
    """Run the script and return its exit code, which may be a number of failures, or a message."""
    try:
        execute_script(target.name, list(target.args))
    except SystemExit as ending:
        return ending.code
    except TorchQCompatError:
        raise
    except Exception as error:
        show_script_error(error)
        raise _script_failed(target.name, f"raised {type(error).__name__}") from error
    return None


def _script_failed(script: str, ending: str) -> ScriptError:
    return ScriptError.of("TQ973.script_failed", script=script, ending=ending)
