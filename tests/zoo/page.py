"""The page of the zoo: a table, and sections for what does not fit into its cells."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.zoo.verdict import beside_plain_loops, is_good, size_word, verdict

__all__ = ["render", "write_page"]

Row = Mapping[str, Any]
HEAD = (
    "model",
    "from",
    "ops FX / here",
    "qparams equal",
    "FX dB",
    "here dB",
    "here / loops dB",
    "other sizes",
    "time",
    "commit",
    "verdict",
)
INTRODUCTION = """\
# Public models, on FX and here

Written by `python -m tests.zoo`; do not edit. Public definitions, random weights, small inputs; batch norms
that have seen data and shift as trained ones do; `get_default_qconfig_mapping("x86")`, three batches to
calibrate. Each model runs in a process of its own, through FX and through this package.

- **ops**: how many are quantized. **qparams equal**: how many of FX's activation qparams are found here, to
  1e-5, of how many.
- **dB**: SQNR against the float model of the reference and of the lowered model, the worst result of a
  calibrated and an unseen batch.
- **here / loops dB**: of recurrent models, the reference beside the same graph whose recurrent modules are
  plain Python loops that fake-quantize the same parts with the same qparams, at the size where it falls
  shortest, six unseen batches pooled. At most 1 dB less, and 25 dB wherever the loops have it. Of a
  log-softmax the logits are measured.
- **other sizes**: how many are right, refused with an error that says what to do, or wrong. A size at which
  the float model fails is not counted.
- **commit**: of this package, on which the row was measured.
- **time**: CPU seconds of prepare and convert here, divided by FX's.
- FX is the measure where it runs and quantizes what is recurrent: at 15 dB and more, its SQNR less 1 dB;
  below, equal qparams, or a reason. Elsewhere the float model is.

The rows are data, too:

```python
import json
from pathlib import Path

rows = json.loads(Path("migration/zoo.json").read_text())["rows"]
quantized_by_fx = [row["model"] for row in rows if "sqnr" in row.get("fx", {}) and row["fx"]["sqnr"]]
```
"""


def write_page(results: Mapping[str, Any], page: Path) -> None:
    draft = page.with_suffix(".draft")
    draft.write_text(render(results))
    os.replace(draft, page)


def render(results: Mapping[str, Any]) -> str:
    rows: Sequence[Row] = results["rows"]
    good = sum(is_good(row) for row in rows)
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    table = [" | ".join(HEAD), " | ".join("---" for _ in HEAD), *(" | ".join(_cells(row)) for row in rows)]
    return "\n".join(
        [
            INTRODUCTION,
            f"Measured with {versions}. Of {len(rows)} models {good} are as they should be.",
            "",
            *(f"| {line} |" for line in table),
            "",
            *_not_measured(results["not_measured"]),
            *_section("What FX refuses", rows, lambda row: row.get("fx", {}).get("refused")),
            *_section("What is refused here", rows, lambda row: row.get("ours", {}).get("refused")),
            *_section("Warnings of prepare and convert", rows, _warnings),
        ]
    )


def _not_measured(names: Sequence[str]) -> Iterator[str]:
    if names:
        yield "## Not measured"
        yield ""
        yield (
            f"The zoo has {len(names)} more, which were not run for this table for want of machine time: "
            "nothing is said about them here. `python -m tests.zoo --only NAME` runs one. "
            f"They are {', '.join(names)}."
        )
        yield ""


def _cells(row: Row) -> Iterator[str]:
    yield row["model"]
    yield row.get("source", "")
    if "died" in row:
        yield from ("",) * 7
    else:
        ops, qparams = row.get("ops", {}), row.get("qparams", {})
        yield f"{ops.get('fx', '-')} / {ops.get('ours', '-')}"
        yield f"{qparams['equal']} of {qparams['fx']}" if "equal" in qparams else "-"
        yield _decibels(row["fx"]) + (" (recurrent float)" if row["fx"].get("float_recurrent") else "")
        yield _decibels(row["ours"])
        yield _beside_loops(row)
        yield _sizes(row)
        yield _time(row)
    yield row.get("commit", "-")
    yield _escaped(verdict(row))


def _decibels(side: Mapping[str, Any]) -> str:
    found = side.get("sqnr", {})
    if not found:
        return "refuses" if "refused" in side else "-"
    return " / ".join(
        f"{found[form]['dB']:.1f}" if "dB" in found[form] else "fails" for form in ("reference", "lowered")
    )


def _beside_loops(row: Row) -> str:
    pairs = list(beside_plain_loops(row).values())
    if not pairs:
        return "-"
    here, there = min(pairs, key=lambda pair: pair[0] - pair[1])
    return f"{here:.1f} / {there:.1f}"


def _sizes(row: Row) -> str:
    if not row["ours"].get("sqnr"):
        return "-"
    words = [size_word(row, name) for name in row["other_sizes"]]
    counted = [word for word in words if word != "float fails"]
    right, refused = counted.count("right"), counted.count("refused")
    wrong = len(counted) - right - refused
    return ", ".join(
        f"{n} {word}" for n, word in ((right, "right"), (refused, "refused"), (wrong, "wrong")) if n
    )


def _time(row: Row) -> str:
    seconds = [
        sum(row[side].get(f"{step}_s", 0.0) for step in ("prepare", "convert")) for side in ("fx", "ours")
    ]
    both = all("convert_s" in row[side] for side in ("fx", "ours"))
    return f"{seconds[1] / seconds[0]:.1f}" if both else f"({seconds[1]:.1f} s)"


def _warnings(row: Row) -> str | None:
    found = row.get("ours", {}).get("warnings", [])
    return " ".join(found) or None


def _section(title: str, rows: Sequence[Row], text_of: Any) -> Iterator[str]:
    told = [(row["model"], text) for row in rows if (text := text_of(row))]
    if told:
        yield f"## {title}"
        yield ""
        yield from (f"- **{name}**: {_escaped(text)}" for name, text in told)
        yield ""


def _escaped(text: str) -> str:
    return text.replace("\n", " ").replace("|", "\\|").replace("<", "&lt;")
