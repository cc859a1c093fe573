"""Where names live that are imported when they are first needed; the top of the package fills this in."""

from __future__ import annotations

#: Name -> the dotted name of its module.
HOMES: dict[str, str] = {}
