"""convert_fx of models with recurrent modules: these run on integers, the rest as in the reference graph."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import QConfigMapping, get_default_qconfig_mapping
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils._python_dispatch import TorchDispatchMode

import torchq_compat as tc
from tests.helpers.lstm_flow import uniform
from tests.helpers.once import made_once
from tests.helpers.oracle import calibrate, leaves, sqnr
from torchq_compat.profiles import int8_with_int16_cell
from torchq_compat.support.decisions import Action


class Encoder(nn.Module):
    """An LSTM feeds another one, which is called twice; all results are returned whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LSTM(6, 10, batch_first=True, bidirectional=True)
        self.second = nn.LSTM(20, 20, 2, batch_first=True)
        self.out = nn.Linear(20, 5)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> Any:
        first, last = self.first(x)
        second, state = self.second(first, state)
        again, state = self.second(second * 2.0, state)
        return self.out(again), last, state


def batch(steps: int, size: int) -> tuple[Any, ...]:
    return uniform(2.0, size, steps, 6), (uniform(0.3, 2, size, 20), uniform(0.5, 2, size, 20))


@made_once
def prepared() -> tuple[nn.Module, Any]:
    """Return a float model, and it prepared, which has seen nothing."""
    torch.manual_seed(0)
    model, config = Encoder().eval(), tc.get_default_prepare_custom_config()
    return model, tc.prepare_fx(model, get_default_qconfig_mapping(), batch(9, 4), config)


@made_once
def converted() -> tuple[nn.Module, Any, Any]:
    """Return a float model, its reference, and it lowered."""
    model, made = prepared()
    calibrate(made, [batch(9, 16)])
    lowered = tc.convert_fx(made)
    return model, lowered.reference, lowered


def lowered_paths(model: torch.fx.GraphModule) -> dict[str, Action]:
    return {d.path: d.action for d in tc.explain(model).decisions if d.path.endswith("/lowering")}


@torch.no_grad()
def test_a_model_at_lengths_it_never_saw() -> None:
    _, reference, lowered = converted()
    assert set(lowered_paths(lowered).values()) == {Action.LOWERED}
    for steps, size in ((9, 4), (1, 1), (50, 2)):
        inputs = batch(steps, size)
        for expected, found in zip(leaves(reference(*inputs)), leaves(lowered(*inputs)), strict=True):
            assert expected.shape == found.shape
            assert sqnr(expected, found) > 38


@torch.no_grad()
def test_the_float_model_is_as_far_away_as_from_the_reference() -> None:
    inputs = batch(60, 4)
    model, reference, lowered = converted()
    for expected, by_reference, found in zip(
        *(leaves(each(*inputs)) for each in (model, reference, lowered)), strict=True
    ):
        assert abs(sqnr(expected, found) - sqnr(expected, by_reference)) < 1.0
        assert sqnr(expected, found) < 45


@torch.no_grad()
def test_copies_and_states() -> None:
    (_, reference, lowered), inputs = converted(), batch(12, 3)
    assert list(lowered.state_dict()) == list(reference.state_dict())
    before = leaves(lowered(*inputs))
    copied = copy.deepcopy(lowered)
    assert all(map(torch.equal, before, leaves(copied(*inputs))))
    _, other = prepared()
    for parameter in other.parameters():
        parameter.uniform_(-0.3, 0.3)
    calibrate(other, [inputs])
    other = tc.convert_fx(other)
    assert not any(map(torch.equal, leaves(other(*inputs)), before))
    copied.load_state_dict(other.state_dict())
    assert all(map(torch.equal, leaves(other(*inputs)), leaves(copied(*inputs))))
    assert all(map(torch.equal, before, leaves(lowered(*inputs))))


