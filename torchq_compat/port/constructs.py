"""A construct of legacy code, the sites where it stands in a source, and their edits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from torchq_compat.codes import REGISTER

# A construct: one kind of legacy code, its code (TQ...), its replacement, and its section of the guide.


GUIDE_PAGES = "migration/guide"


class Construct(NamedTuple):
    """One kind of legacy code, as ``codes.toml`` has it.

    Attributes:
        code: stable, for filters and tools. TQ1xx: handled by ``rewrite``; TQ2xx: for manual review.
        title: a short description.
        becomes: the replacement.
        guide: the text of the migration guide about it, in Markdown, without the title.
        name, summary: of the rewrite, for ``--only``, ``--skip`` and ``--list``.
        order: rewrites with lower numbers run first.
        retired: whether findings no longer have the code, but old logs may.
    """

    code: str
    title: str
    becomes: str
    guide: str
    name: str = ""
    summary: str = ""
    order: int = 1000
    retired: bool = False

    @property
    def link(self) -> str:
        """Its place in the guide: one page of TQ1xx, one of TQ2xx."""
        page = "findings.md" if self.code < "TQ2" else "findings-2xx.md"
        return f"{GUIDE_PAGES}/{page}#{self.code.lower()}"

    @property
    def entry(self) -> str:
        """Its entry in that page."""
        text = " ".join(self.guide.split())
        return f'- <a id="{self.code.lower()}"></a>**{self.code} {self.title}.** {text}\n'


_ALL = {entry["code"]: Construct(**entry) for entry in REGISTER["construct"]}
CONSTRUCTS = {code: construct for code, construct in _ALL.items() if not construct.retired}
RETIRED = {code: construct for code, construct in _ALL.items() if construct.retired}


# Edits of a text at byte offsets; bytes that are not edited are kept.


class Edit(NamedTuple):
    """Replace the bytes from ``start`` up to ``end`` by ``text``."""

    start: int
    end: int
    text: str


def apply_edits(data: bytes, edits: Iterable[Edit]) -> bytes:
    """Return ``data`` after the edits, which must not overlap; equal edits are applied once."""
    pieces, position = [], 0
    for edit in sorted(set(edits)):
        if edit.start < position:
            raise ValueError(f"edits overlap at byte {edit.start}")
        pieces += [data[position : edit.start], edit.text.encode()]
        position = edit.end
    return b"".join([*pieces, data[position:]])


def overlap(first: Iterable[Edit], second: Iterable[Edit]) -> bool:
    """Return whether an edit of ``first`` and a different edit of ``second`` touch the same bytes."""
    others = list(second)
    return any(a != b and a.start < b.end and b.start < a.end for a in first for b in others)


# A site: one place in the source that needs attention, and the edits that rewrite it, if there are any.


@dataclass(frozen=True, order=True)
class ImportRequest:
    """An import that is needed at a byte offset: ``import module``, or ``from module import name``."""

    module: str
    name: str = ""
    offset: int = 0

    @property
    def statement(self) -> str:
        return f"from {self.module} import {self.name}" if self.name else f"import {self.module}"


@dataclass(frozen=True)
class Site:
    """One place that needs attention.

    Attributes:
        code: the code of the construct.
        offset: the offset of its first byte.
        what: the name or expression found.
        edits: the edits that ``rewrite`` would make; all are applied or none.
        imports: the imports that the edited code needs.
        refusal: why it is left for manual review; empty if ``rewrite`` handles it.
    """

    code: str
    offset: int
    what: str
    edits: tuple[Edit, ...] = ()
    imports: tuple[ImportRequest, ...] = ()
    refusal: str = ""

    def settled(self, refusal: str, edits: Iterable[Edit], imports: tuple[ImportRequest, ...] = ()) -> Site:
        """Return the site with its edits, or with the reason against them, if there is one."""
        if refusal:
            return replace(self, edits=(), imports=(), refusal=refusal)
        return replace(self, edits=tuple(edits), imports=imports)
