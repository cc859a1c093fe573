"""A compared model that shows itself: as tables, as JSON, as a page. Nothing here needs torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torchq_compat.migrate.comparison.report.html_report import write_page
from torchq_compat.migrate.comparison.report.json_report import as_data
from torchq_compat.migrate.comparison.report.terminal_report import as_text
from torchq_compat.migrate.comparison.results import ComparedModel

__all__ = ["Comparison"]


class Comparison(ComparedModel):
    """FX and this package on one model. ``print`` it for the tables."""

    def __str__(self) -> str:
        return as_text((self,))

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, as ``torchq-compat compare --json`` prints them for each model."""
        return as_data(self)

    def to_json(self) -> str:
        """Return ``as_dict`` as indented JSON."""
        return json.dumps(self.as_dict(), indent=2)

    def write_html(self, path: str | Path) -> None:
        """Write one self-contained page, in one step: a file that was there is
        replaced when the page is whole.

        Args:
            path: the file to write.

        Raises:
            ReportError: the ``report`` extra is not installed, or ``path`` cannot be written.
        """
        write_page((self,), Path(path))
