"""A construct: a code for one kind of legacy code, what it becomes, and what the guide says of it."""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["GUIDE", "Construct"]

GUIDE = "migration/README.md"


class Construct(NamedTuple):
    """One kind of legacy code.

    Attributes:
        code: stable, for filters and machines. TQ1xx: ``rewrite`` knows how; TQ2xx: for manual review.
        title: what it is.
        becomes: what it is replaced by.
        guide: what the migration guide says of it, in Markdown, without the heading.
    """

    code: str
    title: str
    becomes: str
    guide: str

    @property
    def anchor(self) -> str:
        """The section of the guide, as GitHub names the anchor of its heading."""
        return re.sub(r"[^\w\- ]", "", f"{self.code} {self.title}".lower()).replace(" ", "-")

    @property
    def link(self) -> str:
        return f"{GUIDE}#{self.anchor}"

    @property
    def section(self) -> str:
        """The guide's section about it, heading included."""
        return f"### {self.code} {self.title}\n\n{self.guide}"
