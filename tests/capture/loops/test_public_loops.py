"""Loops in the shapes of public code are rolled: by what they compute, not by the modules in them."""

from __future__ import annotations

import pytest
import torch
from torch.ao.quantization import QConfigMapping, get_default_qconfig_mapping
from torch.fx import GraphModule

import torchq_compat as tc
from tests.helpers.once import made_once
from tests.helpers.oracle import calibrate, leaves, sqnr
from tests.helpers.public_loops import PUBLIC_LOOPS

#: Those that most of what is special in the others meets.
QUICK = (
    "scan_in_a_function",
    "packed_encoder",
    "raw_lstm",
    "every_second",
    "writes_parts",
    "with_variable",
    "phased_lstm",
    "both_directions",
    "two_passes",
)
#: The model -> the number of its loops, where that is not 1.
LOOPS = {"both_directions": 3, "two_passes": 2}
#: The least SQNR in dB of the converted model, where that is not 20: a decision of one step changes all
#: later ones; integers; layer norms over 8 values; an exponential of exponentials; a last state by itself.
LEAST = {
    "pointer_network": 2,
    "pointer_in_place": 2,
    "writes_steps": 3,
    "cell_of_ones_own": 8,
    "euler_steps": 10,
    "raw_lstm": 15,
    "phased_lstm": 12,
}


@made_once
def prepared_at(name: str, steps: int) -> GraphModule:
    case, settings = PUBLIC_LOOPS[name], tc.get_default_prepare_custom_config()
    return tc.prepare_fx(case.model(), QConfigMapping(), case.inputs(steps), prepare_custom_config=settings)


def check(name: str) -> None:
    case, prepared = PUBLIC_LOOPS[name], prepared_at.itself(name, 6)
    model = case.model()
    rolled = [path for path, _ in prepared.named_children() if path.startswith("loop")]
    assert len(rolled) == LOOPS.get(name, 1)
    for steps, batch in ((2, 1), (3, 3), (13, 2), (31, 3)):
        args = case.inputs(steps, batch, seed=steps)
        for pair in zip(leaves(model(*args)), leaves(prepared(*args)), strict=True):
            torch.testing.assert_close(*pair)


def check_quantized(name: str) -> None:
    case = PUBLIC_LOOPS[name]
    model, settings = case.model(), tc.get_default_prepare_custom_config()
    mapping = get_default_qconfig_mapping("x86")
    prepared = tc.prepare_fx(model, mapping, case.inputs(6), prepare_custom_config=settings)
    calibrate(prepared, [case.inputs(9, 8, seed=seed) for seed in range(6)])
    converted = tc.convert_fx(prepared)
    args = case.inputs(12, 3, seed=1)
    pairs = list(zip(leaves(model(*args)), leaves(converted(*args)), strict=True))
    assert all(sqnr(one, other) > LEAST.get(name, 20) for one, other in pairs if one.is_floating_point())


@pytest.mark.parametrize("name", QUICK)
def test_a_public_loop(name: str) -> None:
    check(name)


@pytest.mark.filterwarnings("ignore:dimension 1")
@pytest.mark.parametrize("steps", [1, 6])
def test_an_assertion_on_values_is_left_out_and_said(steps: int) -> None:
    [told] = [d for d in tc.explain(prepared_at.itself("writes_parts", steps)) if d.kind == "assert"]
    assert "public_loops.py" in told.reason
    assert "assert not torch.isnan(state).any()" in told.reason


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*PUBLIC_LOOPS} - {*QUICK}))
def test_every_public_loop(name: str) -> None:
    check(name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*its values grow", "ignore:.*near a threshold")
@pytest.mark.parametrize("name", sorted(PUBLIC_LOOPS))
def test_every_public_loop_quantized(name: str) -> None:
    check_quantized(name)
