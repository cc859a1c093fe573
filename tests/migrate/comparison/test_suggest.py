"""suggest: the modules that cost most."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import get_default_qconfig_mapping

import torchq_compat as tc
from torchq_compat.errors import ArgumentError
from torchq_compat.migrate.cli import main


class Outlier(nn.Module):
    """One channel between ``bad`` and ``last`` takes the whole range, and counts for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.good = nn.Linear(8, 8)
        self.bad = nn.Linear(8, 8)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.bad(self.good(x)))


def case() -> dict[str, object]:
    torch.manual_seed(0)
    model = Outlier().eval()
    with torch.no_grad():
        model.bad.bias[0] = 400
        model.last.weight[:, 0] = 0
    batches = [(torch.randn(16, 8),) for _ in range(2)]
    return {
        "model": model,
        "qconfig_mapping": get_default_qconfig_mapping("x86"),
        "example_inputs": batches[0],
        "calibration_data": batches,
    }


def test_the_worst_module_is_left_float() -> None:
    given = case()
    mapping = tc.suggest(**given, n=2)  # type: ignore[arg-type]
    assert sorted(mapping.chosen) == ["bad", "last"]
    assert mapping.sqnr_before < 15 < 25 < mapping.sqnr_after < 60
    worst, second, best = mapping.sensitivities
    assert best.path == "good"
    assert max(worst.sqnr, second.sqnr) < 15 < 25 < best.sqnr < 60
    assert f"* {worst.path}  Linear" in str(mapping)
    assert mapping.module_name_qconfigs["bad"] is None
    assert "bad" not in given["qconfig_mapping"].module_name_qconfigs  # type: ignore[attr-defined]
    prepared = tc.prepare_fx(given["model"], mapping, given["example_inputs"])  # type: ignore[arg-type]
    assert any(each.path == "bad" for each in tc.explain(prepared).left_float())
    with pytest.raises(ArgumentError, match="at least 1"):
        tc.suggest(**given, n=0)  # type: ignore[arg-type]


def test_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(["suggest", "-n", "2", f"{__name__}:case"]) == 0
    assert "qconfig_mapping.set_module_name('bad', None)" in capsys.readouterr().out
    assert main(["suggest", "nothing"]) == 2
