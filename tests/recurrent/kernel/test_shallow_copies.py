"""What ``copy.copy`` of recurrent modules and lowered models shares with the original."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import get_default_qconfig_mapping

import torchq_compat as tc
from tests.helpers.native_edges_shared import Whole
from tests.helpers.once import made_once
from tests.helpers.oracle import leaves

X = torch.linspace(-1, 1, 72).reshape(4, 3, 6)


@made_once
def converted() -> tuple[Any, Any]:
    """Return (reference, lowered)."""
    config = tc.get_default_prepare_custom_config()
    prepared = tc.prepare_fx(Whole(nn.LSTM(6, 8)).eval(), get_default_qconfig_mapping(), (X,), config)
    prepared(X)
    return tc.convert_to_reference_fx(prepared), tc.convert_fx(prepared)


def equal(first: Any, second: Any) -> bool:
    return all(map(torch.equal, leaves(first), leaves(second)))


@torch.no_grad()
@pytest.mark.parametrize("is_lowered", [False, True])
def test_hooks_of_a_copied_module_are_its_own(*, is_lowered: bool) -> None:
    module = converted()[0].rnn
    module = module.lowered() if is_lowered else module
    copied, called = copy.copy(module), []
    copied.register_forward_hook(lambda *_: called.append("copy"))
    module.register_forward_pre_hook(lambda *_: called.append("original"))
    assert equal(module(X), copied(X))
    assert called == ["original", "copy"]


@torch.no_grad()
def test_a_copied_module_has_the_cells_and_a_place_for_its_own() -> None:
    module = converted()[0].rnn
    copied = copy.copy(module)
    assert copied.layers is module.layers
    copied.register_buffer("extra", torch.zeros(1))
    copied.layers = nn.ModuleList()
    copied.opaque_layouts.clear()
    assert "extra" not in module.state_dict()
    assert len(module.layers) == 1
    assert module.opaque_layouts


@torch.no_grad()
def test_hooks_of_a_module_in_a_lowered_model_are_called() -> None:
    """The lowered model runs ``lowered()``, which shares the hooks on purpose."""
    lowered, called = converted()[1], []
    lowered.get_submodule("rnn").register_forward_hook(lambda *_: called.append("rnn"))
    lowered(X)
    assert called == ["rnn"]


@torch.no_grad()
def test_a_copy_of_a_lowered_model_shares_nothing() -> None:
    lowered = converted()[1]
    before, copied = lowered(X), copy.copy(lowered)
    assert type(copied).__mro__[1:] == type(lowered).__mro__[1:]
    assert equal(copied(X), before)
    called: list[str] = []
    copied.register_forward_hook(lambda *_: called.append("copy"))
    copied.get_submodule("rnn").register_forward_hook(lambda *_: called.append("rnn"))
    lowered(X)
    assert not called
    copied.load_state_dict({name: _changed(value) for name, value in copied.state_dict().items()})
    assert not equal(copied(X), before)
    assert equal(lowered(X), before)
    assert called == ["rnn", "copy"]


def _changed(value: Any) -> Any:
    return value + 1.0 if isinstance(value, Tensor) and value.dtype is torch.float32 else value
