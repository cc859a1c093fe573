"""Loops over time in Python: one copy of the nodes for any length, or a fixed length and a warning."""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.quantization import (
    QConfigMapping,
    disable_observer,
    get_default_qat_qconfig_mapping,
    get_default_qconfig,
    get_default_qconfig_mapping,
)

import torchq_compat as tc
from tests.helpers.loop_models import LOOPS, LoopCase
from tests.helpers.once import made_once
from tests.helpers.oracle import calibrate, leaves, sqnr
from tests.helpers.plain_loops import check_against_plain_loops, with_plain_loops
from torchq_compat.errors import InputError, QuantizationWarning
from torchq_compat.support.decisions import Action

MAPPING = get_default_qconfig_mapping("x86")
ROLLED = sorted(name for name, case in LOOPS.items() if case.loops)
FIXED = sorted(name for name, case in LOOPS.items() if not case.loops)


def prepared_model(case: LoopCase, model: nn.Module, steps: int = 6, mapping: Any = MAPPING) -> Any:
    settings = tc.get_default_prepare_custom_config()
    return tc.prepare_fx(model, mapping, case.inputs(steps), prepare_custom_config=settings)


@made_once
def prepared_loop(name: str) -> tuple[nn.Module, Any]:
    """Return the float model and the prepared one."""
    case = LOOPS[name]
    model = case.model()
    with pytest.warns(QuantizationWarning, match="grow with") if name == "counts" else nullcontext():
        return model, prepared_model(case, model)


def node_count(model: Any) -> int:
    return sum(len(m.graph.nodes) for m in model.modules() if isinstance(m, torch.fx.GraphModule))


def check_rolled(name: str) -> None:
    case = LOOPS[name]
    model, prepared = prepared_loop(name)
    assert [path for path, _ in prepared.named_children() if path.startswith("loop")] == [
        "loop",
        "loop_1",
    ][: case.loops]
    calibrate(prepared, [case.inputs(9, seed=seed) for seed in range(6)])
    reference, converted = tc.convert_to_reference_fx(prepared), tc.convert_fx(prepared)
    for steps, batch in ((2, 1), (5, 3), (23, 2)):
        args = case.inputs(steps, batch, seed=steps)
        looped = with_plain_loops(reference, model)(*args) if name != "elman" else reference(*args)
        for each in (reference, converted):
            check_against_plain_loops(model(*args), each(*args), looped)
    quantized = {d.path for d in tc.explain(converted) if d.action is Action.QUANTIZED}
    assert quantized & {path for path, module in model.named_modules() if path and not module._modules}


def test_a_rolled_loop() -> None:
    check_rolled("over_columns")


@pytest.mark.filterwarnings("ignore:.*its values grow", "ignore:.*near a threshold")
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ROLLED if name != "over_columns"])
def test_every_rolled_loop(name: str) -> None:
    check_rolled(name)


@pytest.mark.filterwarnings("ignore:.*its values grow", "ignore:.*near a threshold")
@pytest.mark.slow
@pytest.mark.parametrize("name", ROLLED)
def test_the_exported_form(name: str) -> None:
    case = LOOPS[name]
    _, prepared = prepared_loop(name)
    calibrate(prepared, [case.inputs(9, seed=seed) for seed in range(3)])
    reference = tc.convert_to_reference_fx(prepared)
    program = tc.export(reference, case.inputs(6))
    for steps, batch in ((4, 3), (17, 2)):
        args = case.inputs(steps, batch, seed=steps)
        pairs = zip(leaves(reference(*args)), leaves(program.module()(*args)), strict=True)
        assert all(torch.equal(*pair) for pair in pairs)
    longer = tc.export(reference, case.inputs(12))
    assert len(longer.graph.nodes) == len(program.graph.nodes)


@pytest.mark.slow
def test_as_many_nodes_at_any_length() -> None:
    case = LOOPS["greedy"]
    counts = set()
    for steps in (3, 14):
        prepared = prepared_model(case, case.model(), steps)
        calibrate(prepared, [case.inputs(9)])
        counts.add((node_count(prepared), node_count(tc.convert_to_reference_fx(prepared))))
    assert len(counts) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ROLLED)
def test_without_observers_it_is_the_float_model(name: str) -> None:
    case = LOOPS[name]
    model = case.model()
    prepared = prepared_model(case, model, mapping=QConfigMapping())
    for steps in (1, 2, 8, 31):
        args = case.inputs(steps, 3, seed=steps)
        if name == "into_a_buffer" and steps == 1:
            continue
        for pair in zip(leaves(model(*args)), leaves(prepared(*args)), strict=True):
            torch.testing.assert_close(*pair)


