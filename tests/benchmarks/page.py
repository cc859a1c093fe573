"""The results page: tables between two markers, with handwritten prose around them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.benchmarks.results import bars_of, tables_of

__all__ = ["BEGIN", "END", "PAGE", "PARTS", "prose_around", "render", "write_page"]

PAGE = Path("migration/benchmarks.md")
BEGIN, END = "<!-- begin results -->", "<!-- end results -->"
#: The parts that must be measured before a page is written.
PARTS = ("stages", "recurrent", "feedforward")


def prose_around(page: Path) -> tuple[str, str]:
    """Return the text before and after the results, including the markers.

    Raises:
        ValueError: ``page`` lacks a marker.
    """
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} has no {BEGIN} and {END}")
    return before + begin, end + after


def write_page(results: Mapping[str, Any], page: Path, plot: str) -> None:
    """Replace the text between the markers of ``page``.

    Raises:
        ValueError: a part was not measured, or ``page`` lacks a marker.
    """
    missing = [part for part in PARTS if part not in results]
    if missing:
        raise ValueError(f"a page needs every part measured; missing: {', '.join(missing)}")
    before, after = prose_around(page)
    draft = page.with_suffix(".draft")
    draft.write_text(f"{before}\n\n{render(results, plot)}\n\n{after}")
    os.replace(draft, page)


def render(results: Mapping[str, Any], plot: str) -> str:
    """Return the results as Markdown; ``plot`` is the address of the picture on the page."""
    met = [bar.is_met for bar in bars_of(results)]
    sections = [f"### {table.title}\n\n{table.as_markdown()}" for table in tables_of(results)]
    return "\n\n".join(
        [
            _setting(results["environment"]),
            f"Of {len(met)} expectations {sum(met)} are met; the last table lists them.",
            f"![Time of each stage and latency of each contender]({plot})",
            *sections,
        ]
    )


def _setting(environment: Mapping[str, Any]) -> str:
    versions = ", ".join(
        f"{name} {version or 'not installed'}" for name, version in environment["versions"].items()
    )
    return (
        f"Measured with {versions}, Python {environment['python']}, on {environment['threads']} of "
        f"{environment['cores']} cores ({environment['architecture']}, torch uses "
        f"{environment['torch_capability']}; CPU flags {', '.join(environment['cpu_flags'])}), quantized "
        f"engine {environment['quantized_engine']}. Prepare, calibrate and convert run on one thread."
    )
