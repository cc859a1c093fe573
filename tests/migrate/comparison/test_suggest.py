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
    """The input of ``bad`` has one channel that takes the whole range."""

    def __init__(self) -> None:
        super().__init__()
        self.good = nn.Linear(8, 8)
        self.bad = nn.Linear(8, 8)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.tensor([400.0, *[1.0] * 7])
        return self.last(torch.relu(self.bad(self.good(x) * scale)))


def case() -> dict[str, object]:
    torch.manual_seed(0)
    model = Outlier().eval()
    with torch.no_grad():
        model.bad.weight[:, 0] = 0
    batches = [(torch.randn(16, 8),) for _ in range(2)]
    return {
        "model": model,
        "qconfig_mapping": get_default_qconfig_mapping("x86"),
        "example_inputs": batches[0],
        "calibration_data": batches,
    }


def test_the_worst_module_is_left_float() -> None:
    given = case()
    mapping = tc.suggest(**given, n=1)  # type: ignore[arg-type]
    assert mapping.chosen == ("bad",)
    assert mapping.sqnr_before < 15 < 25 < mapping.sqnr_after
    assert mapping.sensitivities[0].path == "bad"
    assert [each.path for each in mapping.sensitivities if each.gain > 5] == ["bad"]
    assert "* bad  Linear" in str(mapping)
    assert mapping.module_name_qconfigs["bad"] is None
    assert given["qconfig_mapping"].module_name_qconfigs.get("bad", 0) == 0  # type: ignore[attr-defined]
    prepared = tc.prepare_fx(given["model"], mapping, given["example_inputs"])  # type: ignore[arg-type]
    assert any(each.path == "bad" for each in tc.explain(prepared).left_float())
    with pytest.raises(ArgumentError, match="at least 1"):
        tc.suggest(**given, n=0)  # type: ignore[arg-type]


def test_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(["suggest", "-n", "1", f"{__name__}:case"]) == 0
    assert "qconfig_mapping.set_module_name('bad', None)" in capsys.readouterr().out
    assert main(["suggest", "nothing"]) == 2