def test_what_is_no_such_loop_is_fixed_and_said() -> None:
    check_fixed("looks_back", "(for t in range(x.size(1)):) is written out")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FIXED if name != "looks_back"])
def test_every_other_loop_is_fixed_and_said(name: str) -> None:
    check_fixed(name, "written out for the length")


def check_fixed(name: str, reason: str) -> None:
    case = LOOPS[name]
    model = case.model()
    with pytest.warns(UserWarning, match=r"is fixed: at 6 by loop_models\.py"):
        prepared = prepared_model(case, model)
    [told] = [d for d in tc.explain(prepared) if d.kind == "loop over time"]
    assert "loop_models.py" in told.reason
    assert reason in told.reason
    args = case.inputs(6, 3)
    torch.testing.assert_close(leaves(prepared(*args))[0], leaves(model(*args))[0])
    with pytest.raises(InputError, match="is fixed to 6 there"):
        prepared(*case.inputs(7))


@pytest.mark.slow
def test_a_step_keeps_the_rules_of_its_modules() -> None:
    case = LOOPS["over_columns"]
    mapping = QConfigMapping().set_module_name("cell", get_default_qconfig("x86"))
    prepared = prepared_model(case, case.model(), mapping=mapping)
    calibrate(prepared, [case.inputs(9)])
    actions = {d.path: d.action for d in tc.explain(tc.convert_to_reference_fx(prepared)) if not d.node}
    assert actions["cell"] is Action.QUANTIZED
    assert actions.get("output", Action.FLOAT) is Action.FLOAT


def test_its_state_is_saved_and_loaded() -> None:
    case = LOOPS["over_columns"]
    _, prepared = prepared_loop("over_columns")
    other = copy.deepcopy(prepared)
    calibrate(prepared, [case.inputs(9)])
    other.load_state_dict(prepared.state_dict())
    args = case.inputs(5)
    first, second = (tc.convert_to_reference_fx(each) for each in (prepared, other))
    assert torch.equal(first(*args)[0], second(*args)[0])
    # One set of observers, and one set of int8 weights.
    weights = [name for name, value in first.state_dict().items() if value.dtype is torch.int8]
    assert len(weights) == 3
    assert all(name.startswith("loop.step.") for name in weights)


def test_it_computes_what_its_step_does_in_a_plain_loop() -> None:
    case = LOOPS["over_columns"]
    _, prepared = prepared_loop("over_columns")
    calibrate(prepared, [case.inputs(9)])
    reference = tc.convert_to_reference_fx(prepared)
    (x,) = case.inputs(17, 3)
    h, outputs = torch.zeros(3, 8), []
    for t in range(17):
        h, output = reference.loop.step(h, x[:, t])
        outputs.append(output)
    found = reference(x)
    assert torch.equal(found[0], torch.stack(outputs, 1))
    assert torch.equal(found[1], h)
    # Modules inside the loop are reachable by the paths of the user's model.
    assert reference.get_submodule("cell") is reference.loop.step.cell


@pytest.mark.slow
def test_it_is_trained() -> None:
    case = LOOPS["over_columns"]
    model = case.model().train()
    settings = tc.get_default_prepare_custom_config()
    prepared = tc.prepare_qat_fx(
        model, get_default_qat_qconfig_mapping("x86"), case.inputs(6), prepare_custom_config=settings
    )
    optimizer = torch.optim.Adam(prepared.parameters(), lr=0.02)
    args, losses = case.inputs(9), []
    target = torch.randn(2, 9, 20, generator=torch.Generator().manual_seed(1)) * 0.3
    for _ in range(30):
        optimizer.zero_grad()
        loss = (prepared(*args)[0] - target).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    # Otherwise the observers move on, even in evaluation.
    prepared.eval().apply(disable_observer)
    converted = tc.convert_fx(prepared)
    assert sqnr(prepared(*args)[0].detach(), converted(*args)[0]) > 45
    assert converted(*case.inputs(4))[0].shape == (2, 4, 20)


def test_nothing_is_said_of_a_model_without_loops() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", QuantizationWarning)
        prepared = tc.prepare_fx(
            nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), MAPPING, (torch.ones(2, 4),)
        )
    assert not [d for d in tc.explain(prepared) if d.kind == "loop over time"]
