"""The declaration of a rewrite: a construct, and a function that finds its sites with their edits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torchq_compat.port.constructs import Construct, Site
from torchq_compat.port.source.parsed import ParsedSource


@dataclass(frozen=True)
class Rewrite:
    """One rewrite, declared in the module that finds its sites.

    Attributes:
        name: for ``--only`` and ``--skip``.
        construct: the construct that it handles; the guide's section is made from it.
        summary: one line, for ``--list``.
        find: yields all its sites, including those it refuses.
        order: rewrites with lower numbers run first.
        words: names to search files for; a file with none of them, and no name of FX's, is not parsed.
    """

    name: str
    construct: Construct
    summary: str
    find: Callable[[ParsedSource], Iterator[Site]]
    order: int = 1000
    words: tuple[str, ...] = ()

    @property
    def code(self) -> str:
        return self.construct.code
