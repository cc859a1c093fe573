"""A report of ``explain`` as HTML for a notebook cell, without scripts or styles that affect other cells."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from torchq_compat.support.showing.report_text import HEADER, cells
from torchq_compat.support.showing.rows import Row, default_reason, headline
from torchq_compat.support.showing.text_table import columns_with_content

__all__ = ["html_table", "report_html"]

CELL = "text-align:left;vertical-align:top;padding:2px 10px 2px 0"


def report_html(rows: Sequence[Row]) -> str:
    """Return the headline, and the table in a ``<details>`` that is open if the table is short."""
    common = default_reason(rows)
    shown = [
        cells(row, common) if row.role != "size" else (row.path, row.kind, row.action, "", "", row.reason)
        for row in rows
    ]
    state = " open" if len(shown) <= 40 else ""
    why = f"<p>Reason, unless noted otherwise: {escape(common)}.</p>" if common else ""
    return (
        f"<div><p><b>{escape(headline(rows))}</b></p><details{state}><summary>{len(rows)} rows</summary>"
        f"{html_table(HEADER, shown)}{why}</details></div>"
    )


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of ``rows`` without the empty columns."""
    kept = columns_with_content(header, rows)
    head = "".join(f'<th style="{CELL}">{escape(header[index])}</th>' for index in kept)
    lines = [
        "<tr>" + "".join(f'<td style="{CELL}">{escape(row[index])}</td>' for index in kept) + "</tr>"
        for row in rows
    ]
    return (
        f'<div style="overflow-x:auto"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )
