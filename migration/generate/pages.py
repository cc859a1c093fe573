"""Generate pages, and generated blocks in pages that are written by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from migration.generate.known_differences import guide_table
from migration.generate.pictures import pictures
from migration.generate.results_table import gallery_table, results_table
from migration.generate.support_table import support_page
from torchq_compat.codes import CODES, DIFFERENCES, RANGES, Code
from torchq_compat.port.constructs import CONSTRUCTS, Construct
from torchq_compat.quantize.passes import PASSES

ABOVE_CODES = (
    "[Contents](../README.md) · [what codes are for](codes.md). `torchq-compat explain CODE` has the texts."
)
MADE = "<!-- begin: {}. Made by `python -m migration.generate`; do not edit. -->"
#: So many known differences are on the first page of them.
AT_FIRST = 24
#: A link in the page of contents to a page of the guide.
PAGE = re.compile(r"\]\((guide/[\w-]+\.md)[)#]")
#: The lines of the contents about what ``scan`` finds, one for each code.
CONTENTS_OF_CODES = re.compile(r'(?:^ {4}- <a id="tq\d[^\n]*\n)+', re.MULTILINE)


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
        "constructs": _constructs("TQ10"),
        "later": _constructs("TQ11") + "\n" + _constructs("TQ12"),
        "reviews": _constructs("TQ2"),
        "gallery": gallery_table(checkout / "migration" / "zoo.json"),
        "known differences": guide_table(differences[:AT_FIRST]),
        "more known differences": guide_table(differences[AT_FIRST:]),
        "passes": _passes(),
        "quantizers": _quantizers(checkout / "migration" / "quantizers.json"),
        "results": results_table(checkout / "migration" / "benchmarks.json"),
    }
    contents, *pages = guide_pages(checkout)
    yield contents, CONTENTS_OF_CODES.sub(lambda _: _codes(), contents.read_text(), count=1)
    for page in [checkout / "README.md", checkout / "ARCHITECTURE.md", *pages]:
        text = page.read_text()
        held = [name for name in blocks if f"<!-- begin: {name}." in text]
        for name in held:
            text = with_block(text, name, blocks[name])
        if held:
            yield page, text
    yield checkout / "migration" / "support.md", support_page(source)
    for name, text in _pages_of_codes():
        yield checkout / "migration" / "guide" / name, text
    for name, picture in pictures().items():
        yield checkout / "migration" / "pictures" / name, picture


def guide_pages(checkout: Path) -> list[Path]:
    """Return the pages of the guide in reading order: the page of contents, then those it links to."""
    contents = checkout / "migration" / "README.md"
    linked = dict.fromkeys(PAGE.findall(contents.read_text()))
    return [contents, *(contents.parent / name for name in linked)]


def _codes() -> str:
    return "".join(
        f'    - <a id="{each.anchor}"></a>[{each.code} {each.title}](guide/{_page_of(each)}#{each.anchor})\n'
        for each in CONSTRUCTS.values()
    )


def _page_of(construct: Construct) -> str:
    pages = {"TQ10": "findings.md", "TQ11": "findings-11x.md", "TQ12": "findings-11x.md"}
    return pages.get(construct.code[:4], "findings-2xx.md")


def _constructs(of_range: str) -> str:
    return "\n".join(item.section for item in CONSTRUCTS.values() if item.code.startswith(of_range))


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
    note = " (note)" if entry.severity == "note" else ""
    return f'- <a id="{entry.anchor}"></a>**{entry.code}**{note} {entry.title}. {entry.advice}'


def _quantizers(path: Path) -> str:
    """Return the table of Quantizers: a row each, a column for each model, in the order of the file."""
    measured = {(row["quantizer"], row["model"]): row for row in json.loads(path.read_text())}
    names, models = (list(dict.fromkeys(key[at] for key in measured)) for at in (0, 1))
    rows = [f"| Quantizer | {' | '.join(models)} | LSTM, mapped |", "|---" * (len(models) + 2) + "|"]
    for name in names:
        cells = [_beside_plain(measured[name, model]) for model in models]
        mapped = next(row["mapped"] for key, row in measured.items() if key[0] == name and "mapped" in row)
        rows.append(f"| {name} | {' | '.join(cells)} | {_result(mapped)} |")
    return "\n".join(rows) + "\n"


def _beside_plain(row: dict[str, Any]) -> str:
    """Return the result of plain PT2E, and those of ours that are others."""
    shown = {key: _result(row[key]) for key in ("plain", "pt2e", "prepare_fx")}
    codes = sorted(set(row["prepare_fx"].get("codes", ())) - {"TQ423"})
    others = [f"{key} {shown[key]}" for key in ("pt2e", "prepare_fx") if shown[key] != shown["plain"]]
    return "; ".join([shown["plain"], *others, *codes])


def _result(result: dict[str, Any]) -> str:
    if "error" in result:
        return str(result["error"]).partition(":")[0]
    decibels = "exact" if result["dB"] >= 99 else f"{result['dB']} dB"
    return f"{result['q']} q, {decibels}"


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
