"""Write files completely or not at all."""

import errno
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

#: Characters of the file's name that the temporary name keeps: file systems allow 255 bytes.
KEPT_OF_NAME = 40


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file beside ``path``, and move it to ``path`` in one step once it is complete and on disk.

    Raises:
        OSError: the file cannot be written; an existing file at ``path`` is left as it was.
    """
    # A link stays a link: its target is replaced.
    try:
        path = path.resolve()
    except RuntimeError as cause:  # before Python 3.13
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from cause
    mode = None
    with suppress(FileNotFoundError):
        mode = path.stat().st_mode
    if mode is not None and not stat.S_ISREG(mode):
        # A device or a pipe has no content to protect, and must not be replaced by a file.
        with path.open("wb") as file:
            yield file
        return
    if mode is not None and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    beside = path.with_name(f".{path.name[:KEPT_OF_NAME]}.{uuid.uuid4().hex}")
    try:
        with beside.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if mode is not None:
            beside.chmod(stat.S_IMODE(mode))
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def write_whole(path: Path, content: str) -> None:
    """Write ``content`` to ``path`` in one step; see ``whole_file``."""
    with whole_file(path) as file:
        file.write(content.encode())
