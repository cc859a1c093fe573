"""Apply the rewrites to one text, in as many rounds as the sites need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import libcst as cst

from torchq_compat.migrate.manual_review import MANUAL_REVIEWS
from torchq_compat.migrate.rewrites import REWRITES
from torchq_compat.migrate.rewrites.declaration import Rewrite
from torchq_compat.migrate.source.imports import import_edits
from torchq_compat.migrate.source.parsed_source import Follow, ParsedSource
from torchq_compat.migrate.source.sites import Site
from torchq_compat.migrate.source.text_edits import Edit, apply_edits, overlap

__all__ = ["InvalidResultError", "Origin", "find_sites", "rewrite_text"]

MAX_ROUNDS = 20
MAX_PASSES = 5


class InvalidResultError(Exception):
    """A rewrite would produce a text that is not valid Python; it is reported and never written."""


@dataclass(frozen=True)
class Origin:
    """Facts about a text that come from other files.

    Attributes:
        follow: resolves names from other files.
        taken_by_others: top-level names of the text that other files use.
    """

    follow: Follow | None = None
    taken_by_others: frozenset[str] = frozenset()

    def parse(self, text: str) -> ParsedSource:
        return ParsedSource(text, self.follow, self.taken_by_others)


def find_sites(source: ParsedSource, rewrites: Iterable[Rewrite] = REWRITES) -> list[Site]:
    """Return all sites in text order, including those for manual review."""
    sites = [site for rewrite in rewrites for site in rewrite.find(source)]
    sites += [site for review in MANUAL_REVIEWS for site in review.find(source)]
    return sorted(dict.fromkeys(sites), key=lambda site: (site.offset, site.code))


def rewrite_text(text: str, rewrites: Iterable[Rewrite] = REWRITES, origin: Origin | None = None) -> str:
    """Return ``text`` with every site rewritten that a rewrite can handle.

    Raises:
        InvalidResultError: the result does not parse.
        cst.ParserSyntaxError: ``text`` is not valid Python.
    """
    origin, rewrites = origin or Origin(), tuple(rewrites)
    source = origin.parse(text)
    for _ in range(MAX_PASSES):
        before = source
        for rewrite in rewrites:
            source = _settle(source, rewrite, origin)
        # The result of one rewrite may be a site of a rewrite that ran before it.
        if source is before:
            break
    return source.text


def _settle(source: ParsedSource, rewrite: Rewrite, origin: Origin) -> ParsedSource:
    for _ in range(MAX_ROUNDS):
        sites = list(_compatible(site for site in rewrite.find(source) if site.edits))
        if not sites:
            break
        source = _apply(source, sites, origin)
    return source


def _compatible(sites: Iterable[Site]) -> Iterator[Site]:
    """Yield the sites whose edits do not overlap those of an earlier site; the rest gets another round."""
    taken: list[Edit] = []
    for site in sites:
        if not overlap(site.edits, taken):
            taken += site.edits
            yield site


def _apply(source: ParsedSource, sites: list[Site], origin: Origin) -> ParsedSource:
    edits = [edit for site in sites for edit in site.edits]
    edits += import_edits(source, [request for site in sites for request in site.imports])
    text = apply_edits(source.data, edits).decode()
    try:
        return origin.parse(text)
    except cst.ParserSyntaxError as error:
        raise InvalidResultError(f"rewriting would break it: {error.message}") from error
