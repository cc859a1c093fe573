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

import argparse
import contextlib
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from torchq_compat.comparison.page import check_page, write_page
from torchq_compat.comparison.results import ComparedModel, Target
from torchq_compat.comparison.text import as_text, print_report, report_data
from torchq_compat.errors import ScriptError, TorchQCompatError
from torchq_compat.port import run_command
from torchq_compat.port.process import Subparsers, add_command, stopping_cleanly

FINE, ATTENTION = 0, 1
STANDARD_ERROR = 2
OPTIONS = ("--json", "--html", "--timeout", "--fx", "--trained-qparams")
FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


# Only a separate process, ``comparison.comparison_process``, uses torch, so that it can be stopped; it
# returns its measurements as plain values, which are shown here.


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
        choices=("auto", "yes", "no"),
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
    target = _read_target(args)
    if args.html:
        check_page(Path(args.html))
    with stopping_cleanly():
        comparisons = _compared(target, args.timeout)
        if args.html:
            write_page(comparisons, Path(args.html))
    _show(comparisons, as_json=args.json)
    return ATTENTION if any(comparison.verdict.needs_attention for comparison in comparisons) else FINE


def _seconds(text: str) -> float:
    seconds = float(text)
    if not seconds > 0:
        raise argparse.ArgumentTypeError("give a number of seconds above 0")
    return seconds


def _read_target(args: argparse.Namespace) -> Target:
    is_function = bool(FUNCTION.fullmatch(args.target)) and not Path(args.target).exists()
    if not is_function:
        if ":" in args.target and not Path(args.target).exists():
            raise ScriptError.of("TQ973.target", target=args.target)
        run_command.check_script(args.target)
        run_command.tell_misplaced_options(args.target, args.args, OPTIONS)
    return Target(args.target, is_function, tuple(args.args), args.fx, args.trained_qparams)


def _compared(target: Target, timeout: float | None) -> tuple[ComparedModel, ...]:
    """Return the comparisons that the process for ``target`` made.

    Raises:
        TorchQCompatError: the error that the process returned, or that it took too long or died.
    """
    with tempfile.TemporaryDirectory(prefix="torchq-compat-") as folder:
        result = Path(folder) / "result"
        command = run_command.child_command("comparison.comparison_process", target.to_json(), str(result))
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
            _stop(child)


def _stop(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        if hasattr(os, "killpg"):
            os.killpg(child.pid, signal.SIGKILL)
        else:
            child.kill()
    child.wait()


def _show(comparisons: tuple[ComparedModel, ...], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(report_data(comparisons), indent=2))
    elif sys.stdout.isatty():
        print_report(comparisons, Console())
    else:
        print(as_text(comparisons))
