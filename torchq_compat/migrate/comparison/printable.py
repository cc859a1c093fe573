"""A compared model that shows itself as tables, as JSON and as a page. This module does not need torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchq_compat.migrate.comparison.report.html_report import write_page
from torchq_compat.migrate.comparison.report.json_report import as_data
from torchq_compat.migrate.comparison.report.notebook_report import (
    PLACE_COLUMNS,
    comparison_html,
    place_rows,
)
from torchq_compat.migrate.comparison.report.summary_sentence import summary_sentence
from torchq_compat.migrate.comparison.report.terminal_report import as_text
from torchq_compat.migrate.comparison.results import ComparedModel
from torchq_compat.support.argument_checks import PATH, checked_arguments
from torchq_compat.support.decisions import data_frame

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Comparison"]


class Comparison(ComparedModel):
    """FX and this package on one model; ``print`` shows the tables."""

    def __str__(self) -> str:
        return as_text((self,))

    def __repr__(self) -> str:
        return f"<Comparison of {self.capture.model}: {self.verdict.status}. {summary_sentence(self)}>"

    def _repr_html_(self) -> str:
        return comparison_html(self)

    @property
    def summary(self) -> str:
        """One sentence: how near to float, how small and how fast."""
        return summary_sentence(self)

    def to_dict(self) -> dict[str, Any]:
        """Return ``as_dict()``, under the name used by other reports."""
        return self.as_dict()

    def to_pandas(self) -> pd.DataFrame:
        """Return a pandas table with one line for each output, module, op and part.

        Raises:
            ReportError: pandas is not installed.
        """
        return data_frame(place_rows(self.capture), PLACE_COLUMNS)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, as ``torchq-compat compare --json`` prints them for each model."""
        return as_data(self)

    def to_json(self) -> str:
        """Return ``as_dict()`` as indented JSON."""
        return json.dumps(self.as_dict(), indent=2)

    @checked_arguments(path=PATH)
    def write_html(self, path: str | Path) -> None:
        """Write one self-contained page, in one step: an existing file is replaced once the page is complete.

        Args:
            path: the file to write.

        Raises:
            ArgumentError: ``path`` is no path.
            ReportError: the ``report`` extra is not installed, or ``path`` cannot be written.
        """
        write_page((self,), Path(path))
