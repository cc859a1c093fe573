"""What ``rewrite`` leaves for manual review, one module each, found by being there."""

from __future__ import annotations

import sys

from torchq_compat.migrate.discovery import declared
from torchq_compat.migrate.manual_review.review import ManualReview

__all__ = ["MANUAL_REVIEWS"]

MANUAL_REVIEWS = tuple(sorted(declared(sys.modules[__name__], ManualReview), key=lambda review: review.code))
