"""Python files and notebooks in one form, found, read and replaced as a whole."""

import ast
import errno
import io
import json
import os
import re
import stat
import tokenize
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

from torchq_compat.errors import PathError
from torchq_compat.support.atomic_files import whole_file

# Source files on disk: find them under paths, read them with their encoding, replace them in one step.


SUFFIXES = (".py", ".pyw", ".ipynb")
SKIPPED_FOLDERS = ("__pycache__", "node_modules")
#: The size limit; a notebook with pictures may be large.
MAX_BYTES = 256 << 20


WRITABLE = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH


class UnreadableError(Exception):
    """The reason why a file cannot be read as source code."""


#: Words of a reason -> advice for the user.
HINTS = {
    "cannot be read": "look at its permissions, or name the other files",
    "cannot be listed": "look at its permissions, or name the folders below it",
    "cannot be decoded": "name its encoding in a coding comment, or save it as UTF-8",
    "is a link": "remove the link, or name the file it should lead to",
    "binary file": "a Python file is text; leave it out of the paths",
    "a device": "name a file",
    "is larger": "leave it out of the paths",
    "notebook": "open and save it in Jupyter, or leave it out of the paths",
    "cell": "open and save it in Jupyter, or leave it out of the paths",
    "nested too deeply": "split the expression, or leave the file out of the paths",
    "cannot be written": "make room for it, or make the folder writable, and run rewrite again",
    "read-only": "make it writable, and run rewrite again",
    "changed since": "run rewrite again",
    "another user": "run rewrite as that user",
    "leads out": "give the file it leads to",
    "hard links": "copy the file to a name of its own, and run rewrite again",
    "line ": "python -m py_compile says the same; mend the line, or leave the file out",
}
OTHERWISE = "look at the file; the others were dealt with"


@dataclass(frozen=True)
class Problem:
    """A file or folder that could not be processed; the other files were."""

    code: ClassVar[str] = "TQ984"
    path: Path
    reason: str

    @property
    def hint(self) -> str:
        """The advice for the user."""
        return next((hint for words, hint in HINTS.items() if words in self.reason), OTHERWISE)

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}. Hint: {self.hint} [{self.code}]"


def find_files(paths: Iterable[Path]) -> Iterator[Path | Problem]:
    """Yield Python files and notebooks: those in ``paths``, and all in the folders in ``paths``, each once.

    Folders whose name starts with a dot, caches and virtual environments are left out. Links are followed,
    except a link that leads back to a folder that contains it: that is a Problem.

    Raises:
        PathError: one of ``paths`` does not exist.
    """
    roots = list(paths)
    for root in roots:
        if not os.path.lexists(root):
            raise PathError.of("TQ981.absent", path=str(root))
    seen: set[Path | Problem] = set()
    for root in roots:
        for result in _walk(root, ()) if root.is_dir() else [root]:
            key = result.absolute() if isinstance(result, Path) else result
            if key not in seen:
                seen.add(key)
                yield result


def _walk(folder: Path, above: tuple[Path, ...]) -> Iterator[Path | Problem]:
    try:
        real = folder.resolve()
        entries = sorted(folder.iterdir())
    except OSError as error:
        yield Problem(folder, f"cannot be listed: {error.strerror}")
        return
    if real in above:
        yield Problem(folder, "is a link to a folder it lies in; not followed")
        return
    for entry in entries:
        if entry.is_dir():
            is_left_out = entry.name.startswith(".") or entry.name in SKIPPED_FOLDERS
            if not is_left_out and not (entry / "pyvenv.cfg").exists():
                yield from _walk(entry, (*above, real))
        elif entry.suffix in SUFFIXES:
            yield entry
        elif entry.is_symlink() and _leads_nowhere(entry):
            yield Problem(entry, "is a link that leads back to itself")


def _leads_nowhere(link: Path) -> bool:
    try:
        link.stat()
    except OSError as error:
        return error.errno == errno.ELOOP
    return False


