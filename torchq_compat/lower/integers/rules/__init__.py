"""How ops run on integers: one file for each family of ops.

Every module in this folder that declares a ``Family`` is found; there is no other list. Ops that compute
value by value (``tables.py``) or only move values (``moves.py``) need no rule of their own.
"""

import sys

from torchq_compat.lower.integers.lowered_graph import Family
from torchq_compat.support.discovery import declared

#: Sorted by the names of their modules.
FAMILIES = declared(sys.modules[__name__], Family)
