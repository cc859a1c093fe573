"""Source files on disk: find them under paths, read them with their encoding, replace them in one step."""

from __future__ import annotations

import errno
import io
import os
import stat
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torchq_compat.errors import PathError
from torchq_compat.support.atomic_files import whole_file

__all__ = ["Problem", "SourceFile", "UnreadableError", "find_files", "read_file", "replace_file"]

SUFFIXES = (".py", ".pyw", ".ipynb")
SKIPPED_FOLDERS = ("__pycache__", "node_modules")
#: The size limit; a notebook with pictures may be large.
MAX_BYTES = 256 << 20


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
    "line ": "python -m py_compile says the same; mend the line, or leave the file out",
}
OTHERWISE = "look at the file; the others were dealt with"


@dataclass(frozen=True)
class Problem:
    """A file or folder that could not be processed; the other files were."""

    path: Path
    reason: str

    @property
    def hint(self) -> str:
        """The advice for the user."""
        return next((hint for words, hint in HINTS.items() if words in self.reason), OTHERWISE)

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}. Hint: {self.hint}"


@dataclass(frozen=True)
class SourceFile:
    """The content of a file.

    Attributes:
        path: the path of the file.
        raw: the bytes on disk.
        text: ``raw`` decoded, without a byte order mark.
        encoding: the encoding of ``raw``, ``utf-8-sig`` with a byte order mark.
    """

    path: Path
    raw: bytes
    text: str
    encoding: str

    def encode(self, text: str) -> bytes:
        """Return ``text`` in the encoding of this file."""
        return text.encode(self.encoding)


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
            raise PathError(
                f"there is no {str(root)!r}.", hint="paths are relative to the current directory."
            )
    seen: set[Path] = set()
    for root in roots:
        for found in _walk(root, ()) if root.is_dir() else [root]:
            key = found.absolute() if isinstance(found, Path) else None
            if key is None or key not in seen:
                yield found
            if key is not None:
                seen.add(key)


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
            if not _is_skipped(entry):
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


def _is_skipped(folder: Path) -> bool:
    name = folder.name
    return name.startswith(".") or name in SKIPPED_FOLDERS or (folder / "pyvenv.cfg").exists()


def read_file(path: Path) -> SourceFile:
    """Return the content of ``path``.

    Raises:
        UnreadableError: the file cannot be opened or is not text in the encoding it declares.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise UnreadableError("is a device, a pipe or a socket and no file")
        if status.st_size > MAX_BYTES:
            raise UnreadableError(f"is larger than {MAX_BYTES >> 20} MiB, which no source code is")
        raw = path.read_bytes()
    except OSError as error:
        raise UnreadableError(f"cannot be read: {error.strerror or error}") from error
    return decode(path, raw)


def decode(path: Path, raw: bytes) -> SourceFile:
    if b"\0" in raw:
        raise UnreadableError("is a binary file")
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
        text = raw.decode(encoding)
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        raise UnreadableError(f"cannot be decoded: {error}") from error
    return SourceFile(path, raw, text, encoding)


def replace_file(source: SourceFile, content: bytes) -> None:
    """Replace the file of ``source`` by ``content`` in one step; until then the old file is complete.

    The new file is written beside the old one and moved over it; mode and, if allowed, owner are kept. A link
    stays a link: its target is replaced.

    Raises:
        PathError: the file is read-only or has changed since it was read.
        OSError: the folder cannot be written, the disk is full, ...
    """
    target = source.path.resolve()
    if not os.access(target, os.W_OK):
        raise PathError(f"{source.path} is read-only; it was left as it is.")
    if target.read_bytes() != source.raw:
        raise PathError(f"{source.path} has changed since it was read; it was left as it is.")
    with whole_file(target) as file:
        file.write(content)
        file.flush()
        _copy_ownership(target, file.name)


def _copy_ownership(source: Path, target: str) -> None:
    status = source.stat()
    if hasattr(os, "chown") and (status.st_uid, status.st_gid) != (os.geteuid(), os.getegid()):
        try:
            os.chown(target, status.st_uid, status.st_gid)
        except PermissionError as error:
            raise PathError(f"{source} belongs to another user; it was left as it is.") from error
    os.chmod(target, status.st_mode & 0o7777)
