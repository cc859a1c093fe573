"""``torchq_compat.calibrate``: a loop over batches, with a bar where somebody looks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.quantization import get_default_qconfig_mapping
from torch.utils.data import DataLoader, TensorDataset

from torchq_compat import calibrate, prepare_fx
from torchq_compat.errors import ArgumentError, InputError, ScriptError
from torchq_compat.port import process

BATCHES = torch.randn(6, 5, 4)


def prepared() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU()).eval()
    return prepare_fx(model, get_default_qconfig_mapping("x86"), (BATCHES[0],))


@pytest.mark.parametrize(
    "batches",
    [list(BATCHES), [(batch,) for batch in BATCHES], DataLoader(TensorDataset(BATCHES.flatten(0, 1)), 5)],
    ids=["tensors", "tuples", "loader"],
)
def test_it_is_the_loop_that_scripts_write(batches: Any) -> None:
    by_hand, by_us = prepared(), prepared()
    for batch in BATCHES:
        by_hand(batch)
    calibrate(by_us, batches)
    assert by_us.state_dict().keys() == by_hand.state_dict().keys()
    for name, value in by_us.state_dict().items():
        assert torch.equal(value, by_hand.state_dict()[name]), name


def test_a_bar_is_for_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    calibrate(prepared(), list(BATCHES))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(process, "shows_progress", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    calibrate(prepared(), list(BATCHES))
    assert "calibrating" in capsys.readouterr().err


def test_bad_input() -> None:
    with pytest.raises(ScriptError, match="batches is a Tensor and no list of batches"):
        calibrate(prepared(), BATCHES[0])
    with pytest.raises(ArgumentError, match="what prepare_fx returned"):
        calibrate(BATCHES, [])  # type: ignore[arg-type]
    with pytest.raises(InputError):
        calibrate(prepared(), [(BATCHES[0], BATCHES[0])])
