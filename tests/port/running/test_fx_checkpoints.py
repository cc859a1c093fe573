"""A legacy script that loads FX checkpoints runs unchanged: into prepared and into converted models."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.ao.quantization import get_default_qconfig_mapping
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

from tests.helpers.oracle import sqnr
from tests.helpers.warm_python import warm_python

SCRIPT = """
import torch
from torch import nn
from torch.ao.quantization import get_default_qconfig_mapping
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

x = torch.load("x.pt")
def model():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()

prepared = prepare_fx(model(), get_default_qconfig_mapping("x86"), (x,))
prepared.load_state_dict(torch.load("prepared.pt"))
converted = convert_fx(prepare_fx(model(), get_default_qconfig_mapping("x86"), (x,)))
print(converted.load_state_dict(torch.load("converted.pt")))
with torch.no_grad():
    torch.save([convert_fx(prepared)(x), converted(x)], "results.pt")
"""


def test_states_of_fx_are_loaded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    x = torch.randn(32, 8)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        prepared = prepare_fx(copy.deepcopy(model), get_default_qconfig_mapping("x86"), (x,))
        prepared(x)
        torch.save(prepared.state_dict(), tmp_path / "prepared.pt")
        converted = convert_fx(prepared)
        torch.save(converted.state_dict(), tmp_path / "converted.pt")
        expected = converted(x)
    torch.save(x, tmp_path / "x.pt")
    (tmp_path / "legacy.py").write_text(SCRIPT)
    ran = warm_python("-m", "torchq_compat", "run", "legacy.py", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "All keys matched" in ran.stdout
    step = float(converted.state_dict()["2.scale"])
    for found in torch.load(tmp_path / "results.pt"):
        assert float(((found - expected).abs() <= 1.01 * step).float().mean()) == 1.0
        assert 25 < sqnr(model(x), found) < 60
