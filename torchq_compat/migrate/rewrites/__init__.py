"""The rewrites, one module each. A module here that declares a ``Rewrite`` is one; nothing else lists them.

Every one of them recognises the FX functions under their legacy and under their new name, so the order
changes only how the result looks: names that others import are settled first, so that imports are joined.
"""

from __future__ import annotations

import sys

from torchq_compat.migrate.rewrites.declaration import Rewrite
from torchq_compat.support.discovery import declared

__all__ = ["REWRITES"]

REWRITES = tuple(
    sorted(declared(sys.modules[__name__], Rewrite), key=lambda rewrite: (rewrite.order, rewrite.code))
)
