"""The operator: one call per module, with packed weights inside and integers at its boundary."""

from __future__ import annotations

import copy
import gc
import math
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.ao.quantization.quantize_fx as fx
from torch import Tensor, nn
from torch.ao.quantization import get_default_qconfig_mapping
from torch.fx import GraphModule

import torchq_compat as tc
from tests.helpers.cell_loop_shared import X_QPARAMS, on
from tests.helpers.converted_cells import converted
from tests.helpers.lstm_flow import uniform
from tests.helpers.once import made_once
from tests.helpers.oracle import CONVERT_LSTM, MAP_LSTM, leaves, sqnr
from torchq_compat.errors import CallError, CustomModuleError
from torchq_compat.read.qparams import PerTensorQParams
from torchq_compat.recurrent.kernel import op
from torchq_compat.recurrent.kernel.build import kernel_build
from torchq_compat.recurrent.kernel.interpreter import run_by_operators
from torchq_compat.recurrent.kernel.program import Boundary, ModuleNumbers, qparams_row
from torchq_compat.support.process_state import once

OPS = torch.ops.torchq_compat_native
State = tuple[Tensor, Tensor]


class Decoder(nn.Module):
    """The module between quantized ops, as in FX: quantize, quantized LSTM, quantized linear, dequantize."""

    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 24, layers)
        self.head = nn.Linear(24, 5)

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        output, state = self.lstm(x, state)
        return self.head(output), state


class WithoutTuples(Decoder):
    """FX observes every argument, and its observers do not accept tuples."""

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        output, (h, c) = super().forward(x, (h, c))
        return output, h, c


def arguments(steps: int = 3, batch: int = 2, layers: int = 1) -> tuple[Tensor, State]:
    return uniform(2.0, steps, batch, 16), (uniform(0.5, layers, batch, 24), uniform(0.7, layers, batch, 24))


@made_once
def decoder(layers: int) -> tuple[GraphModule, GraphModule]:
    """Return (reference, lowered)."""
    model = Decoder(layers).eval()
    made = tc.prepare_fx(model, get_default_qconfig_mapping(), arguments(layers=layers), MAP_LSTM)
    for _ in range(3):
        made(*arguments(9, 4, layers))
    return tc.convert_to_reference_fx(made), tc.convert_fx(made)


def conversions(graph: Any, *words: str) -> int:
    return sum(any(word in str(node.target) for word in words) for node in graph.nodes)


@torch.no_grad()
def test_no_more_conversions_than_in_the_graph_that_fx_lowers() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x, state = arguments()
        legacy = fx.prepare_fx(WithoutTuples().eval(), get_default_qconfig_mapping(), (x, *state), MAP_LSTM)
        legacy(x, *state)
        by_fx = fx.convert_fx(legacy, CONVERT_LSTM).graph
    ours = decoder.itself(1)[1].graph
    assert (conversions(by_fx, "quantize_per_tensor"), conversions(by_fx, "dequantize")) == (3, 3)
    # Values that are float outside are quantized and dequantized inside the call.
    assert conversions(ours, "quantize_per_tensor", "native.quantize") == 0
    assert conversions(ours, "dequantize") == 1


@torch.no_grad()
@pytest.mark.parametrize("layers", [1, 2])
def test_integers_across_the_boundary_change_no_result(layers: int) -> None:
    reference, lowered = decoder.itself(layers)
    for steps, batch in ((3, 2), (1, 1), (40, 5)):
        given = arguments(steps, batch, layers)
        for expected, found in zip(leaves(reference(*given)), leaves(lowered(*given)), strict=True):
            assert sqnr(expected, found) > 38


@torch.no_grad()
def test_arguments_nested_in_another_way_are_refused() -> None:
    _, lowered = decoder.itself(1)
    x, (h, c) = arguments()
    for wrong in ((x, torch.stack([h, c])), ((x, h), c), (x, (h, c, c)), (x, (h, (c,)))):
        with pytest.raises((CallError, CustomModuleError), match="Hint: "):
            lowered(*wrong)
    assert len(leaves(lowered(x, [h, c]))) == 3


def kept() -> int:
    """Return how many modules have packed weights."""
    assert kernel_build().is_loaded
    op.drop_forgotten()
    count: int = OPS.kept.default()
    return count


