"""Pages that are made whole, and blocks of pages that people write."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from torchq_compat.migrate.guide.known_differences import (
    changelog_list,
    guide_table,
    read_known_differences,
)
from torchq_compat.migrate.guide.support_table import support_page
from torchq_compat.migrate.scanning.constructs import CONSTRUCTS

__all__ = ["made_pages", "with_block"]


def made_pages(checkout: Path) -> Iterator[tuple[Path, str]]:
    """Make every page that is made, in part or whole.

    Args:
        checkout: the root of the repository.

    Yields:
        The file, and the text it should have.
    """
    guide, changelog = checkout / "migration" / "README.md", checkout / "CHANGELOG.md"
    source = checkout / "migration" / "known_differences.toml"
    differences = read_known_differences(source)
    text = with_block(guide.read_text(), "constructs", _constructs())
    yield guide, with_block(text, "known differences", guide_table(differences))
    yield changelog, with_block(changelog.read_text(), "known differences", changelog_list(differences))
    yield checkout / "migration" / "support.md", support_page(source)


def _constructs() -> str:
    return "\n".join(construct.section for construct in CONSTRUCTS.values())


def with_block(text: str, name: str, block: str) -> str:
    """Put ``block`` between the comments ``<!-- begin: name. ... -->`` and ``<!-- end: name -->``.

    Raises:
        ValueError: ``text`` does not have the two comments exactly once.
    """
    pattern = re.compile(
        rf"(<!-- begin: {re.escape(name)}\.[^\n]*-->\n\n).*?(\n<!-- end: {re.escape(name)} -->)", re.DOTALL
    )
    made, count = pattern.subn(lambda match: match[1] + block + match[2], text)
    if count != 1:
        raise ValueError(f"{count} blocks are named {name!r}")
    return made
