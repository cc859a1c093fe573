"""torch runs without NumPy, which it does not require; so does this package."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.helpers.marks import slow_but

FLOW = """
import sys
sys.modules["numpy"] = None  # as where it is not installed

import torch
from torch import nn
from torch.ao.quantization import get_default_qat_qconfig_mapping, get_default_qconfig_mapping
from torch.ao.quantization import QConfigMapping, default_dynamic_qconfig
from torchq_compat import convert_fx, explain, get_default_prepare_custom_config, prepare_fx, prepare_qat_fx

model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.LSTM(32, 32))
example = (torch.randn(10, 4, 16),)
{prepare}
prepared(*example)
converted = convert_fx(prepared)
report = explain(converted)
assert any("quantized" in d.action.value for d in report) and not report.left_float(), str(report)
output = converted(torch.randn(7, 3, 16))
torch.save(converted.state_dict(), sys.argv[1])
converted.load_state_dict(torch.load(sys.argv[1], weights_only=True))
try:
    torch.zeros(1).numpy()
except RuntimeError as missing:
    print("without NumPy:", missing)
"""

PREPARES = {
    "post-training": (
        "prepared = prepare_fx(model.eval(), get_default_qconfig_mapping('x86'), example, "
        "get_default_prepare_custom_config())"
    ),
    "training": (
        "prepared = prepare_qat_fx(model.train(), get_default_qat_qconfig_mapping('x86'), example, "
        "get_default_prepare_custom_config()); prepared(*example)[0].sum().backward(); prepared.eval()"
    ),
    "dynamic": (
        "prepared = prepare_fx(model.eval(), QConfigMapping().set_global(default_dynamic_qconfig), example, "
        "get_default_prepare_custom_config())"
    ),
}


@pytest.mark.parametrize("kind", slow_but(("post-training",), PREPARES))
def test_a_model_is_prepared_converted_lowered_and_saved_without_numpy(kind, tmp_path):
    script = tmp_path / "flow.py"
    script.write_text(FLOW.replace("{prepare}", PREPARES[kind]))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(tmp_path / "state.pt")],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "without NumPy: Numpy is not available" in done.stdout
