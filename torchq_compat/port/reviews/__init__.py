"""The findings that ``rewrite`` leaves for manual review, one module each, found without a list."""

import sys

from torchq_compat.port.finders import Finder
from torchq_compat.support.discovery import declared

MANUAL_REVIEWS = tuple(sorted(declared(sys.modules[__name__], Finder), key=lambda review: review.code))
