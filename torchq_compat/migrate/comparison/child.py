"""The process in which ``torchq-compat compare`` gets its cases and compares them.

Started as ``python -P -c ... PACKAGE_PARENT TARGET RESULT`` by ``migrate.compare``. RESULT becomes a pickle
of the comparisons, or of the error to report.
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from torchq_compat.errors import TorchQCompatError
from torchq_compat.migrate.child import execute_script, show_script_error
from torchq_compat.migrate.comparison.errors import CaseError
from torchq_compat.migrate.comparison.targets import Target
from torchq_compat.migrate.import_noise import import_noise_held_back

if TYPE_CHECKING:
    from torchq_compat.migrate.comparison.cases import Case

__all__ = ["case_of_function", "main"]


def main() -> int:
    _, _, target_text, result = sys.argv
    target = Target.from_json(target_text)
    # Its name is the parent's; a script that changes directories must not move it.
    path = Path(result).absolute()
    try:
        with import_noise_held_back():
            from torchq_compat.migrate.comparison.comparing import compare_case
        cases = case_of_function(target) if target.is_function else _cases_of_script(target)
        outcome: object = tuple(compare_case(case, target.fx_setting) for case in cases)
    except TorchQCompatError as error:
        outcome = TorchQCompatError(error.message, hint=error.hint)
    path.write_bytes(pickle.dumps(outcome))
    return 0


def case_of_function(target: Target) -> tuple[Case, ...]:
    """What the function returns, in a tuple.

    Raises:
        CaseError: there is no such function, it raises, or what it returns is no case.
    """
    from torchq_compat.migrate.comparison.cases import read_case

    module_name, _, name = target.name.partition(":")
    sys.path[0] = os.getcwd()
    try:
        found: object = importlib.import_module(module_name)
    except Exception as cause:
        raise CaseError.not_importable(module_name, cause) from cause
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise CaseError.no_function(module_name, name)
    try:
        value = found()
    except Exception as cause:
        raise CaseError.function_failed(target.name, cause) from cause
    return (read_case(f"what {target.name}() returned", value),)


def _cases_of_script(target: Target) -> tuple[Case, ...]:
    from torchq_compat.migrate.comparison.script_recorder import ScriptRecorder

    recorder = ScriptRecorder()
    with recorder.recording():
        _execute(target)
    cases = recorder.cases(target.name)
    for model in recorder.trained:
        print(f"torchq-compat: problem: {CaseError.trained(model).message}", file=sys.stderr)
    return cases


def _execute(target: Target) -> None:
    try:
        execute_script(target.name, list(target.args))
    except SystemExit as ending:
        if ending.code not in (None, 0):
            raise CaseError.script_failed(target.name, f"exited with {ending.code!r}") from ending
    except TorchQCompatError:
        raise
    except Exception as error:
        show_script_error(error)
        raise CaseError.script_failed(target.name, f"raised {type(error).__name__}") from error
