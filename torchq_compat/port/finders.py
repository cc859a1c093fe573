"""What finds the sites of a construct, declared in a module of ``rewrites`` or ``reviews``."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torchq_compat.port.constructs import CONSTRUCTS, Construct, Site
from torchq_compat.port.source.parsed import ParsedSource


@dataclass(frozen=True)
class Finder:
    """One rewrite, or one kind of finding for manual review; its texts are in ``codes.toml``.

    Attributes:
        code: the code of the construct in the register.
        find: yields all its sites, including those it refuses, each with the reason.
        words: names to search files for; a file with none of them, and no name of FX's, is not parsed.
    """

    code: str
    find: Callable[[ParsedSource], Iterator[Site]]
    words: tuple[str, ...] = ()

    @property
    def construct(self) -> Construct:
        return CONSTRUCTS[self.code]
