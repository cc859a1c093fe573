"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

__all__ = ["whole_file", "write_whole"]


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write; it stands beside ``path`` and moves there in one step when it is complete and on disk.

    Raises:
        OSError: it cannot be written; a file that was there is left.
    """
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with beside.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def write_whole(path: Path, content: str) -> None:
    """Write ``content`` to ``path`` in one step; see ``whole_file``."""
    with whole_file(path) as file:
        file.write(content.encode())
