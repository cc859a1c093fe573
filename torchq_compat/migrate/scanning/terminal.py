"""Terminal output of the commands: progress on standard error, tables on standard output."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import track
from rich.text import Text

from torchq_compat.migrate.source.source_files import Problem

__all__ = ["print_finding", "print_problems", "progress"]

ItemT = TypeVar("ItemT")


def progress(description: str, items: Sequence[ItemT]) -> Iterable[ItemT]:
    """Return ``items``, with a progress bar while they are iterated, on a terminal only."""
    console = Console(stderr=True)
    return track(items, description, console=console, transient=True, disable=not console.is_terminal)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise, where rich would exit; the command line handles a broken pipe."""
        raise BrokenPipeError


def print_finding(line: str) -> None:
    """Print ``line`` without wrapping; on a terminal its code is bold."""
    if not sys.stdout.isatty():
        print(line)
        return
    text = Text(line)
    text.highlight_regex(r"\bTQ\d{3}\b", "bold")
    _Console(highlight=False).print(text, soft_wrap=True)


def print_problems(problems: Iterable[Problem]) -> None:
    for problem in problems:
        print(f"torchq-compat: problem: {problem}", file=sys.stderr)
