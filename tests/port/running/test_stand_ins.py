"""Stand-ins for modules of the FX engine that torch no longer has."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator

import pytest
from torch import nn

from torchq_compat.errors import QuantizationWarning
from torchq_compat.port.running import redirections
from torchq_compat.support import torch_ao

ABSENT = "torch.ao.quantization.there_was_one"


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(redirections, "ENGINE", frozenset({ABSENT}))
    redirections.put_stand_in(ABSENT, {"prepare_fx": len})
    redirections.put_stand_in(ABSENT, {"_prepare_fx": max})
    yield
    del sys.modules[ABSENT]
    delattr(importlib.import_module("torch.ao.quantization"), "there_was_one")


@pytest.mark.usefixtures("put")
def test_imports_find_its_functions() -> None:
    from torch.ao.quantization import there_was_one
    from torch.ao.quantization.there_was_one import _prepare_fx, prepare_fx

    assert (prepare_fx, _prepare_fx) == (len, max)
    assert there_was_one is sys.modules[ABSENT]


@pytest.mark.usefixtures("put")
def test_configuration_classes_are_passed_on_and_nothing_else() -> None:
    module = importlib.import_module(ABSENT)
    assert module.QConfigMapping is torch_ao.QConfigMapping
    with pytest.raises(AttributeError, match="'Scope': torch has removed the module"):
        _ = module.Scope


@pytest.mark.usefixtures("put")
def test_a_stand_in_is_no_module_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert redirections.legacy_module(ABSENT) is None
    assert redirections.legacy_module("torch.ao.quantization.quantize_fx") is not None
    monkeypatch.setattr(torch_ao, "FX_ENGINE", ABSENT)
    with pytest.raises(ImportError, match="this torch has no"):
        torch_ao.fx_engine()


def test_other_modules_get_none() -> None:
    redirections.put_stand_in("torch.ao.nn.intrinsic.there_is_none", {"freeze_bn_stats": len})
    assert "torch.ao.nn.intrinsic.there_is_none" not in sys.modules
    assert {moved.legacy for moved in redirections.PRIVATE_FUNCTIONS} <= redirections.ENGINE


def test_fuse_fx_for_training_says_that_it_fuses_nothing() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.warns(QuantizationWarning, match="TQ708"):
        assert redirections.fuse_fx(model, is_qat=True) is model
