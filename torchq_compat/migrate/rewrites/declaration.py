"""What a rewrite is: a construct, and a function that finds its sites with the edits that settle them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torchq_compat.migrate.legacy_api.construct import Construct
from torchq_compat.migrate.source.parsed_source import ParsedSource
from torchq_compat.migrate.source.sites import Site

__all__ = ["Rewrite"]


@dataclass(frozen=True)
class Rewrite:
    """One rewrite, all of it declared in the module that finds its sites.

    Attributes:
        name: for ``--only`` and ``--skip``.
        construct: what it settles; the guide's section about it is made from here.
        summary: one line, for ``--list``.
        find: all its sites, those it refuses included.
        order: lower ones run first.
        words: names to look for in files: one that spells none of them, nor any name of FX's, is not parsed.
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
