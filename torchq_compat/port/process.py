"""What all commands share: their version, a clean stop, quiet imports, progress and tables."""

import argparse
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, metadata, version
from typing import Any, TypeAlias, TypeVar

from rich.console import Console
from rich.progress import track
from rich.text import Text

from torchq_compat.port.source.files import Problem
from torchq_compat.support.report import shows_progress
from torchq_compat.support.user_warnings import logs_held_back

# Handle SIGTERM in the commands, so that no temporary file and no process is left.


@contextmanager
def stopping_cleanly() -> Iterator[None]:
    """Exit on SIGTERM inside the ``with`` block as on an interrupt: remove temporary files, then end.

    An existing handler, which is a script's own, is kept, and an ignored signal stays ignored.
    """

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


# The version and home page of the project, from the package's metadata.


def project_address() -> str | None:
    """Return the project's home page; None if the package runs from a source tree without metadata."""
    try:
        urls = metadata("torchq-compat").get_all("Project-URL") or []
    except PackageNotFoundError:
        return None
    return dict(url.split(", ", 1) for url in urls).get("Homepage")


def package_version() -> str:
    """Return the version; ``unknown`` if the package runs from a source tree without metadata."""
    try:
        return version("torchq-compat")
    except PackageNotFoundError:
        return "unknown"


# Suppress messages of torch and torchao during their import on which a user of this tool cannot act.
#
# A CPU build of torch cannot load torchao's GPU libraries and logs each file; torchao still registers an
# enumeration in a way that torch 2.13 deprecates; a CUDA build says that triton is missing; without NumPy,
# which neither of them needs, torch warns once.
# Only these messages are suppressed, and only during the imports: a script's own logs are not affected.


#: Logger -> a part of the message to suppress.
NOISE = {
    "torchao": "Failed to load ",
    "torch.utils._pytree": "Calling register_constant() on Enum subclasses is deprecated",
    "torch.utils.flop_counter": "triton not found",
}


@contextmanager
def import_noise_held_back() -> Iterator[None]:
    """Suppress the known messages inside the ``with`` block."""
    # This filter is kept: undoing it would also undo the filters that torchao installs meanwhile.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    with logs_held_back(NOISE):
        yield


# Terminal output of the commands: progress on standard error, tables on standard output.


Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_command(
    subparsers: Subparsers, command: Callable[[argparse.Namespace], int], doc: str | None, **texts: Any
) -> argparse.ArgumentParser:
    """Add the command of a module ``NAME_command``: its docstring, after the first line, ends the help."""
    name = command.__name__.removesuffix("_command")
    parser = subparsers.add_parser(
        name,
        epilog=(doc or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **texts,
    )
    parser.set_defaults(command=command)
    return parser


def add_limits(parser: argparse.ArgumentParser) -> None:
    """Add the options for many and for large files."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser.add_argument(
        "--jobs", type=int, default=cores, metavar="N", help="processes for many files; default: the cores"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="how long one file may take before it is left out, as a finding; default: 60",
    )


ItemT = TypeVar("ItemT")


def progress(description: str, items: Iterable[ItemT]) -> Iterable[ItemT]:
    """Return ``items``, with a progress bar while they are iterated, on a terminal only."""
    console = Console(stderr=True)
    return track(items, description, console=console, transient=True, disable=not shows_progress())


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
