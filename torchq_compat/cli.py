"""The entry point ``torchq-compat COMMAND``: read the command line, run the command, print its errors.

A command is a module with a function ``add_parser``, which names the function that runs the command with
``set_defaults(command=...)``. ``COMMANDS`` lists the modules in the order of the help text.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from torchq_compat.comparison import compare_command as compare
from torchq_compat.comparison import suggest_command as suggest
from torchq_compat.errors import TorchQCompatError
from torchq_compat.port import explain_command as explain
from torchq_compat.port import rewrite_command as rewrite
from torchq_compat.port import run_command as run
from torchq_compat.port import scan_command as scan
from torchq_compat.port.process import package_version, project_address
from torchq_compat.support.report import QUIET

PROGRAM = "torchq-compat"
USAGE_ERROR = 2
#: The exit codes with which a shell reports that SIGINT or SIGPIPE ended a command.
INTERRUPTED, BROKEN_PIPE = 130, 141

COMMANDS = (run, scan, explain, rewrite, compare, suggest)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: the command's own, or 2 for an error of usage."""
    if sys.stdout is None:
        # No file may be opened: it would get the file descriptor of standard output.
        print(f"{PROGRAM}: error: standard output is closed", file=sys.stderr)
        return USAGE_ERROR
    args = _parser().parse_args(argv)
    if args.quiet:
        os.environ[QUIET] = "1"
    command: Callable[[argparse.Namespace], int] = args.command
    try:
        code = command(args)
        sys.stdout.flush()
        return code
    except TorchQCompatError as error:
        print(f"{PROGRAM}: error: {' '.join(str(error).splitlines())}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader, such as head, has closed the pipe.
        _forget_output()
        return BROKEN_PIPE
    except OSError as error:
        _forget_output()
        what = f"{error.filename}: " if error.filename else "output cannot be written: "
        print(f"{PROGRAM}: error: {what}{error.strerror or error}", file=sys.stderr)
        return USAGE_ERROR


def _forget_output() -> None:
    """Redirect standard output to the null device, so that Python does not report at exit that it failed."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Bring FX graph mode quantization scripts to torch.export and torchao.",
        epilog=project_address(),
    )
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {package_version()}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(subparsers)
    return parser
