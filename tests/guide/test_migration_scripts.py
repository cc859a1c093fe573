"""The ported scripts of the guide run and show what the guide says."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import torch

from tests.helpers.oracle import leaves, sqnr

ROOT = Path(__file__).parents[2]
WHOLE_OP = ROOT / "migration" / "whole_op_lstm.py"
QUANTIZE = "quantized_decomposed.quantize_per_tensor.default"


def test_the_issues_script_has_a_quantize_node_after_each_output() -> None:
    result = subprocess.run(
        [sys.executable, str(WHOLE_OP)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.splitlines()[-3:] == [f"output {index} -> {QUANTIZE}" for index in range(3)]
    assert "torch.ops.aten.lstm.input(" in result.stdout


def test_the_issues_script_quantizes_and_stays_close() -> None:
    torch.manual_seed(0)
    model, quantized, inputs = runpy.run_path(str(WHOLE_OP))["quantized_lstm_model"]()
    parameters = next(n for n in quantized.graph.nodes if n.target is torch.ops.aten.lstm.input).args[2]
    assert [p.args[5] for p in parameters] == [torch.int8, torch.int8, torch.int32, torch.int32]
    with torch.no_grad():
        for expected, value in zip(leaves(model(*inputs)), leaves(quantized(*inputs)), strict=True):
            assert 33 < sqnr(expected, value) < 55


def test_the_issues_script_needs_no_executorch() -> None:
    assert "executorch" not in WHOLE_OP.read_text().lower().replace("came from executorch", "")
