"""The command ``torchq-compat rewrite PATH...``: turn legacy FX code into code for this package.

examples:
  torchq-compat rewrite train.py
  torchq-compat rewrite src notebooks --write
  torchq-compat rewrite src --only quantize-fx-functions --only qconfig-dicts
  torchq-compat rewrite --list

exit code: 0 all done, 1 something is left for manual review, 2 an error of usage or a file that could not be
read or written
"""

import argparse
import difflib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.text import Text

from torchq_compat.errors import PathError, ScriptError
from torchq_compat.port import process, scanner
from torchq_compat.port.finders import Finder
from torchq_compat.port.rewrites import REWRITES
from torchq_compat.port.source.files import Document, Problem, UnreadableError, replace_file
from torchq_compat.support.report import counted

DONE, LEFT, PROBLEM = 0, 1, 2
NAMES = tuple(rewrite.construct.name for rewrite in REWRITES)
COLOURS = {"+": "green", "-": "red", "@": "cyan"}


@dataclass(frozen=True)
class Change:
    """The rewritten content of one file."""

    document: Document
    content: bytes


def add_parser(subparsers: process.Subparsers) -> None:
    parser = process.add_command(
        subparsers,
        rewrite_command,
        __doc__,
        help="rewrite legacy FX code for this package",
        description="Print the changes to Python files and notebooks, or make them with --write. "
        "Formatting, comments, line endings and encoding are kept.",
    )
    parser.add_argument(
        "paths", metavar="PATH", nargs="*", type=Path, help="a file, or a folder to search recursively"
    )
    parser.add_argument(
        "--write", action="store_true", help="change the files instead of printing the differences"
    )
    process.add_limits(parser)
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument(
        "--only",
        metavar="NAME",
        action="append",
        choices=NAMES,
        help="run only this rewrite; may be repeated",
    )
    choice.add_argument(
        "--skip", metavar="NAME", action="append", choices=NAMES, help="skip this rewrite; may be repeated"
    )
    parser.add_argument("--list", action="store_true", help="list the rewrites by name")


def rewrite_command(args: argparse.Namespace) -> int:
    """Rewrite, print and return the exit code.

    Raises:
        PathError: a path does not exist.
        ScriptError: no path is given.
    """
    if args.list:
        for rewrite in REWRITES:
            construct = rewrite.construct
            print(f"{construct.name:<24}{construct.code}  {construct.summary}")
        return DONE
    if not args.paths:
        raise ScriptError.of("TQ983")
    scan = scanner.scan_paths(args.paths, jobs=args.jobs, seconds=args.timeout)
    problems = list(scan.problems)
    changes = list(_changes(scan, args, problems))
    if args.write:
        with process.stopping_cleanly():
            inside = [path.resolve() for path in args.paths]
            changes = [change for change in changes if _write(change, inside, problems)]
    else:
        _print_diffs(changes)
    left = [finding for finding in scan.findings if finding.by == "manual review"]
    _print_summary(changes, left, written=args.write)
    process.print_problems(problems)
    if problems:
        return PROBLEM
    return LEFT if left else DONE


def _changes(scan: scanner.Scan, args: argparse.Namespace, problems: list[Problem]) -> Iterator[Change]:
    chosen = set(args.only or NAMES).difference(args.skip or ())
    rewrites = tuple(rewrite for rewrite in REWRITES if rewrite.construct.name in chosen)
    affected = {finding.path for finding in scan.findings if finding.by == "rewrite"}
    parsers = {document.path: parse for document, parse in scan.documents if document.path in affected}
    documents = [document for document, _ in scan.documents if document.path in affected]
    work = partial(_changed, parsers, rewrites, args.timeout)
    results = scanner.in_processes(work, documents, args.jobs, "Rewriting")
    for document, (text, problem) in zip(documents, results, strict=True):
        if problem:
            problems.append(Problem(document.path, problem))
        elif text != document.text:
            yield Change(document, document.bytes_with(text))


def _changed(
    parsers: Mapping[Path, scanner.Parse], rewrites: Sequence[Finder], seconds: float, document: Document
) -> tuple[str, str]:
    """Return the rewritten text of ``document``, or the problem."""
    try:
        with scanner.time_limit(seconds):
            text = scanner.rewrite_text(document.text, rewrites, parsers[document.path])
        if text != document.text:
            document.bytes_with(text)
    except (scanner.InvalidResultError, UnreadableError, scanner.TooLongError) as error:
        return document.text, str(error)
    return text, ""


def _write(change: Change, inside: Sequence[Path], problems: list[Problem]) -> bool:
    try:
        replace_file(change.document.path, change.document.raw, change.content, inside)
    except PathError as error:
        problems.append(Problem(change.document.path, error.message.rstrip(".")))
        return False
    except OSError as error:
        problems.append(Problem(change.document.path, f"cannot be written: {error.strerror or error}"))
        return False
    return True


def _print_diffs(changes: list[Change]) -> None:
    console = Console(soft_wrap=True, highlight=False)
    for change in changes:
        for line in diff_lines(change):
            if console.is_terminal:
                console.print(Text(line, style=COLOURS.get(line[:1], "")))
            else:
                sys.stdout.write(f"{line}\n")


def diff_lines(change: Change) -> Iterator[str]:
    """Yield a unified diff of the file, a notebook's JSON as well, that ``patch`` accepts."""
    document = change.document
    before, after = (raw.decode(document.encoding).splitlines(True) for raw in (document.raw, change.content))
    name = document.path.as_posix()
    for line in difflib.unified_diff(before, after, f"a/{name.lstrip('/')}", f"b/{name.lstrip('/')}"):
        body = line.rstrip("\r\n")
        yield body
        if body == line and not line.startswith(("---", "+++", "@@")):
            yield "\\ No newline at end of file"


def _print_summary(changes: list[Change], left: list[scanner.Finding], *, written: bool) -> None:
    """Print the summary on standard error, so that standard output has the differences only."""
    verb = "rewritten" if written else "to rewrite (--write does it)"
    print(
        f"torchq-compat: {counted(len(changes), 'file')} {verb}, "
        f"{counted(len(left), 'place')} left for manual review",
        file=sys.stderr,
    )
    for finding in left:
        print(finding.line, file=sys.stderr)
    if left:
        codes = sorted({finding.construct.code for finding in left})
        print(f"  torchq-compat explain {' '.join(codes)}", file=sys.stderr)