@torch.no_grad()
def test_sixteen_bit_parts_run_on_integers_too() -> None:
    torch.manual_seed(0)
    lstm: Any = nn.LSTM(6, 16).eval()
    from torchq_compat.lstm_utils import get_lstm_with_individually_observed_parts

    class Observed(tc.nn.quantizable.LSTM):
        @classmethod
        def from_float(cls, other: nn.Module, qconfig: Any = None) -> Any:
            return get_lstm_with_individually_observed_parts(other, **int8_with_int16_cell(other))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = lstm

        def forward(self, x: Tensor) -> Tensor:
            return self.lstm(x)[0]

    x = uniform(2.0, 30, 4, 6)
    config = tc.get_default_prepare_custom_config().set_float_to_observed_mapping(nn.LSTM, Observed)
    made = tc.prepare_fx(Model().eval(), get_default_qconfig_mapping(), (x,), config)
    calibrate(made, [(x,)])
    lowered = tc.convert_fx(made)
    reference = lowered.reference
    assert lowered_paths(lowered) == {"lstm/lowering": Action.LOWERED}
    assert sqnr(reference(x), lowered(x)) > 45


@torch.no_grad()
def test_the_lowered_module_itself_takes_what_the_float_one_takes() -> None:
    _, reference, _ = converted()
    module = reference.get_submodule("first")
    lowered = module.lowered()
    x = uniform(2.0, 4, 11, 6)
    packed = pack_padded_sequence(x, torch.tensor([3, 11, 3, 7]), batch_first=True, enforce_sorted=False)
    for given in (x, x[0], packed, x.double()):
        for expected, found in zip(leaves(module(given)), leaves(lowered(given)), strict=True):
            assert expected.dtype == found.dtype
            if expected.is_floating_point():
                assert sqnr(expected, found) > 38
    assert isinstance(lowered(packed)[0], PackedSequence)


@torch.no_grad()
def test_what_the_loop_cannot_run_is_not_lowered_and_says_so() -> None:
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(6, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.gru(x)[0]

    x = uniform(2.0, 9, 4, 6)
    half = torch.ao.quantization.float16_dynamic_qconfig
    made = tc.prepare_fx(Model().eval(), QConfigMapping().set_global(half), (x,))
    lowered = tc.convert_fx(made)
    decision = next(d for d in tc.explain(lowered).decisions if d.path == "gru/lowering")
    assert decision.action is Action.REFERENCE
    assert "no instruction for quantized_decomposed.convert_element_type" in decision.reason
    assert torch.equal(lowered(x), tc.convert_to_reference_fx(made)(x))


class Kernels(TorchDispatchMode):
    """Counts the calls of the operator that runs a direction, or a module, over time."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.name().startswith("torchq_compat_native::recurrent")
        return func(*args, **kwargs or {})


@made_once
def lowered_alone() -> tuple[Any, Tensor]:
    """Return a lowered module of two layers and two directions, and an input."""
    rnn, x = nn.LSTM(8, 12, 2, bidirectional=True, dropout=0.5), uniform(1.0, 6, 2, 8)
    prepared = tc.prepare_fx(
        rnn.eval(), get_default_qconfig_mapping(), (x,), tc.get_default_prepare_custom_config()
    )
    calibrate(prepared, [(x,)])
    return tc.convert_fx(prepared), x


@torch.no_grad()
@pytest.mark.parametrize(("change", "calls"), [("none", 1), ("dropout", 4), ("hook", 3)])
def test_what_is_not_one_call_is_one_call_a_direction(change: str, calls: int) -> None:
    """In Python the steps of a direction take thirty times as long."""
    module, x = lowered_alone()
    expected, steps = module(x)[0], []
    lowered = module.get_submodule("module")
    if change == "hook":
        lowered.layers[0].layer_bw.cell.register_forward_hook(lambda *_: steps.append(1))
    elif change == "dropout":
        lowered.train()
    with Kernels() as kernels:
        output = module(x)[0]
    assert (kernels.count, len(steps)) == (calls, 6 * (change == "hook"))
    assert torch.equal(output, expected) == (change != "dropout")
