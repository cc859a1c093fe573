"""``torchq-compat COMMAND``: reads the command line, runs the command, words its errors.

A command is a module with one function, ``add_parser``, which names the function that carries it out with
``set_defaults(command=...)``. ``COMMANDS`` lists them in the order of the help text.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from torchq_compat.errors import TorchQCompatError
from torchq_compat.migrate import compare, explain, rewrite, run, scan, suggest
from torchq_compat.migrate.project import package_version, project_address

__all__ = ["main"]

PROGRAM = "torchq-compat"
USAGE_ERROR = 2
#: As a shell says that a signal ended a command.
INTERRUPTED, BROKEN_PIPE = 130, 141

COMMANDS = (run, scan, explain, rewrite, compare, suggest)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: the command's own, or 2 for an error of usage."""
    if sys.stdout is None:
        # Not even a file may be opened: it would get the number of standard output.
        print(f"{PROGRAM}: error: standard output is closed", file=sys.stderr)
        return USAGE_ERROR
    args = _parser().parse_args(argv)
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
        # Whoever reads, say head, has enough.
        _forget_output()
        return BROKEN_PIPE
    except OSError as error:
        _forget_output()
        what = f"{error.filename}: " if error.filename else "output cannot be written: "
        print(f"{PROGRAM}: error: {what}{error.strerror or error}", file=sys.stderr)
        return USAGE_ERROR


def _forget_output() -> None:
    """Python must not complain once more at exit that standard output cannot be written."""
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
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {package_version()}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(subparsers)
    return parser
