"""A construct: one kind of legacy code, its code (TQ...), its replacement, and its section of the guide."""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["GUIDE", "Construct"]

GUIDE = "migration/README.md"


class Construct(NamedTuple):
    """One kind of legacy code.

    Attributes:
        code: stable, for filters and tools. TQ1xx: handled by ``rewrite``; TQ2xx: for manual review.
        title: a short description.
        becomes: the replacement.
        guide: the text of the migration guide about it, in Markdown, without the heading.
    """

    code: str
    title: str
    becomes: str
    guide: str

    @property
    def anchor(self) -> str:
        """The anchor of the section of the guide, as GitHub derives it from the heading."""
        return re.sub(r"[^\w\- ]", "", f"{self.code} {self.title}".lower()).replace(" ", "-")

    @property
    def link(self) -> str:
        return f"{GUIDE}#{self.anchor}"

    @property
    def section(self) -> str:
        """The section of the guide, with its heading."""
        return f"### {self.code} {self.title}\n\n{self.guide}"
