"""Under run: removed modules, private functions, quantize_dynamic and the Numeric Suite."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.ao.quantization import get_default_qconfig_mapping

import torchq_compat
from torchq_compat.errors import QuantizationWarning
from torchq_compat.port.running import redirections

MAPPING = get_default_qconfig_mapping("x86")
ROOT = Path(torchq_compat.__file__).parents[1]
SCRIPT = """\
import copy
import torch
from torch import nn
from torch.ao.quantization import get_default_qconfig_mapping, quantize_dynamic
from torch.ao.quantization.quantize_pt2e import convert_pt2e, prepare_pt2e
from torch.ao.quantization.quantizer import Quantizer
import torch.ao.quantization.pt2e.export_utils as export_utils
from torch.ao.quantization.quantize_fx import _convert_to_reference_decomposed_fx, convert_fx, prepare_fx
import torch.quantization._numeric_suite as ns

print(prepare_pt2e.__module__, Quantizer.__module__, export_utils.__name__)
model, x = nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4)).eval(), torch.randn(3, 2, 4)
print(quantize_dynamic(model)[1])
linear = nn.Sequential(nn.Linear(4, 4)).eval()
prepared = prepare_fx(linear, get_default_qconfig_mapping("x86"), x)
prepared(x)
quantized = convert_fx(prepared)
print("dequantize_per_tensor" in _convert_to_reference_decomposed_fx(prepared).code)
for call in (
    lambda: ns.compare_weights(linear.state_dict(), quantized.state_dict()),
    lambda: ns.compare_weights(linear.state_dict(), dict(quantized.state_dict())),
    lambda: ns.compare_weights(linear.state_dict(), linear.state_dict()),
):
    try:
        print(type(call()).__name__)
    except Exception as error:
        print(error.message)
captured = torch._export.capture_pre_autograd_graph(linear, (x,))
print([node.meta["source_fn_stack"][-1][1] for node in captured.graph.nodes if node.op == "call_function"])
"""


@pytest.mark.slow
def test_redirected(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torchq_compat", "run", "script.py"]
    result = subprocess.run(
        command,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].split()[:2] == [
        "torchq_compat.pt2e",
        "torchao.quantization.pt2e.quantizer.quantizer",
    ]
    assert lines[1:3] == ["DynamicQuantizedLSTM(4, 4)", "True"]
    for line in lines[3:5]:
        assert line.startswith(
            "compare_weights of the Numeric Suite finds nothing in a model of torchq_compat"
        )
    assert lines[5] == "dict"
    assert result.stderr.count("reduce_range will be deprecated") <= 1
    assert (
        "Sequential, quantized dynamically: 1 DynamicQuantizedLinear, 1 DynamicQuantizedLSTM" in result.stderr
    )
    assert lines[-1] == "[<class 'torch.nn.modules.linear.Linear'>]"


def test_the_private_convert_hands_on_every_argument() -> None:
    prepared = torchq_compat.prepare_fx(nn.Sequential(nn.Linear(4, 4)).eval(), MAPPING, (torch.randn(2, 4),))
    prepared(torch.randn(2, 4))
    with pytest.warns(QuantizationWarning, match="keep_original_weights=True changes nothing"):
        redirections.convert_fx(prepared, keep_original_weights=True)
