"""Under ``run`` code that walks the graph of one of our models is told that it finds no layers there."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.ao.quantization import get_default_qconfig_mapping
from torch.fx.passes.split_module import split_module

from torchq_compat import (
    convert_fx,
    explain,
    get_default_convert_custom_config,
    get_default_prepare_custom_config,
    prepare_fx,
)
from torchq_compat.errors import ConvertError, ExportError, InputError, QuantizationWarning
from torchq_compat.model import other_tools as graph_readers

X = torch.randn(3, 4)


@pytest.fixture
def under_run() -> Iterator[None]:
    graph_readers.tell_graph_readers()
    yield
    graph_readers._TELLS.clear()


@pytest.mark.usefixtures("under_run")
def test_who_walks_a_graph_is_told_at_the_line() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", QuantizationWarning)
        prepared = prepare_fx(nn.Sequential(nn.Linear(4, 2)).eval(), get_default_qconfig_mapping("x86"), (X,))
        prepared(X)
        copied = copy.deepcopy(prepared)
        converted = convert_fx(copied)
        explain(converted)
        torch.jit.trace(converted, X)  # type: ignore[no-untyped-call]
        torch.export.export(converted, (X,))
        print(prepared.graph, converted)
    for stage, model in (("prepared", prepared), ("converted", converted)):
        with pytest.warns(QuantizationWarning, match=f"graph of a {stage} model is torch.export's") as told:
            found = [node for node in model.graph.nodes if node.target == "0"]
        assert found == []
        with pytest.warns(QuantizationWarning, match=f"graph of a {stage} model"):
            print(sum(node.target is torch.quantize_per_tensor for node in model.graph.nodes))
        assert {each.filename for each in told} == {__file__}


def test_elsewhere_nobody_is() -> None:
    prepared = prepare_fx(nn.Sequential(nn.Linear(4, 2)).eval(), get_default_qconfig_mapping("x86"), (X,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(prepared.graph.nodes) > 3


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.fc = nn.LSTM(4, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.lstm(x)[0])


class Parent(nn.Module):
    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.first, self.child = nn.Linear(4, 4), child

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.child(self.first(x)) * 2


class Results(NamedTuple):
    """What a model may return."""

    y: torch.Tensor
    more: Any


@dataclass
class Record:
    """FX takes it as it is; torch.export, only if it is registered."""

    y: torch.Tensor
    more: Any = None


class Named(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 2)

    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        return Record(y, [Results(y.relu(), OrderedDict(a=y)), Record(x)])


def test_torch_fx_traces_converted_models() -> None:
    """Also a parent of one, and one with a recurrent module; a prepared one is refused by code."""
    x, other = torch.randn(5, 2, 4), torch.randn(7, 3, 4)
    prepared = prepare_fx(
        Recurrent().eval(), get_default_qconfig_mapping("x86"), (x,), get_default_prepare_custom_config()
    )
    prepared(x)
    converted = convert_fx(prepared, get_default_convert_custom_config())
    for model in (converted, converted.reference, Parent(converted).eval()):
        traced = torch.fx.symbolic_trace(model)
        for inputs in (x, other):
            assert torch.equal(traced(inputs), model(inputs))
    assert torch.equal(torch.fx.Transformer(converted).transform()(x), converted(x))
    with pytest.raises(ConvertError, match=r"(?s)its observers look at values.*TQ961"):
        torch.fx.symbolic_trace(prepared)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, more: Any = None) -> Any:
        y = self.fc(x if more is None else x + more["k"])
        return {"y": y, "all": (self.fc(y), [y.relu()])}


def test_passes_that_make_a_graph_of_their_own_keep_the_structure_of_results() -> None:
    """As with FX's graphs; where arguments nest, and the structure would be lost, they are refused."""
    for net in (nn.Sequential(nn.Linear(4, 2)), Nested(), Named()):
        prepared = prepare_fx(net.eval(), get_default_qconfig_mapping("x86"), (X,))
        prepared(X)
        converted = convert_fx(prepared)
        spec = torch.utils._pytree.tree_structure(net(X))
        for model in (prepared, converted, converted.reference):
            if isinstance(net, Named) and model is not prepared:
                with pytest.raises(ExportError, match=r"no Record of mixed values.*\nHint: "):
                    torch.jit.trace(model, X)  # type: ignore[no-untyped-call]
            copied = torch.fx.Graph()
            copied.output(copied.graph_copy(model.graph, {}))
            numbers = {node: i for i, node in enumerate(model.graph.nodes)}
            parts = split_module(model, model, lambda node, numbers=numbers: int(numbers[node] > 4))
            expected = torch.utils._pytree.tree_leaves(model(X))
            for made in (torch.fx.GraphModule(model, copied), parts):
                results, made_spec = torch.utils._pytree.tree_flatten(made(X))
                assert made_spec == spec
                assert all(map(torch.equal, results, expected))
    prepared = prepare_fx(Nested().eval(), get_default_qconfig_mapping("x86"), (X, {"k": X}))
    prepared(X, {"k": X})
    converted = convert_fx(prepared)
    with pytest.raises(ConvertError, match="would lose how the arguments"):
        split_module(converted, converted, lambda node: 0)


def test_a_parent_of_a_converted_child_is_prepared() -> None:
    mapping, x = get_default_qconfig_mapping("x86"), torch.randn(5, 2, 4)
    child = prepare_fx(Recurrent().eval(), mapping, (x,), get_default_prepare_custom_config())
    child(x)
    parent = Parent(convert_fx(child, get_default_convert_custom_config())).eval()
    prepared = prepare_fx(parent, mapping, (x,))
    prepared(x)
    converted = convert_fx(prepared)
    (said,) = explain(converted).find("child")
    assert said.reason.startswith("converted already")
    (first,) = [d for d in explain(converted).find("first") if d.path == "first"]
    assert first.action.value == "quantized"
    signal = parent(x)
    assert 20 < float(10 * torch.log10(signal.square().sum() / (signal - converted(x)).square().sum())) < 70
    assert converted(torch.randn(9, 3, 4)).shape == (9, 3, 3)
    with pytest.raises(InputError, match="at 'child' is prepared already"):
        prepare_fx(Parent(child).eval(), mapping, (x,))
