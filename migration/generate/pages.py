"""Generate pages, and generated blocks in pages that are written by hand."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from migration.generate.known_differences import guide_list
from migration.generate.pictures import pictures
from migration.generate.results_table import gallery_table, results_table
from migration.generate.support_table import support_page
from torchq_compat.codes import CODES, DIFFERENCES, RANGES, Code
from torchq_compat.port.constructs import CONSTRUCTS
from torchq_compat.quantize.passes import PASSES

ABOVE_CODES = "[Contents](../README.md) · [what codes are](codes.md)"
MADE = "<!-- begin: {}. Made by `python -m migration.generate` -->"
#: So many known differences are on the first page of them.
AT_FIRST = 24
#: A link in the page of contents to a page of the guide.
PAGE = re.compile(r"\]\((guide/[\w-]+\.md)[)#]")


def made_pages(checkout: Path) -> Iterator[tuple[Path, str]]:
    """Generate every page that is generated in part or whole.

    Args:
        checkout: the root of the repository.

    Yields:
        The file, and the text it should have.
    """
    source = checkout / "migration" / "known_differences.toml"
    differences = tuple(DIFFERENCES.values())
    blocks = {
        "constructs": _constructs("TQ1"),
        "reviews": _constructs("TQ2"),
        "gallery": gallery_table(checkout / "migration" / "zoo.json"),
        "known differences": guide_list(differences[:AT_FIRST]),
        "more known differences": guide_list(differences[AT_FIRST:]),
        "passes": _passes(),
        "results": results_table(checkout / "migration" / "benchmarks.json"),
    }
    for page in [checkout / "README.md", checkout / "ARCHITECTURE.md", *guide_pages(checkout)]:
        text = page.read_text()
        held = [name for name in blocks if f"<!-- begin: {name}." in text]
        for name in held:
            text = with_block(text, name, blocks[name])
        if held:
            yield page, text
    yield (
        checkout / "migration" / "support.md",
        support_page(source, checkout / "migration" / "quantizers.json"),
    )
    for name, text in _pages_of_codes():
        yield checkout / "migration" / "guide" / name, text
    for name, picture in pictures().items():
        yield checkout / "migration" / "pictures" / name, picture


def guide_pages(checkout: Path) -> list[Path]:
    """Return the pages of the guide in reading order: the page of contents, then those it links to."""
    contents = checkout / "migration" / "README.md"
    linked = dict.fromkeys(PAGE.findall(contents.read_text()))
    return [contents, *(contents.parent / name for name in linked)]


def _constructs(of_range: str) -> str:
    return "".join(item.entry for item in CONSTRUCTS.values() if item.code.startswith(of_range))


def _pages_of_codes() -> Iterator[tuple[str, str]]:
    """Yield each page of the codes that are carried at run time, by its name."""
    for name, entries in groupby(CODES.values(), key=lambda entry: entry.page):
        block = name.removesuffix(".md")
        parts = [f"# {block.replace('codes-', 'Codes TQ')}", ABOVE_CODES, MADE.format(block)]
        for first, of_range in groupby(entries, key=lambda entry: entry.code[2]):
            parts.append(f"## TQ{first}xx: {RANGES[first]}")
            parts.append("\n".join(map(_entry, of_range)))
        yield name, "\n\n".join([*parts, f"<!-- end: {block} -->"]) + "\n"


def _entry(entry: Code) -> str:
    # Of a note nothing is to do, and an error says itself what is.
    # Of a note nothing is to do, and an error says itself what is.
    advice = f" {entry.advice}" if entry.severity == "warning" else ""
    return f'- <a id="{entry.anchor}"></a>**{entry.code}** {entry.title}.{advice}'


def _passes() -> str:
    rows = ["| | pass | needs | gives | guarantees |", "|---|---|---|---|---|"]
    for stage, passes in PASSES.items():
        for each in passes:
            needs, gives = (", ".join(f"`{name}`" for name in names) for names in (each.needs, each.gives))
            rows.append(f"| {stage} | {each.name} | {needs} | {gives} | {each.guarantees} |")
    return "\n".join(rows) + "\n"


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