def kept_in_the_end() -> int:
    """Return the same, after modules that nothing refers to are collected."""
    gc.collect()
    return kept()


@torch.no_grad()
def test_packed_weights_are_kept_while_they_are_true_and_no_longer() -> None:
    module: Any = converted("lstm")
    lowered = module.lowered()
    x = on(X_QPARAMS, uniform(2.0, 5, 3, 8))
    before = kept_in_the_end()
    first = leaves(lowered(x))
    assert kept() == before + 1
    for _ in range(3):
        assert all(map(torch.equal, leaves(lowered(x)), first))
    assert kept() == before + 1
    bias = next(value for name, value in module.state_dict().items() if "bias" in name)
    bias.add_(0.5)
    second = leaves(lowered(x))
    assert not torch.equal(second[0], first[0])
    assert sqnr(leaves(module(x))[0], second[0]) > 45
    assert kept() == before + 1
    copied = copy.deepcopy(lowered)
    assert all(map(torch.equal, leaves(copied(x)), second))
    assert kept() == before + 2
    del module, lowered, copied
    assert kept_in_the_end() == before


class FedBack(nn.Module):
    """A cell called at several places; the inputs of all calls but the first have the same qparams."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(16, 24)
        self.heads = nn.ModuleList([nn.Linear(24, 16) for _ in range(7)])

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Tensor:
        given = []
        for head in self.heads:
            h, c = self.cell(x, (h, c))
            x = head(h)
            given.append(x)
        return torch.stack(given)


@torch.no_grad()
def test_a_call_is_bound_once_for_every_place_in_the_graph() -> None:
    example = (uniform(2.0, 3, 16), uniform(0.5, 3, 24), uniform(0.7, 3, 24))
    made = tc.prepare_fx(
        FedBack().eval(), get_default_qconfig_mapping(), example, tc.get_default_prepare_custom_config()
    )
    made(*example)
    before = kept_in_the_end()
    lowered = tc.convert_fx(made)  # A trial calls every place once.
    first = lowered(*example)
    assert sqnr(lowered.reference(*example), first) > 45
    places = kept() - before
    # The last call hands no cell state on, as integers; the first takes the states of the user.
    assert places == 3
    module: Any = lowered.cell
    tickets = [call.ticket for call in module._direct.values()]
    assert len(set(tickets)) == 7
    for _ in range(3):
        assert torch.equal(lowered(*example), first)
    assert [call.ticket for call in module._direct.values()] == tickets
    assert kept() - before == places
    bias = next(value for name, value in lowered.state_dict().items() if "cell" in name and "bias" in name)
    bias.add_(0.2)
    second = lowered(*example)
    assert sqnr(first, second) < 20
    assert sqnr(lowered.reference(*example), second) > 45
    assert kept() - before == places
    del lowered, module, made, bias
    assert kept_in_the_end() == before


@torch.no_grad()
def test_a_bound_call_is_the_call_and_what_is_not_bound_is_refused() -> None:
    bound = converted("lstm").lowered().bound()
    states = [uniform(0.5, len(bound.bound), 2, 12) for _ in range(2)]
    boundary = [1.0, 8.0, *qparams_row(X_QPARAMS), *[0.0] * 5]
    x = uniform(2.0, 3, 2, 8)
    expected = OPS.recurrent.default(
        x, states, bound.weights(), bound.program, boundary, [], bound.directions, False
    )
    ticket = op.bind_call(bound.weights(), bound.program, boundary, bound.owner, 0)
    run = op.bound_operator()
    assert all(map(torch.equal, run(x, states, ticket, False, op.WORK_PER_THREAD), expected))
    for wrong in ((x.double(), states), (x[..., :7], states), (x, states[:1])):
        with pytest.raises(RuntimeError, match="torchq_compat_native::recurrent"):
            run(*wrong, ticket, False, op.WORK_PER_THREAD)
    with pytest.raises(RuntimeError, match="has an owner"):
        op.bind_call(bound.weights(), bound.program, boundary, 0, 0)
    newer = op.bind_call(bound.weights(), bound.program, boundary, bound.owner, 1)
    with pytest.raises(RuntimeError, match="no such call is bound"):
        run(x, states, ticket, False, op.WORK_PER_THREAD)
    assert all(map(torch.equal, run(x, states, newer, False, op.WORK_PER_THREAD), expected))
    asked = uniform(2.0, 3, 2, 8).requires_grad_()
    with torch.enable_grad():
        assert not run(asked, states, newer, False, op.WORK_PER_THREAD)[0].requires_grad


def test_an_operator_is_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would warn of a second time; calls of modules and chains of operators use the same."""
    assert kernel_build().is_loaded
    registered: list[str] = []
    monkeypatch.setattr(op, "kernel_operator", once(op.kernel_operator.__wrapped__))  # type: ignore[attr-defined]
    monkeypatch.setattr(op._IMPLEMENTED, "impl", lambda name, *_: registered.append(name))
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(op.kernel_operator, ["recurrent_bound", "run_chain"] * 8))
    assert found == {OPS.recurrent_bound.default, OPS.run_chain.default}
    assert op.bound_operator.__wrapped__() == OPS.recurrent_bound.default._op  # type: ignore[attr-defined]
    assert sorted(registered) == ["recurrent_bound", "run_chain"]


