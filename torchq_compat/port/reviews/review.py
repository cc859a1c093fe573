"""The declaration of a finding for manual review: a construct, and a function that finds its sites."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torchq_compat.port.constructs import Construct, Site
from torchq_compat.port.source.parsed import ParsedSource


@dataclass(frozen=True)
class ManualReview:
    """One kind of finding that no rewrite handles, declared in the module that finds its sites.

    Attributes:
        construct: the construct; the guide's section is made from it.
        find: yields all its sites, each with the reason why nothing is rewritten.
        words: names to search files for; a file with none of them, and no name of FX's, is not parsed.
    """

    construct: Construct
    find: Callable[[ParsedSource], Iterator[Site]]
    words: tuple[str, ...] = ()

    @property
    def code(self) -> str:
        return self.construct.code
