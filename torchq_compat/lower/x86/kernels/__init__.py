"""Which integer kernel computes what a q-dq pattern computes: one file a family, found by being there.

A module here that declares a ``Family`` is one; nothing else lists them.
"""

from __future__ import annotations

import sys

from torchq_compat.lower.x86.kernels.kernel_base import Family
from torchq_compat.support.discovery import declared

__all__ = ["FAMILIES"]

#: In the order of the names of their modules.
FAMILIES = declared(sys.modules[__name__], Family)