def test_weights_made_in_inference_mode_are_looked_at_in_the_operator() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.LSTM(8, 12)).eval(), uniform(2.0, 3, 2, 8)
    with torch.inference_mode():
        made: Any = tc.quantize_dynamic(model, {nn.LSTM}, whole_range=True)
        first = leaves(made(x))
        assert all(map(torch.equal, leaves(made(x)), first))
        assert made[0]._direct[None, ()].bound_to is None
        weight = next(value for name, value in made.named_buffers() if value.dtype is torch.int8)
        assert weight.is_inference()
        weight.neg_()
        changed = leaves(made(x))[0]
        assert sqnr(first[0], changed) < 20
        assert torch.equal(leaves(copy.deepcopy(made)(x))[0], changed)
    assert all(map(torch.equal, leaves(tc.quantize_dynamic(model, {nn.LSTM}, whole_range=True)(x)), first))


@torch.no_grad()
def test_threads_share_one_module() -> None:
    lowered: Any = converted.itself("gru").lowered()
    inputs = [on(X_QPARAMS, uniform(2.0, 1 + i, 1 + i % 3, 8)) for i in range(6)]
    expected = [leaves(lowered(x)) for x in inputs]
    faults: list[int] = []

    def run(index: int) -> None:
        for _ in range(40):
            found = leaves(lowered(inputs[index]))
            if not all(map(torch.equal, found, expected[index])):
                faults.append(index)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


