"""The Quantizers of the PT2E world, measured: the table of ``migration/support.md``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HEAD = """
## Quantizers

Measured by `python -m tests.annotate.every_quantizer`; MediaTek's and NXP's converters, which are no public
packages, were stand-ins. Quantize nodes and the worst SQNR of four batches, three of them calibrated, on
small models with random weights: in plain `prepare_pt2e` on a static export; then what `torchq_compat.pt2e`
(same export) or `prepare_fx` has otherwise, and the code of what `prepare_fx` tells. The last column is
`prepare_fx` with `get_default_prepare_custom_config()`.

"""


def quantizers_table(path: Path) -> str:
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
