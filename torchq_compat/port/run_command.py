"""The command ``torchq-compat run SCRIPT [ARGS...]``: run an unmodified legacy script on PT2E.

examples:
  torchq-compat run train.py --epochs 3
  torchq-compat run --strict --explain decisions.json quantize.py
  torchq-compat run --reference quantize.py

options of this command come before SCRIPT; what follows SCRIPT is passed to the script
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from torchq_compat.errors import ScriptError
from torchq_compat.port.process import Subparsers, add_command

# The options of ``torchq-compat run``, passed from the command line to the script's process.


@dataclass(frozen=True)
class RunOptions:
    """The options of ``run``.

    Attributes:
        convert: the function that replaces every conversion function; empty: the script's own choice.
        explain: absolute path of the file for the decisions; empty: none is written.
        strict: whether a module left float is an error.
        trained_qparams: whether trained models convert with the qparams they trained with, not with FX's.
    """

    convert: str = ""
    explain: str = ""
    strict: bool = False
    trained_qparams: bool = False


# The script's own arguments: everything after SCRIPT on a command line.


#: An option of ``run`` and of ``compare``.
TRAINED_QPARAMS_HELP = (
    "convert trained models with the qparams they trained with, as convert_fx here does by itself; default: "
    "with the qparams of their observers, as FX"
)


def add_script_arguments(parser: argparse.ArgumentParser) -> None:
    """Let ``parser`` read the rest of its command line as ``args``, including options."""
    arguments = parser.add_argument(
        "args", metavar="ARGS", nargs=argparse.REMAINDER, help="the script's own arguments"
    )
    # Before Python 3.13 argparse reports a missing ARGS as an error.
    arguments.required = False


def tell_misplaced_options(script: str, args: Sequence[str], own: Sequence[str]) -> None:
    """Print a note for each of the command's options ``own`` that follows a script which does not use it."""
    named = [name for arg in args if (name := arg.partition("=")[0]) in own]
    text = Path(script).read_bytes() if named else b""
    for name in named:
        if name.encode() not in text:
            print(
                f"torchq-compat: {name} comes after {script} and is the script's own argument; "
                f"as an option of this command it must come before {script}",
                file=sys.stderr,
            )


# The command ``torchq-compat run SCRIPT [ARGS...]``: run an unmodified legacy script on PT2E.
#
# This process checks that the script exists, starts ``port.running.script_process`` for it and passes on
# signals and the exit code. Only the child process uses torch; its standard streams are the script's.


PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])
OPTIONS = ("--reference", "--lower", "--explain", "--strict", "--trained-qparams")
PYTHON_SUFFIXES = (".py", ".pyw")
FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP")
SIGNAL_EXIT_BASE = 128


def add_parser(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        run_command,
        __doc__,
        help="run an unmodified legacy script on torch.export and torchao",
        description="Run an unmodified legacy script with prepare_fx, convert_fx and related functions "
        "redirected to torchq_compat. Output and exit code are the script's; a summary goes to stderr.",
    )
    convert = parser.add_mutually_exclusive_group()
    convert.add_argument(
        "--reference",
        dest="convert",
        action="store_const",
        const="convert_to_reference_fx",
        default="",
        help="convert with convert_to_reference_fx, whichever function the script calls",
    )
    convert.add_argument(
        "--lower",
        dest="convert",
        action="store_const",
        const="convert_fx",
        help="convert with convert_fx, whichever function the script calls",
    )
    parser.add_argument(
        "--explain",
        "--report",
        metavar="FILE",
        default="",
        help="write every decision about every model, with its code, to FILE, as JSON if it ends in .json",
    )
    parser.add_argument(
        "--strict", action="store_true", help="raise an error in the prepare call if a module stays float"
    )
    parser.add_argument("--trained-qparams", action="store_true", help=TRAINED_QPARAMS_HELP)
    parser.add_argument("script", metavar="SCRIPT", help="the file you would give to python")
    add_script_arguments(parser)


def run_command(args: argparse.Namespace) -> int:
    """Run the script and return its exit code.

    Raises:
        ScriptError: the script does not exist or is not a Python script, or the file of --explain cannot be
            written.
    """
    check_script(args.script)
    check_explain(args.explain)
    tell_misplaced_options(args.script, args.args, OPTIONS)
    explain = os.path.abspath(args.explain) if args.explain else ""
    options = json.dumps(asdict(RunOptions(args.convert, explain, args.strict, args.trained_qparams)))
    return _run_child(child_command("port.running.script_process", options, args.script, *args.args))


def child_command(module: str, *args: str) -> list[str]:
    """Return a command that calls ``main`` of a module of this package, with ``args`` from the second on.

    With -P modules beside the script or in the working directory do not shadow torch's imports.
    """
    start = f"import sys; sys.path.insert(0, sys.argv[1]); from torchq_compat.{module} import main"
    return [sys.executable, "-P", "-c", f"{start}; sys.exit(main())", PACKAGE_PARENT, *args]


def check_script(script: str) -> None:
    """Raise a ScriptError unless ``script`` is a file that Python could run."""
    path = Path(script)
    if path.is_dir():
        raise ScriptError.of("TQ980.directory", script=script)
    if not path.exists():
        raise ScriptError.of("TQ980.absent", script=script)
    if path.suffix not in PYTHON_SUFFIXES and not _compiles(path):
        raise ScriptError.of("TQ980.not_python", script=script)


def check_explain(path: str) -> None:
    """Raise a ScriptError, before a long run, if ``path`` is a directory or its directory does not exist."""
    if not path:
        return
    if os.path.isdir(path):
        raise ScriptError.of("TQ980.explain_directory", path=path)
    if not os.path.isdir(os.path.dirname(os.path.abspath(path))):
        raise ScriptError.of("TQ980.explain_folder", path=path)


def _compiles(path: Path) -> bool:
    try:
        with warnings.catch_warnings(action="ignore"):
            compile(path.read_bytes(), path, "exec", dont_inherit=True)
    except (OSError, SyntaxError, ValueError):
        return False
    return True


def _run_child(command: list[str]) -> int:
    """Start ``command`` and wait for it; signals sent to this process reach it."""
    child: list[subprocess.Popen[bytes]] = []

    def forward(signum: int, frame: FrameType | None) -> None:
        # Ctrl-C at a terminal reaches the child directly: a second signal would interrupt its cleanup.
        if child and not (signum == signal.SIGINT and _in_terminal_foreground()):
            child[0].send_signal(signum)

    # Ignored signals stay ignored.
    signums = [signal.Signals[name] for name in FORWARDED if hasattr(signal, name)]
    caught = [signum for signum in signums if signal.getsignal(signum) is not signal.SIG_IGN]
    previous = {signum: signal.signal(signum, forward) for signum in caught}
    try:
        child.append(subprocess.Popen(command))
        code = child[0].wait()
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
    return code if code >= 0 else SIGNAL_EXIT_BASE - code


def _in_terminal_foreground() -> bool:
    try:
        return os.tcgetpgrp(sys.__stderr__.fileno() if sys.__stderr__ else 2) == os.getpgrp()
    except (AttributeError, OSError):
        return False
