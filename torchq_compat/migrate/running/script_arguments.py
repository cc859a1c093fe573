"""What stands behind the script on a command line is the script's own."""

from __future__ import annotations

import argparse

__all__ = ["add_script_arguments"]


def add_script_arguments(parser: argparse.ArgumentParser) -> None:
    """Let ``parser`` take the rest of its command line as ``args``, options included."""
    arguments = parser.add_argument(
        "args", metavar="ARGS", nargs=argparse.REMAINDER, help="the script's own arguments"
    )
    # Before Python 3.13 argparse calls a missing ARGS an error of its own.
    arguments.required = False
