"""What a rewrite is: a name and a function that finds sites."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torchq_compat.migrate.parsed_source import ParsedSource
from torchq_compat.migrate.sites import Site

__all__ = ["Rewrite"]


@dataclass(frozen=True)
class Rewrite:
    """One rewrite.

    Attributes:
        name: for ``--only`` and ``--skip``.
        code: of the construct it settles.
        summary: one line, for ``--list``.
        find: all its sites, those it refuses included.
    """

    name: str
    code: str
    summary: str
    find: Callable[[ParsedSource], Iterator[Site]]
