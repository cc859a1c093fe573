"""The findings that ``rewrite`` leaves for manual review, one module each, found without a list."""

from __future__ import annotations

import sys

from torchq_compat.port.reviews.review import ManualReview
from torchq_compat.support.discovery import declared

MANUAL_REVIEWS = tuple(sorted(declared(sys.modules[__name__], ManualReview), key=lambda review: review.code))
