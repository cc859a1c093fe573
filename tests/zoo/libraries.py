"""torchvision without its C++ operators, which do not load with the CPU build of torch.

Its models need only Python; its import requires the schemas of its own operators.
"""

from __future__ import annotations

import os
import sys
import types

__all__ = ["prepare_imports"]


def prepare_imports() -> None:
    """Make ``import torchvision`` work, and prevent downloads."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    name = "torchvision._meta_registrations"
    if "torchvision" not in sys.modules:
        sys.modules.setdefault(name, types.ModuleType(name))
