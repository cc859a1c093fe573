"""The rewrites, one module each; every module here that declares a ``Finder`` is found without a list.

Every rewrite recognises the FX functions under their legacy and their new names, so the order affects only
the look of the result: names that others import come first, so that imports are joined.
"""

import sys

from torchq_compat.port.finders import Finder
from torchq_compat.support.discovery import declared

REWRITES = tuple(sorted(declared(sys.modules[__name__], Finder), key=lambda rewrite: rewrite.construct.order))
