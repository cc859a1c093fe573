"""Generate README's table of results from the measured numbers in ``migration/benchmarks.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: Case of the benchmarks -> its row: what a user asks about first. A case that was not measured has no row.
ROWS = {
    "CNN 3-32-64-128, 64x64, batch 8": "CNN",
    "CNN 3-32-64-128, trained": "CNN, trained with fake-quantizes",
    "transformer layer, 256 wide, 64 tokens, batch 8": "transformer layer",
    "(256, 512, 2, 128, 1)": "LSTM, 2 layers of 512, 128 steps",
    "(256, 512, 2, 1, 1)": "one step of it",
}
#: Contender of the benchmarks -> its column.
COLUMNS = {
    "ours, lowered": "here",
    "FX static": "FX",
    "ONNX Runtime, dynamic int8": "ONNX Runtime, dynamic",
}
FLOAT = "float"
QUESTIONS = {
    "sqnr_db": ("is it right: SQNR in dB", "{:.1f}"),
    "size_bytes": ("is it small: size, of float", "{:.2f}"),
    "median_ms": ("is it fast: time, of float", "{:.2f}"),
}


def results_table(file: Path) -> str:
    """Return the table; each cell has a number for every contender that was measured."""
    data = json.loads(file.read_text())
    cases: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in (*data["feedforward"], *data["recurrent"]):
        cases.setdefault(row["case"], {})[row["contender"]] = row
    names = " / ".join(COLUMNS.values())
    lines = [
        f"| {names} | {' | '.join(question for question, _ in QUESTIONS.values())} |",
        "|---|---|---|---|",
    ]
    lines += [f"| {ROWS[case]} | {_cells(cases[case])} |" for case in ROWS if case in cases]
    environment = data["environment"]
    return "\n".join(lines) + (
        f"\n\nMeasured on {environment['cores']} cores of {environment['architecture']} "
        f"({environment['torch_capability']}); [benchmarks](migration/benchmarks.md): how; where we lose.\n"
    )


def _cells(rows: Mapping[str, Mapping[str, Any]]) -> str:
    cells = []
    for key, (_, form) in QUESTIONS.items():
        base = 1 if key == "sqnr_db" else rows[FLOAT][key]
        values = [rows.get(contender, {}).get(key) for contender in COLUMNS]
        cells.append(" / ".join("-" if value is None else form.format(value / base) for value in values))
    return " | ".join(cells)


#: Model of the zoo -> what it is.
GALLERY = {
    "resnet18": "CNN",
    "mobilenet_v2": "CNN for phones",
    "convnext_tiny": "CNN with layer norms",
    "swin_t": "windowed transformer",
    "wav2vec2_tiny": "speech transformer",
    "min_gpt": "language model",
    "crnn": "CNN and LSTM, reads text in pictures",
    "deepspeech2": "CNN and packed LSTM, speech",
    "unet": "segmentation",
    "dlrm": "recommender with embedding bags",
}


def gallery_table(file: Path) -> str:
    """Return what ten public models became, from the rows of ``zoo.json``."""
    rows = {row["model"]: row for row in json.loads(file.read_text())["rows"]}
    lines = [
        "| model | what it is | ops quantized | dB here | dB in FX |",
        "|---|---|---|---|---|",
    ]
    for name, what in GALLERY.items():
        row = rows[name]
        ours, theirs = row["ours"]["sqnr"]["lowered"], row.get("fx", {}).get("sqnr", {}).get("lowered")
        fx = f"{theirs['dB']:.1f}" if theirs else "cannot run it"
        lines.append(f"| {name} | {what} | {row['ops']['ours']} | {ours['dB']:.1f} | {fx} |")
    return "\n".join(lines) + "\n"
