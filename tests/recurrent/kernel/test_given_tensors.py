"""Tensors of another dtype or on another device as inputs of recurrent modules, alone and in a model."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import QConfigMapping, default_dynamic_qconfig, get_default_qconfig_mapping

import torchq_compat as tc
from tests.helpers.oracle import leaves
from torchq_compat.errors import CallError, CustomModuleError

KINDS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(6, 8),
    "gru": lambda: nn.GRU(6, 8),
    "lstm cell": lambda: nn.LSTMCell(6, 8),
    "gru cell": lambda: nn.GRUCell(6, 8),
}


class Stateful(nn.Module):
    def __init__(self, rnn: nn.Module) -> None:
        super().__init__()
        self.rnn = rnn

    def forward(self, x: Tensor, *states: Tensor) -> Any:
        return self.rnn(x, states if len(states) > 1 else states[0])


def given(name: str) -> tuple[Tensor, ...]:
    """Return input and states."""
    states = 2 if "lstm" in name else 1
    if "cell" in name:
        return torch.ones(3, 6), *(torch.zeros(3, 8) for _ in range(states))
    return torch.ones(4, 3, 6), *(torch.zeros(1, 3, 8) for _ in range(states))


@cache
def models(name: str) -> tuple[Any, Any]:
    """Return (reference, lowered)."""
    torch.manual_seed(0)
    config = tc.get_default_prepare_custom_config()
    mapping = get_default_qconfig_mapping()
    if "lstm" not in name:
        mapping = QConfigMapping().set_global(default_dynamic_qconfig)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = tc.prepare_fx(Stateful(KINDS[name]()).eval(), mapping, given(name), config)
        prepared(*given(name))
        return tc.convert_to_reference_fx(prepared), tc.convert_fx(prepared)


def call(module: Any, x: Tensor, *states: Tensor) -> Any:
    return module(x, states if len(states) > 1 else states[0])


@torch.no_grad()
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("is_lowered", [False, True])
def test_a_module_names_the_tensor_that_does_not_fit(name: str, *, is_lowered: bool) -> None:
    module = models(name)[0].rnn
    module = module.lowered() if is_lowered else module
    tensors = given(name)
    names = ("the input", " h", " c")[: len(tensors)]
    for index, argument in enumerate(names):
        for wrong in (torch.int64, torch.bool, torch.float64, torch.bfloat16, torch.device("meta")):
            changed = list(tensors)
            changed[index] = tensors[index].to(wrong)  # type: ignore[call-overload]
            # An input of another float dtype is cast, so the error names the first state, whose dtype differs
            # from it.
            is_cast = index == 0 and wrong in (torch.float64, torch.bfloat16)
            named = names[1] if is_cast else argument
            with pytest.raises(CustomModuleError, match=rf"module 'rnn'.*{named} must be .*\nHint: "):
                call(module, *changed)


@torch.no_grad()
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_tensors_of_one_float_dtype_are_cast(name: str, dtype: torch.dtype) -> None:
    module, tensors = models(name)[0].rnn, given(name)
    expected = leaves(call(module, *tensors))
    for each in (module, module.lowered()):
        found = leaves(call(each, *(tensor.to(dtype) for tensor in tensors)))
        assert [tensor.dtype for tensor in found] == [dtype] * len(expected)
        for a, b in zip(expected, found, strict=True):
            assert torch.allclose(a, b.float(), atol=2e-2)


@torch.no_grad()
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("wrong", [torch.int64, torch.device("meta")])
def test_a_model_names_the_tensor_that_does_not_fit(name: str, wrong: Any) -> None:
    tensors = given(name)
    for model in models(name):
        for index in range(len(tensors)):
            changed = list(tensors)
            changed[index] = tensors[index].to(wrong)
            with pytest.raises((CallError, CustomModuleError), match=r"(argument|'rnn').*\nHint: "):
                model(*changed)