@torch.no_grad()
@pytest.mark.parametrize("form", ["steps", "batch first", "packed", "integers"])
@pytest.mark.parametrize("name", ["lstm", "projected lstm", "16-bit lstm", "gru", "relu rnn"])
def test_torchs_operators_compute_the_same(name: str, form: str) -> None:
    """The fallback without a compiler, on the operator's own arguments."""
    bound = converted.itself(name).lowered().bound()
    module = ModuleNumbers.of(bound.program)
    qparams = PerTensorQParams(1 / 100, 3, -128, 127, torch.int8)
    x = on(X_QPARAMS, uniform(2.0, 7, 4, 8))
    widths = [slot.width for slot in bound.bound[0].program.slots[1 : 1 + bound.states]]
    states = [uniform(0.9, len(bound.bound), 4, width) for width in widths]
    rows = (qparams_row(qparams),)
    integers = (qparams_row(qparams),) if form == "integers" else (None,)
    around = Boundary(
        (8.0, *qparams_row(X_QPARAMS)), (rows,) * bound.states, integers * (1 + bound.states)
    ).numbers()
    sizes: list[int] = []
    if form == "packed":
        sizes = [4, 4, 2, 1, 1]
        x = x.flatten(0, 1)[: sum(sizes)].contiguous()
    elif form == "batch first":
        x = x.transpose(0, 1).contiguous()
    elif form == "integers":
        x = X_QPARAMS.quantize(x)
        states = [qparams.quantize(state) for state in states]
    first = (x, states, bound.weights(), bound.program, around, sizes)
    is_turned = form == "batch first"
    found = OPS.recurrent.default(*first, bound.directions, is_turned)
    expected = run_by_operators(*first, batch_first=is_turned)
    assert len(module.layers) * bound.directions == len(bound.bound)
    for a, b in zip(expected, found, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert sqnr(a.float(), b.float()) > 30


def wrong_programs(program: Tensor) -> list[Tensor]:
    """Return invalid LSTM programs: 3 numbers, 3 for the first cell, 11 per instruction, 3 per register."""
    first, second, registers = 6, 6 + 11, 6 + 11 * int(program[4])
    changes = [
        *({0: math.nan}, {0: 1e300}, {3: math.inf}),
        {first + 1: 1},  # a state is written
        {second + 1: 3},  # a register is written twice
        {second + 2: 9},  # what is not written yet is read
        {first + 9: 0, registers + 3 * 3 + 2: 0},  # a linear of x in every step
    ]
    wrong = []
    for change in changes:
        wrong.append(program.clone())
        for at, value in change.items():
            wrong[-1][at] = value
    return wrong


@pytest.mark.parametrize(
    "wrong", ["x", "states", "weights", "program", "boundary", "directions", "batch_sizes"]
)
def test_the_operator_reads_no_memory_that_is_not_there(wrong: str) -> None:
    bound = converted.itself("lstm").lowered().bound()
    states = [torch.zeros(len(bound.bound), 2, 12)] * 2
    boundary = [1.0, 8.0, *qparams_row(X_QPARAMS), *[0.0] * 5]
    given: dict[str, Any] = {
        "x": torch.zeros(3, 2, 8),
        "states": states,
        "weights": bound.weights(),
        "program": bound.program,
        "boundary": boundary,
        "batch_sizes": [],
        "directions": bound.directions,
    }
    OPS.recurrent.default(*given.values(), False)
    broken = bound.program.clone()
    changes: dict[str, list[Any]] = {
        "x": [
            torch.zeros(3, 2, 7),
            torch.zeros(2, 8),
            torch.zeros(3, 2, 8).double(),
            torch.zeros(3, 2, 8).byte()[0],
        ],
        "states": [states[:1], [states[0], states[1][:1]], [states[0][:, :1]] * 2],
        "weights": [bound.weights()[:-1], bound.weights()[1:], [w[:1] for w in bound.weights()]],
        "program": [
            *(broken[:-1], broken[:40], broken.float(), -broken, broken + 1),
            *wrong_programs(broken),
        ],
        "boundary": [[], boundary[:-1], [*boundary, 1.0], [1.0, 7.0, *boundary[2:]]],
        "directions": [7],
        "batch_sizes": [[3, 3], [1, 2], [0, 3]],
    }
    for value in changes[wrong]:
        with pytest.raises(RuntimeError, match="torchq_compat_native::recurrent"):
            OPS.recurrent.default(*(given | {wrong: value}).values(), False)


def test_one_zero_is_no_sizes_and_other_weights_at_the_same_place_are_packed_again() -> None:
    """AOTInductor passes no empty list, and its weights lie in memory that no tensor owns."""
    bound = converted.itself("lstm").lowered().bound()
    states = [torch.zeros(len(bound.bound), 2, 12)] * 2
    memory = [bytearray(weight.detach().numpy().tobytes()) for weight in bound.weights()]
    weights = [
        torch.frombuffer(bytes_of, dtype=weight.dtype).view(weight.shape)
        for bytes_of, weight in zip(memory, bound.weights(), strict=True)
    ]
    boundary = [1.0, 8.0, *qparams_row(X_QPARAMS), *[0.0] * 5]
    x = uniform(2.0, 3, 2, 8)

    def run(weights: list[Tensor], sizes: list[int]) -> list[Tensor]:
        arguments = (x, states, weights, bound.program, boundary, sizes, bound.directions, False)
        found: list[Tensor] = OPS.recurrent.default(*arguments)
        return found

    before, expected = run(weights, [0]), run(bound.weights(), [])
    assert all(map(torch.equal, before, expected))
    versions = [weight._version for weight in weights]
    for bytes_of in memory:
        if len(bytes_of) > 200:
            bytes_of[:] = bytes_of[::-1]
    assert [weight._version for weight in weights] == versions
    after, expected = run(weights, [0]), run([weight.clone() for weight in weights], [0])
    assert all(map(torch.equal, after, expected))
    assert not torch.equal(after[0], before[0])
