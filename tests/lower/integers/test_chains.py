"""Chains: from the second plain call on a lowered model runs its operators in few calls of C++."""

from __future__ import annotations

import copy
import gc
import operator
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import get_default_qconfig_mapping
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import torchq_compat as tc
from tests.helpers.loop_models import LOOPS
from tests.helpers.once import made_once
from tests.helpers.oracle import leaves
from tests.helpers.public_loops import PUBLIC_LOOPS
from torchq_compat.lower.integers import chains
from torchq_compat.recurrent.kernel.build import kernel_build
from torchq_compat.recurrent.kernel.op import OPS, drop_forgotten
from torchq_compat.recurrent.python_loops import OpaqueLoop
from torchq_compat.recurrent.recurrent_module import RecurrentModule

MAPPING = get_default_qconfig_mapping("x86")
RUN_CHAIN = "torchq_compat_native.run_chain.default"


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm, self.fc = nn.BatchNorm2d(8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        x = torch.max_pool2d(torch.nn.functional.hardswish(x + self.norm(self.second(x))), 2)
        return self.fc(torch.flatten(nn.functional.adaptive_avg_pool2d(x, 1), 1))


class Step(nn.Module):
    """A step of an attending decoder: integers, floats between them, and a cell that is called."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell = nn.Embedding(20, 6), nn.LSTMCell(6 + 8, 8)
        self.query, self.out = nn.Linear(8, 8), nn.Linear(16, 20)

    def forward(self, token: Tensor, h: Tensor, c: Tensor, encoded: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights = torch.softmax((encoded * self.query(h).unsqueeze(1)).sum(-1), -1)
        context = (weights.unsqueeze(-1) * encoded).sum(1)
        h, c = self.cell(torch.cat([self.embed(token), context], -1), (h, c))
        return self.out(torch.cat([h, context], -1)), h, c


class Floats(nn.Module):
    """Operators of scalars, dtypes and layouts, and a random one: a chain has none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = torch.add(torch.softmax(x, -1, dtype=torch.float32), x.sum(-1, keepdim=True), alpha=2)
        x = x.reshape(x.shape[0] * 2, -1).contiguous().mul(0.5).view(x.shape[0], -1)
        return self.second(torch.where(x > 10, torch.rand_like(x), x).to(torch.float32))


class Attention(nn.Module):
    """Views of computed sizes around products of floats."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.fc = nn.Linear(8, 24), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows, steps, width = x.shape
        parts = self.project(x).view(rows, steps, 3, 2, width // 2).permute(2, 0, 3, 1, 4).unbind(0)
        weights = torch.softmax(torch.matmul(parts[0], parts[1].transpose(-1, -2)), -1)
        return self.fc(torch.matmul(weights, parts[2]).transpose(1, 2).reshape(rows, steps, width))


def rows(count: int = 3) -> tuple[Tensor, ...]:
    return (torch.randn(count, 8),)


def images(count: int = 2, size: int = 12) -> tuple[Tensor, ...]:
    return (torch.randn(count, 3, size, size),)


def step_of(count: int = 2, length: int = 5) -> tuple[Tensor, ...]:
    states = (torch.randn(count, 8), torch.randn(count, 8))
    return (torch.randint(20, (count,)), *states, torch.randn(count, length, 8))


def sequences(count: int = 2, length: int = 5) -> tuple[Tensor, ...]:
    return (torch.randn(count, length, 8),)


#: Model, its inputs, and other sizes for them.
MODELS: dict[str, tuple[type[nn.Module], Callable[..., tuple[Tensor, ...]], tuple[int, ...]]] = {
    "residual": (Residual, images, (1, 17)),
    "step": (Step, step_of, (4, 9)),
    "floats": (Floats, rows, (5,)),
    "attention": (Attention, sequences, (3, 8)),
}


@made_once
def converted(name: str) -> Any:
    torch.manual_seed(0)
    kind, inputs, _ = MODELS[name]
    model = kind().eval()
    prepared = tc.prepare_fx(model, MAPPING, inputs(), tc.get_default_prepare_custom_config())
    for _ in range(3):
        prepared(*inputs())
    return tc.convert_fx(prepared)


def chained_code(model: Any) -> str:
    graph, numbers = chains.with_chains(model._graph, sums=False)
    for number in numbers:
        OPS.forget_chain.default(number)
    return str(graph.python_code("self").src)


def are_equal(results: Any, expected: Any) -> bool:
    results, expected = ([item] if isinstance(item, Tensor) else item for item in (results, expected))
    return all(map(torch.equal, results, expected)) and len(results) == len(expected)


@pytest.mark.parametrize("name", MODELS)
def test_later_calls_have_the_bits_of_the_graph(name: str) -> None:
    model, (_, inputs, sizes) = converted(name), MODELS[name]
    for args in (inputs(), inputs(), inputs(*sizes), inputs(1)):
        expected = torch.fx.Interpreter(model).run(*args)
        for _ in range(3):
            with torch.no_grad():
                assert are_equal(model(*args), expected)
    assert model._plain_forward._direct not in model._plain_forward._chained.values()


def test_what_has_no_other_operators_between_is_one_chain() -> None:
    assert chained_code(converted("residual")).count(RUN_CHAIN) == 1
    assert "torchq_compat_native.conv" not in chained_code(converted("residual"))
    code = chained_code(converted("step"))
    assert code.count("torch.ops") == code.count(RUN_CHAIN) == 1
    assert "self.cell(0, (0,), ticket = True)" in code


def test_what_a_chain_cannot_have_is_called_between() -> None:
    code = chained_code(converted("floats"))
    for name in ("add.Tensor", "rand_like", "contiguous"):
        assert f"torch.ops.aten.{name}" in code
    assert RUN_CHAIN in code


def test_a_written_state_is_read() -> None:
    model = copy.deepcopy(converted("residual"))
    args = images()
    with torch.no_grad():
        before = [model(*args) for _ in range(3)][-1]
        model.fc.bias.add_(1.0)
        after = model(*args), model(*args)
        expected = torch.fx.Interpreter(model).run(*args)
    assert are_equal(after, (expected, expected))
    assert not torch.equal(before, expected)


def test_what_is_called_around_a_module_of_a_chain_is_called() -> None:
    model, args, seen = copy.deepcopy(converted("step")), step_of(), []
    expected = [model(*args) for _ in range(3)][-1]
    handle = model.cell.register_forward_hook(lambda *_: seen.append("hook"))
    assert are_equal(model(*args), expected)
    handle.remove()
    with torch.no_grad():
        model.cell.cell.igates.bias.add_(1.0)
    after = model(*args), model(*args)
    assert seen == ["hook"]
    assert are_equal(after[0], after[1])
    assert not torch.equal(after[0][1], expected[1])
    assert are_equal(after[0], torch.fx.Interpreter(model).run(*args))


def test_gradients_pass_the_floats_as_in_the_graph() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.sin(torch.mul(y, self.fc(x))).cumsum(-1)

    args = (torch.randn(3, 4), torch.randn(3, 4))
    prepared = tc.prepare_fx(
        Scaled().eval(), get_default_qconfig_mapping("x86").set_object_type(torch.mul, None), args
    )
    prepared(*args)
    model, gradients = tc.convert_fx(prepared), []
    for _ in range(3):
        y = args[1].clone().requires_grad_()
        (model(args[0], y) * torch.arange(4.0)).sum().backward()
        gradients.append(y.grad)
    assert chained_code(model).count(RUN_CHAIN) == 1
    # Of a result of the layer that is zero, as integers may be, none.
    assert (gradients[0] != 0).double().mean() > 0.8
    assert are_equal(gradients[1:], gradients[:1] * 2)


def test_who_watches_operators_sees_each() -> None:
    model, args = converted("residual"), images()
    model(*args), model(*args)
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watch():
        model(*args)
    assert seen.count("torchq_compat_native.convolution.default") == 2
    assert RUN_CHAIN not in seen
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        model(*args)
    names = [event.name for event in profiled.events()]
    assert names.count("torchq_compat_native::convolution") == 2
    assert "torchq_compat_native::run_chain" not in names
    watched = torch.func.vmap(model, randomness="same")(torch.stack([args[0], args[0]]))
    assert torch.equal(watched[0], model(*args))


def test_an_index_out_of_range_is_an_error_of_ours_each_time() -> None:
    model, args = converted("step"), step_of()
    for _ in range(3):
        model(*args)
    with pytest.raises((tc.errors.CallError, IndexError), match="index out of range"):
        model(torch.full((2,), 20), *args[1:])
    assert are_equal(model(*args), torch.fx.Interpreter(model).run(*args))


def test_threads_may_call_a_model_from_the_first_call_on() -> None:
    model, args = copy.deepcopy(converted("residual")), images()
    expected = torch.fx.Interpreter(model).run(*args)
    with ThreadPoolExecutor(8) as pool:
        assert all(are_equal(result, expected) for result in pool.map(lambda _: model(*args), range(64)))


def test_chains_are_forgotten_with_their_model() -> None:
    model, args = copy.deepcopy(converted("residual")), images()
    model(*args), model(*args)
    (number,) = [
        node.args[2]
        for node in chains.with_chains(model._graph, sums=False)[0].nodes
        if node.name == "run_chain_default"
    ]
    OPS.forget_chain.default(number)
    before = number - 1  # That of the model.
    with pytest.raises(RuntimeError, match="given other values"):
        OPS.run_chain.default([torch.ones(1)], [], before)
    del model
    gc.collect()
    drop_forgotten()
    with pytest.raises(RuntimeError, match="no such chain"):
        OPS.run_chain.default([torch.ones(1)], [], before)


@made_once
def converted_loop(name: str) -> Any:
    case = {**PUBLIC_LOOPS, **LOOPS}[name]
    settings = tc.get_default_prepare_custom_config()
    prepared = tc.prepare_fx(case.model(), MAPPING, case.inputs(3), prepare_custom_config=settings)
    for seed in range(2):
        prepared(*case.inputs(6, 4, seed=seed))
    return tc.convert_fx(prepared)


def loops_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, OpaqueLoop)]


@pytest.mark.parametrize("name", ["backward", "teacher_forcing", "two_passes", "phased_lstm"])
def test_a_loop_whose_step_is_a_chain_is_one_call(name: str) -> None:
    model, case = converted_loop(name), {**PUBLIC_LOOPS, **LOOPS}[name]
    for sizes in ((3, 2), (1, 3), (7, 1)):
        args, results = case.inputs(*sizes, seed=1), []
        for has_gradients in (True, True, False, True):
            with torch.set_grad_enabled(has_gradients):
                results.append(leaves(model(*args)))
        # The first call of a size goes step by step.
        assert all(are_equal(result, results[0]) for result in results[1:])
    chained = [loop.step._plain_forward._loop for loop in loops_of(model)]
    assert len(chained) == (2 if name == "two_passes" else 1)
    assert all(loop.given is not None for loop in chained)


def test_a_loop_goes_step_by_step_where_somebody_watches() -> None:
    model, case, seen = copy.deepcopy(converted_loop("backward")), LOOPS["backward"], []
    args = case.inputs(5)
    expected = [model(*args) for _ in range(3)][-1]
    (loop,) = loops_of(model)
    cell = next(module for module in loop.step.modules() if isinstance(module, RecurrentModule))
    handle = cell.register_forward_hook(lambda *_: seen.append("hook"))
    assert are_equal(model(*args), expected)
    assert seen == ["hook"] * 5
    handle.remove()
    assert are_equal(model(*args), expected)
    assert len(seen) == 5


def test_a_state_that_changes_its_shape_is_refused() -> None:
    (number,) = chains.with_chains(converted("residual")._graph, sums=False)[1]
    with pytest.raises(RuntimeError, match="other tensors"):
        OPS.run_loop.default([torch.ones(2)], [], number, [], 2, [], [0], [], [])
    OPS.forget_chain.default(number)
    number = OPS.bind_chain.default("1 2 0 aten::cat default 2 L n2 t0 t0 I i0 1 1 0 1 0 end 1")
    with pytest.raises(RuntimeError, match="changes its shape"):
        OPS.run_loop.default([torch.ones(2)], [], number, [], 2, [1], [0], [], [])
    OPS.forget_chain.default(number)


@pytest.mark.parametrize(
    "text", ["", "1", "1 2 0 quantize t0", "1 2 0 aten::relu default 1 Q t0 1 1 0 1 0 end 1"]
)
def test_a_text_that_is_no_chain_is_refused(text: str) -> None:
    assert kernel_build().library is not None  # Loads the operators.
    with pytest.raises((RuntimeError, ValueError)):
        OPS.bind_chain.default(text)


def test_sums_of_floats_are_in_a_chain_where_nothing_has_gradients() -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            z = torch.rsub(torch.sub(self.fc(x), torch.sin(y), alpha=3), 1.5)
            return torch.add(z, 2.25).masked_fill(y > 0.5, 7.0) * 0.1

    args = (torch.randn(3, 4), torch.randn(3, 4))
    mapping = get_default_qconfig_mapping("x86")
    for function in (torch.add, torch.sub, torch.rsub, torch.mul, operator.mul):
        mapping.set_object_type(function, None)
    prepared = tc.prepare_fx(Sums().eval(), mapping, args)
    prepared(*args)
    model = tc.convert_fx(prepared)
    expected = torch.fx.Interpreter(model).run(*args)
    for has_gradients in (False, False, True, True):
        with torch.set_grad_enabled(has_gradients):
            assert torch.equal(model(*args), expected)
    y = args[1].clone().requires_grad_()
    model(args[0], y).sum().backward()
    assert y.grad.abs().max() > 0
    graph, numbers = chains.with_chains(model._graph, sums=True)
    assert str(graph.python_code("self").src).count("torch.ops") == len(numbers) == 1
    OPS.forget_chain.default(numbers[0])
