"""The integer kernels for q-dq patterns: one file for each family.

Every module in this folder that declares a ``Family`` is found; there is no other list.
"""

from __future__ import annotations

import sys

from torchq_compat.lower.x86.kernels.kernel_base import Family
from torchq_compat.support.discovery import declared

__all__ = ["FAMILIES"]

#: Sorted by the names of their modules.
FAMILIES = declared(sys.modules[__name__], Family)