def read_raw(path: Path) -> bytes:
    """Return the bytes of the file at ``path``.

    Raises:
        UnreadableError: the file cannot be opened, is none, or is too large.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise UnreadableError("is a device, a pipe or a socket and no file")
        if status.st_size > MAX_BYTES:
            raise UnreadableError(f"is larger than {MAX_BYTES >> 20} MiB, which no source code is")
        return path.read_bytes()
    except OSError as error:
        raise UnreadableError(f"cannot be read: {error.strerror or error}") from error


def decode(raw: bytes) -> tuple[str, str]:
    """Return ``raw`` as text, without a byte order mark, and its encoding, ``utf-8-sig`` with one."""
    if b"\0" in raw:
        raise UnreadableError("is a binary file")
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
        return raw.decode(encoding), encoding
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        raise UnreadableError(f"cannot be decoded: {error}") from error


def replace_file(path: Path, raw: bytes, content: bytes, inside: Sequence[Path]) -> None:
    """Replace the file at ``path`` by ``content`` in one step; until then the old file is complete.

    The new file is written beside the old one and moved over it; mode and, if allowed, owner are kept. A link
    that stays ``inside`` stays a link: its target is replaced.

    Args:
        raw: its bytes as they were read.
        content: its new bytes.
        inside: real paths of the files and folders that the command was given.

    Raises:
        PathError: the file is not inside of what was given, has other names, is read-only, or has changed
            since it was read.
        OSError: the folder cannot be written, the disk is full, ...
    """
    target = path.resolve()
    if not any(target == above or above in target.parents for above in inside):
        raise _left_as_it_is(path, f"is a link that leads out, to {target}")
    status = target.stat()
    if status.st_nlink > 1:
        raise _left_as_it_is(path, f"has {status.st_nlink} names by hard links, which would part")
    # A superuser may write any file, but has marked this one.
    if not os.access(target, os.W_OK) or not status.st_mode & WRITABLE:
        raise _left_as_it_is(path, "is read-only")
    if target.read_bytes() != raw:
        raise _left_as_it_is(path, "has changed since it was read")
    with whole_file(target) as file:
        file.write(content)
        file.flush()
        _copy_ownership(target, file.name)


def _left_as_it_is(path: Path, reason: str) -> PathError:
    return PathError.of("TQ981.left_as_it_is", path=path, reason=reason, hint=Problem(path, reason).hint)


def _copy_ownership(source: Path, target: str) -> None:
    status = source.stat()
    if hasattr(os, "chown") and (status.st_uid, status.st_gid) != (os.geteuid(), os.getegid()):
        try:
            os.chown(target, status.st_uid, status.st_gid)
        except PermissionError as error:
            raise _left_as_it_is(source, "belongs to another user") from error
    os.chmod(target, status.st_mode & 0o7777)


# Convert Jupyter notebooks to one Python text and back, so that names of one cell are known in the next.
#
# Cells are joined with a marker comment before each. A line that only IPython understands becomes a ``pass``
# with the line in its comment. Both are undone when the text is split again: only edited parts change.


CELL = "# <torchq-compat cell {}>"
CELL_LINE = re.compile(r"^# <torchq-compat cell (\d+)>$", re.MULTILINE)
MASK = "pass  # <torchq-compat> "
MAGIC_LINE = re.compile(
    r"^(?P<indent>[ \t]*)(?P<code>[%!?].*|[\w., ]+ *= *[%!].*|[\w.]+\?\??)$", re.MULTILINE
)
#: Cell magics whose body is Python; the bodies of other magics are not.
PYTHON_CELL_MAGICS = ("%%capture", "%%prun", "%%time", "%%timeit")
PYTHON_LANGUAGES = ("", "ipython", "python")
#: How notebooks are laid out, the most frequent first.
INDENTS, SEPARATORS = (1, 2, 4, "\t", None, 0, 3), ((",", ": "), (", ", ": "), (",", ":"))


def join_cells(raw_text: str) -> tuple[str, tuple[str, ...]]:
    """Return the readable code cells of the notebook ``raw_text``, joined, and why others cannot be read.

    Raises:
        UnreadableError: the text is not a notebook.
    """
    parts, problems = [], []
    for number, cell in enumerate(_load(raw_text)["cells"], start=1):
        code = _source(cell)
        magic = next(iter(code.split(maxsplit=1)), "") if code.lstrip().startswith("%%") else ""
        if cell.get("cell_type") != "code" or (magic and magic not in PYTHON_CELL_MAGICS):
            continue
        try:
            parts.append(f"{CELL.format(number)}\n{_as_python(code)}\n")
        except SyntaxError as error:
            problems.append(f"cell {number}, line {error.lineno}: {error.msg}")
        except (ValueError, RecursionError, MemoryError) as error:
            problems.append(f"cell {number}: {error or type(error).__name__}")
    return "".join(parts), tuple(problems)


def _as_python(code: str) -> str:
    """Return ``code``, with the lines of IPython in comments if it is not valid Python otherwise."""
    try:
        _syntax_of(code)
    except SyntaxError:
        code = MAGIC_LINE.sub(lambda match: f"{match['indent']}{MASK}{match['code']}", code)
        _syntax_of(code)
    return code


def rewritten_notebook(raw_text: str, new_text: str) -> str:
    """Return the notebook ``raw_text`` with the cells of ``new_text`` in place of its own.

    Raises:
        UnreadableError: the layout of its JSON could not be kept.
    """
    content = _load(raw_text)
    layout = _layout(raw_text, content)
    pieces = CELL_LINE.split(new_text)[1:]
    for number, piece in zip(pieces[::2], pieces[1::2], strict=True):
        cell = content["cells"][int(number) - 1]
        code = piece.removeprefix("\n").removesuffix("\n").replace(MASK, "")
        if code != _source(cell):
            cell["source"] = code.splitlines(keepends=True) if isinstance(cell["source"], list) else code
    return _dump(content, layout)


def cell_of_line(text: str, line: int) -> tuple[int, int]:
    """Return the number of the cell, and the line in it, for a line of the joined text; all count from 1."""
    lines = text.split("\n")[:line]
    for back, candidate in enumerate(reversed(lines)):
        if match := CELL_LINE.match(candidate):
            return int(match[1]), back
    raise ValueError(f"line {line} lies in no cell")


def _load(text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise UnreadableError(f"is not a notebook: {error}") from error
    except (RecursionError, MemoryError) as error:
        raise UnreadableError("is not a notebook: it is nested too deeply") from error
    if not isinstance(content, dict) or not isinstance(content.get("cells"), list):
        raise UnreadableError("is not a notebook of format 4: it has no cells")
    if not all(map(_is_cell, content["cells"])):
        raise UnreadableError("is not a notebook of format 4: one of its cells is none")
    language = _inside(_inside(content, "metadata"), "kernelspec").get("language", "")
    if not isinstance(language, str):
        raise UnreadableError("is not a notebook of format 4: its language is no text")
    if language.lower() not in PYTHON_LANGUAGES:
        raise UnreadableError(f"is a notebook of {language}, not of Python")
    return content


def _is_cell(cell: Any) -> bool:
    source = cell.get("source", "") if isinstance(cell, dict) else None
    return isinstance(source, str) or (
        isinstance(source, list) and all(isinstance(line, str) for line in source)
    )


def _inside(content: dict[str, Any], key: str) -> dict[str, Any]:
    value = content.get(key, {})
    return value if isinstance(value, dict) else {}


def _source(cell: dict[str, Any]) -> str:
    source = cell.get("source", "")
    return "".join(source) if isinstance(source, list) else str(source)


Layout = tuple[str, dict[str, Any]]


def _layout(text: str, content: dict[str, Any]) -> Layout:
    for indent, ascii_only, separators, end in product(INDENTS, (False, True), SEPARATORS, ("\n", "")):
        options = {"indent": indent, "ensure_ascii": ascii_only, "separators": separators}
        if _dump(content, (end, options)) == text:
            return end, options
    raise UnreadableError("is laid out in a way that rewriting would not keep; save it with Jupyter first")


def _dump(content: dict[str, Any], layout: Layout) -> str:
    end, options = layout
    return json.dumps(content, **options) + end


# Python files and notebooks in one form: a text to search, and bytes to write.


NOTEBOOK = ".ipynb"
#: A notebook may use ``await`` outside functions.
FLAGS = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT


@dataclass(frozen=True)
class Position:
    """A line and column of a Python file, or of a numbered cell of a notebook; all count from 1."""

    line: int
    cell: int | None = None
    column: int = 1

    def __str__(self) -> str:
        line = f"{self.line}:{self.column}"
        return line if self.cell is None else f"cell {self.cell}:{line}"


@dataclass(frozen=True)
class Document:
    """A file as Python text.

    Attributes:
        path: the path of the file.
        raw: the bytes on disk.
        encoding: their encoding.
        text: its Python code; for a notebook, the code of all cells.
        syntax: the syntax tree of ``text``.
        problems: parts that could not be read.
    """

    path: Path
    raw: bytes
    encoding: str
    text: str
    syntax: ast.Module
    problems: tuple[str, ...] = ()

    def place(self, line: int, column: int = 1) -> Position:
        if self.path.suffix != NOTEBOOK:
            return Position(line, column=column)
        cell, line_of_cell = cell_of_line(self.text, line)
        return Position(line_of_cell, cell, column)

    def bytes_with(self, text: str) -> bytes:
        """Return the bytes of the file with ``text`` in place of its own.

        Raises:
            UnreadableError: the file could not be written without changing more than that.
        """
        if self.path.suffix == NOTEBOOK:
            text = rewritten_notebook(self.raw.decode(self.encoding), text)
        try:
            return text.encode(self.encoding)
        except UnicodeEncodeError as error:
            raise UnreadableError(f"cannot be encoded again: {error}") from error


def check_readable(path: Path, raw: bytes) -> None:
    """Raise an UnreadableError if ``raw`` is no text or no notebook; it is not parsed as Python."""
    text, _ = decode(raw)
    if path.suffix == NOTEBOOK:
        _load(text)


def read_document(path: Path, raw: bytes | None = None) -> Document:
    """Read the file at ``path``, or its bytes ``raw``.

    Raises:
        UnreadableError: the file cannot be read, or is neither Python nor a notebook.
    """
    raw = read_raw(path) if raw is None else raw
    text, encoding = decode(raw)
    if path.suffix == NOTEBOOK:
        code, problems = join_cells(text)
        return Document(path, raw, encoding, code, parse(code), problems)
    if text.encode(encoding) != raw:
        raise UnreadableError(f"does not survive decoding as {encoding}")
    return Document(path, raw, encoding, text, parse(raw))


def parse(code: str | bytes) -> ast.Module:
    """Return the syntax tree of ``code`` by Python's ``ast``: without formatting, but far faster than LibCST.

    Raises:
        UnreadableError: ``code`` is not valid Python.
    """
    try:
        return _syntax_of(code)
    except SyntaxError as error:
        raise UnreadableError(f"line {error.lineno}: {error.msg}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise UnreadableError(f"cannot be parsed: {error}") from error


def _syntax_of(code: str | bytes) -> ast.Module:
    with warnings.catch_warnings(action="ignore"):
        tree = compile(code, "file", "exec", FLAGS, dont_inherit=True)
    assert isinstance(tree, ast.Module)
    return tree
