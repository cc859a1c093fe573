"""The compiled kernel on disk: written whole or not at all, loaded only if whole and safe from other users.

A truncated shared library kills the process that loads it. So a digest is appended to the library, which
loaders ignore.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ModuleNotFoundError:  # on Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["cache_directory", "fault_of", "keep", "one_at_a_time"]

MARK = b"\0torchq_compat sha256\0"
DIGEST_BYTES = hashlib.sha256().digest_size


def cache_directory() -> Path:
    """Return ``TORCHQ_COMPAT_CACHE_DIR``, or ``torchq_compat`` in the user's cache directory; create it if it
    is missing.

    Raises:
        OSError: if it cannot be created, or other users may replace files in it.
        RuntimeError: if there is no home directory.
    """
    named = os.environ.get("TORCHQ_COMPAT_CACHE_DIR")
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    directory = Path(named or Path(caches) / "torchq_compat").expanduser().absolute()
    directory.mkdir(parents=True, exist_ok=True)
    mode = directory.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise PermissionError(f"everybody may replace files in the cache directory {directory}")
    return directory


def keep(made: Path, path: Path) -> None:
    """Append a digest to the library ``made`` and move it to ``path``, in the same file system."""
    content = made.read_bytes()
    with made.open("ab") as file:
        file.write(MARK + hashlib.sha256(content).digest())
        file.flush()
        os.fchmod(file.fileno(), 0o755)
        os.fsync(file.fileno())
    made.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


@contextlib.contextmanager
def one_at_a_time(directory: Path, seconds: float) -> Iterator[None]:
    """Hold a lock on ``directory``; wait for another process that holds it, but no longer than ``seconds``.

    Without the lock, processes launched together would all compile the same kernel. The lock ends with the
    process that holds it. On a file system without locks nobody waits.
    """
    if fcntl is None:
        yield
        return
    held = os.open(directory, os.O_RDONLY)
    try:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.05)
            except OSError:
                break
            else:
                break
        yield
    finally:
        os.close(held)


def fault_of(path: Path) -> str | None:
    """Return the reason why the library at ``path`` must not be loaded; None if it may be loaded."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid():
            return "another user owns it"
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return "other users may write it"
        stored = file.read()
    content, mark, digest = stored[: -DIGEST_BYTES - len(MARK)], *_end(stored)
    whole = mark == MARK and digest == hashlib.sha256(content).digest()
    return None if whole else "it is not whole"


def _end(stored: bytes) -> tuple[bytes, bytes]:
    return stored[-DIGEST_BYTES - len(MARK) : -DIGEST_BYTES], stored[-DIGEST_BYTES:]
