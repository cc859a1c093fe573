"""Only a model that is equal in everything that is captured starts from a copy of an earlier capture."""

from __future__ import annotations

import copy
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import get_default_qconfig_mapping

import torchq_compat as tc
from tests.helpers.once import SHARED


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.factor = nn.Linear(4, 4), 2.0

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc(x) * self.factor
        return result


def with_factor(model: Scaled) -> None:
    model.factor = 3.0


def with_weight(model: Scaled) -> None:
    with torch.no_grad():
        model.fc.weight[0, 0] += 1


def with_frozen_weight(model: Scaled) -> None:
    model.fc.weight.requires_grad_(False)


def with_another_layer(model: Scaled) -> None:
    model.fc = nn.Sequential(model.fc, nn.ReLU()).eval()


def test_another_model_is_captured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    export = Mock(wraps=torch.export.export)
    monkeypatch.setattr(torch.export, "export", export)

    def captures(model: nn.Module, x: Tensor) -> int:
        before = export.call_count
        prepared = tc.prepare_fx(model, get_default_qconfig_mapping("x86"), (x,))
        torch.testing.assert_close(prepared(x), model(x))
        return export.call_count - before

    model, x = Scaled().eval(), torch.randn(8, 4)
    assert captures(model, x) == 1
    assert captures(model, x) == (0 if SHARED else 1)
    assert captures(model, torch.cat([x, x])) == 1
    for change in (with_factor, with_weight, with_frozen_weight, with_another_layer):
        changed = copy.deepcopy(model)
        change(changed)
        assert captures(changed, x) == 1, change.__name__
