"""The command ``torchq-compat compare SCRIPT | module:function``: FX and this package side by side.

examples:
  torchq-compat compare quantize.py
  torchq-compat compare --html report.html mymodels.cases:tagger
  torchq-compat compare --json --timeout 600 quantize.py --epochs 1

SCRIPT prepares, calibrates and converts models with prepare_fx and convert_fx; its output goes to standard
error. module:function names a function without arguments that returns model, qconfig_mapping, example_inputs
and calibration_data, as a dict or an object with these attributes.

exit code: 0 nothing got worse, 1 an output is farther from the float model than with FX or nothing is
quantized, 2 an error
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from torchq_compat.comparison.page import check_page, write_page
from torchq_compat.comparison.results import ComparedModel, Target
from torchq_compat.comparison.text import as_text, print_report, report_data
from torchq_compat.errors import QuantizationWarning, ScriptError, TorchQCompatError
from torchq_compat.port import run_command
from torchq_compat.port.process import Subparsers, add_command, import_noise_held_back, stopping_cleanly
from torchq_compat.port.running.script_process import execute_script, show_script_error

if TYPE_CHECKING:
    from torchq_compat.comparison.cases import Case

FINE, ATTENTION = 0, 1
STANDARD_ERROR = 2
OPTIONS = ("--json", "--html", "--timeout", "--fx", "--trained-qparams")
#: The choices of --fx -> the argument of ``compare``.
FX: dict[str, Any] = {"auto": "auto", "yes": True, "no": False}
FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


# Only a separate process, which runs ``main``, uses torch, so that it can be stopped; it returns its
# measurements as plain values, which are shown here.


def add_parser(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        compare_command,
        __doc__,
        help="run FX and PT2E on the same weights and data, and show every difference",
        description="Quantize a model by FX and by torchq_compat with the same weights and calibration "
        "data, measure "
        "both against the float model at every module, part and output, and say what differs and why.",
    )
    parser.add_argument("--json", action="store_true", help="print the measured values as JSON")
    parser.add_argument(
        "--html", metavar="FILE", default="", help="write one self-contained page with plots to FILE"
    )
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=_seconds,
        default=None,
        help="stop after this many seconds; default: never",
    )
    parser.add_argument(
        "--fx",
        choices=tuple(FX),
        default="auto",
        help="whether FX must run too; auto: if it can (default)",
    )
    parser.add_argument("--trained-qparams", action="store_true", help=run_command.TRAINED_QPARAMS_HELP)
    parser.add_argument(
        "target",
        metavar="SCRIPT | module:function",
        help="the script that quantizes, or the function that returns the case",
    )
    run_command.add_script_arguments(parser)


def compare_command(args: argparse.Namespace) -> int:
    """Compare, print the report, and return the exit code.

    Raises:
        TorchQCompatError: the target does not exist, fails or takes too long, a model cannot be quantized, or
            the page cannot be written.
    """
    is_function = bool(FUNCTION.fullmatch(args.target)) and not Path(args.target).exists()
    if not is_function:
        if ":" in args.target and not Path(args.target).exists():
            raise ScriptError.of("TQ973.target", target=args.target)
        run_command.check_script(args.target)
        run_command.tell_misplaced_options(args.target, args.args, OPTIONS)
    target = Target(args.target, is_function, args.args, args.fx, args.trained_qparams)
    if args.html:
        check_page(Path(args.html))
    with stopping_cleanly():
        comparisons = _compared(target, args.timeout)
        if args.html:
            write_page(comparisons, Path(args.html))
    if args.json:
        print(json.dumps(report_data(comparisons), indent=2))
    elif sys.stdout.isatty():
        print_report(comparisons, Console())
    else:
        print(as_text(comparisons))
    return ATTENTION if any(comparison.verdict.needs_attention for comparison in comparisons) else FINE


def _seconds(text: str) -> float:
    seconds = float(text)
    if not seconds > 0:
        raise argparse.ArgumentTypeError("give a number of seconds above 0")
    return seconds


def _compared(target: Target, timeout: float | None) -> tuple[ComparedModel, ...]:
    """Return the comparisons that the process for ``target`` made.

    Raises:
        TorchQCompatError: the error that the process returned, or that it took too long or died.
    """
    with tempfile.TemporaryDirectory(prefix="torchq-compat-") as folder:
        result = Path(folder) / "result"
        command = run_command.child_command(
            "comparison.compare_command", json.dumps(asdict(target)), str(result)
        )
        code = _run(command, target, timeout)
        if not result.exists():
            raise ScriptError.of("TQ973.ended", target=target.name, code=code)
        outcome = pickle.loads(result.read_bytes())
    if isinstance(outcome, TorchQCompatError):
        raise outcome
    comparisons: tuple[ComparedModel, ...] = outcome
    return comparisons


def _run(command: list[str], target: Target, timeout: float | None) -> int:
    # The child gets a session of its own, so that processes the script started can be stopped with it.
    # Standard output is reserved for the report.
    child = subprocess.Popen(command, stdout=STANDARD_ERROR, start_new_session=True)
    try:
        return child.wait(timeout)
    except subprocess.TimeoutExpired as expired:
        raise ScriptError.of("TQ973.timeout", target=target.name, seconds=expired.timeout) from None
    finally:
        if child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                if hasattr(os, "killpg"):
                    os.killpg(child.pid, signal.SIGKILL)
                else:
                    child.kill()
            child.wait()


# The process, started as ``python -P -c ... PACKAGE_PARENT TARGET RESULT``: it makes the cases, compares
# them, and writes a pickle of the comparisons, or of the error to report, to RESULT.


def main() -> int:
    _, _, target_text, result = sys.argv
    target = Target(**json.loads(target_text))
    # The parent made this path; it must not change if the script changes the directory.
    path = Path(result).absolute()
    try:
        with import_noise_held_back():
            from torchq_compat.comparison.collect import compare_case
        cases = case_of_function(target) if target.is_function else _cases_of_script(target)
        with _warnings_without_lines(is_known=not target.is_function):
            outcome: object = tuple(compare_case(case, FX[target.fx]) for case in cases)
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
