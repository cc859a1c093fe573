"""Every Quantizer does in ``torchq_compat.pt2e`` and in ``prepare_fx`` what it does in plain PT2E."""

from __future__ import annotations

import json

import pytest

from tests.annotate.every_quantizer import MODELS, QUANTIZERS, ROWS, is_as_plain, rows_of

#: Not to be had by every installation: their packages are no dependency of the tests.
MOST_THAT_IMPORT = 14


def test_the_rows_of_the_guide() -> None:
    rows = json.loads(ROWS.read_text())
    assert all(map(is_as_plain, rows))
    names = {row["quantizer"] for row in rows}
    assert names <= QUANTIZERS.keys()
    assert len(names) >= MOST_THAT_IMPORT
    assert len(rows) == len(names) * len(MODELS)
    assert sum("error" in row["plain"] for row in rows) <= 2
    mapped = {row["quantizer"]: row["mapped"] for row in rows if row["model"] == "LSTM"}
    assert all(result["dB"] > 26 for result in mapped.values() if "error" not in result)


@pytest.mark.executorch
def test_a_row_live() -> None:
    (row,) = rows_of("XNNPACK", ["several outputs"])
    assert is_as_plain(row)
    assert row["prepare_fx"]["q"] == row["pt2e"]["q"] == row["plain"]["q"] == 7


@pytest.mark.slow
@pytest.mark.executorch
@pytest.mark.parametrize("name", QUANTIZERS)
def test_every_row_live(name: str) -> None:
    assert all(map(is_as_plain, rows_of(name)))
