"""The script's own arguments: everything after SCRIPT on a command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["TRAINED_QPARAMS_HELP", "add_script_arguments", "tell_misplaced_options"]

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
