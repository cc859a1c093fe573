"""The ported scripts of the guide run and show what the guide says."""

from __future__ import annotations

import runpy
from pathlib import Path

import torch

from tests.helpers.oracle import leaves, sqnr
from tests.helpers.warm_python import warm_python

ROOT = Path(__file__).parents[2]
WHOLE_OP = ROOT / "migration" / "whole_op_lstm.py"
QUANTIZE = "quantized_decomposed.quantize_per_tensor.default"


def test_the_issues_script_has_a_quantize_node_after_each_output() -> None:
    result = warm_python(WHOLE_OP)
    assert result.returncode == 0, result.stderr
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
