"""Graphs passed to torchao's prepare are accepted by later torchao versions too."""

from __future__ import annotations

import gc
import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import get_default_qat_qconfig_mapping, get_default_qconfig_mapping
from torch.fx import GraphModule

import torchq_compat as tc
from tests.helpers.oracle import sqnr
from torchq_compat.support import process_state
from torchq_compat.support.graph_nodes import delete_unused_modules
from torchq_compat.support.upstream import graph_sources

#: torchao after 0.18 refuses a graph with one of them: https://github.com/pytorch/ao/pull/4861
REFUSED = (torch.ops.higher_order.wrap_with_set_grad_enabled, torch.ops.higher_order.wrap_with_autocast)


class Blocks(nn.Module):
    """Ops under ``torch.no_grad``, nested, beside a recurrent module."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(8, 4)
        self.lstm = nn.LSTM(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.a(x)
            with torch.enable_grad():
                x = torch.relu(self.b(x))
            y, _ = self.lstm(x)
        return self.c(y)


def refusing(prepare: Callable[..., Any], seen: list[GraphModule]) -> Callable[..., Any]:
    """torchao's ``prepare``, with the check of the release after 0.18."""

    def checked(model: GraphModule, quantizer: Any) -> Any:
        for module in model.modules():
            if isinstance(module, GraphModule):
                assert not [node for node in module.graph.nodes if node.target in REFUSED]
        seen.append(model)
        return prepare(model, quantizer)

    return checked


@pytest.mark.parametrize("is_qat", [False, True])
def test_no_block_is_left_in_a_graph(is_qat: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[GraphModule] = []
    for name in ("prepare_pt2e", "prepare_qat_pt2e"):
        monkeypatch.setattr(process_state.flow, name, refusing(getattr(process_state.flow, name), seen))
    torch.manual_seed(0)
    model, x = Blocks().train(is_qat), torch.randn(5, 3, 6)
    exported = torch.export.export(model, (x,)).module(check_guards=False)
    assert any(node.target in REFUSED for node in exported.graph.nodes)
    mapping = (get_default_qat_qconfig_mapping if is_qat else get_default_qconfig_mapping)("qnnpack")
    prepare = tc.prepare_qat_fx if is_qat else tc.prepare_fx
    # In evaluation nobody needs gradients; in training they flow through the ops under no_grad, as in FX.
    told = pytest.warns(tc.QuantizationWarning, match="no_grad") if is_qat else nullcontext()
    with told:
        prepared = prepare(model, mapping, (x,), tc.get_default_prepare_custom_config())
    assert len(seen) == 2  # the model, and the cell of the LSTM
    prepared(x)
    quantized = {d.path for d in tc.explain(prepared) if d.action in ("quantized", "shared")}
    assert {"a", "b", "c"} <= quantized


class Around(nn.Module):
    """A module in a module; ``None`` calls itself without end."""

    def __init__(self, inner: nn.Module | None) -> None:
        super().__init__()
        self.inner, self.linear = inner, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        inner: Any = self if self.inner is None else self.inner
        result: Tensor = inner(self.linear(x) if self.inner is None else x)
        return result


def nested(inner: nn.Module | None, depth: int) -> nn.Module:
    for _ in range(depth):
        inner = Around(inner)
    assert inner is not None
    return inner.eval()


@pytest.fixture
def limit() -> Iterator[int]:
    """Return a lower recursion limit."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(600)
    yield 600
    sys.setrecursionlimit(before)


def test_modules_nested_deeper_than_the_recursion_limit_lets_torch_export(limit: int) -> None:
    model, x = nested(nn.Linear(8, 8), 80), torch.randn(16, 8)
    mapping = get_default_qconfig_mapping("qnnpack")
    prepared = tc.prepare_fx(model, mapping, (x,))
    prepared(x)
    with torch.no_grad():
        assert 30 < sqnr(model(x), tc.convert_fx(prepared)(x)) < 70
    with pytest.warns(tc.QuantizationWarning, match="RecursionError"):  # Float calls raise it, too.
        tc.prepare_fx(nested(None, 1), mapping, (x,))
    assert sys.getrecursionlimit() == limit


def test_cycles_of_prepare_and_convert_leave_nothing_in_the_process() -> None:
    model, x, sizes = nn.Linear(4, 4).eval(), torch.randn(2, 4), []
    gc.freeze()  # What other tests left is not looked through: that takes seconds.
    for _ in range(4):
        prepared = tc.prepare_fx(model, get_default_qconfig_mapping("qnnpack"), (x,))
        prepared(x)
        kept = tc.convert_fx(prepared)
        gc.collect()
        process_state.forget_sources()
        assert "def forward" in "".join(linecache.getlines(type(kept).forward.__code__.co_filename))
        sizes.append((len(graph_sources.eval_cache), len(linecache.cache)))
    assert sizes[2:] == [sizes[1]] * 2


def test_depths_of_threads_that_overlap() -> None:
    """A deep model keeps its recursion limit when a small one, that began before, ends before it."""
    small, deep, limit = nn.Linear(1, 1), nn.Sequential(), sys.getrecursionlimit()
    for _ in range(200):
        deep = nn.Sequential(deep)
    with ExitStack() as ends_last:
        first = ExitStack()
        first.enter_context(process_state.deep_enough_for(small))
        ends_last.enter_context(process_state.deep_enough_for(deep))
        for_deep = sys.getrecursionlimit()
        first.close()
        ends_last.enter_context(process_state.deep_enough_for(small))
        assert sys.getrecursionlimit() == for_deep > limit
    assert sys.getrecursionlimit() == limit


class Reading(nn.Module):
    """Modules that are called, whose weights are read, that are shared, and that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.called = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
        self.outer = nn.ModuleDict({"read": nn.Linear(4, 4), "unused": nn.Sequential(nn.Linear(4, 4))})
        self.unused = nn.Sequential(nn.Linear(4, 4))
        self.again = self.called[1]

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.called(x)) @ self.outer["read"].weight


def test_unused_modules_are_deleted_as_by_torch() -> None:
    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, m: nn.Module, name: str) -> bool:
            return not isinstance(m, Reading)

    for make in (Reading, lambda: nested(nn.Linear(8, 8), 20)):
        model = make()
        graph = (Tracer() if isinstance(model, Reading) else torch.fx.Tracer()).trace(model)
        ours, theirs = GraphModule(model, graph), GraphModule(model, graph)
        for graph_module in (ours, theirs):
            graph_module.add_submodule("left.over", nn.Sequential(nn.ReLU()))
        assert "left.over.0" in dict(ours.named_modules())
        delete_unused_modules(ours)
        theirs.delete_all_unused_submodules()
        assert [name for name, _ in ours.named_modules()] == [name for name, _ in theirs.named_modules()]
        assert "left.over" not in dict(ours.named_modules())
