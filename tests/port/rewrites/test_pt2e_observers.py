from __future__ import annotations

import importlib

import pytest

from tests.port.checks import IMPORTS, check_left, check_noop, check_transformed
from torchq_compat.port.names import PT2E_OBSERVERS
from torchq_compat.port.rewrites.moved import OBSERVERS_IN_PT2E as REWRITE

PT2E = "from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e\n"


@pytest.mark.parametrize(
    "code",
    [
        "from torch.ao.quantization.observer import MinMaxObserver\n",
        IMPORTS + "from torch.ao.quantization.observer import MinMaxObserver\n",
        PT2E + "from torch.ao.quantization.backend_config import DTypeConfig\n",
        # prepare_fx accepts both.
        IMPORTS
        + "from torchao.quantization.pt2e.quantizer import QuantizationSpec\n"
        + "from torch.ao.quantization.observer import MinMaxObserver\n",
    ],
)
def test_noop(code: str) -> None:
    check_noop(REWRITE, code)


def test_transformed() -> None:
    check_transformed(
        REWRITE,
        PT2E
        + """\
import torch
import torch.ao.quantization.observer as obs
from torch.ao.quantization import HistogramObserver as H, ObserverOrFakeQuantize
from torch.ao.quantization.fake_quantize import FusedMovingAvgObsFakeQuantize
a = obs.MinMaxObserver, torch.ao.quantization.FakeQuantize
""",
        PT2E
        + """\
import torch
import torch.ao.quantization.observer as obs
from torch.ao.quantization import ObserverOrFakeQuantize
from torchao.quantization.pt2e.observer import HistogramObserver as H
from torchao.quantization.pt2e.fake_quantize import FusedMovingAvgObsFakeQuantize
import torchao.quantization.pt2e.fake_quantize
import torchao.quantization.pt2e.observer
a = torchao.quantization.pt2e.observer.MinMaxObserver, torchao.quantization.pt2e.fake_quantize.FakeQuantize
""",
    )


def test_left_beside_qconfigs() -> None:
    code = PT2E + "from torch.ao.quantization.observer import MinMaxObserver\n"
    check_left(REWRITE, code + "from torch.ao.quantization import QConfigMapping\n", "also has QConfigs")


@pytest.mark.parametrize("row", PT2E_OBSERVERS, ids=lambda row: f"{row.legacy} {row.replacement}")
def test_the_table(row: object) -> None:
    legacy, replacement, names = row  # type: ignore[misc]
    for name, new in names.items():
        old = getattr(importlib.import_module(legacy), name, None)
        assert old is None or hasattr(importlib.import_module(replacement), new)
