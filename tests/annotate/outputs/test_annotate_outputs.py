"""annotate_outputs: one spec per output, all four kinds, for every operator with several outputs.

Oracle: torchao's own MinMaxObserver on the float model's outputs, and torch's quantize and dequantize.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.quantization.fx._decomposed
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.fake_quantize import FusedMovingAvgObsFakeQuantize
from torchao.quantization.pt2e.observer import HistogramObserver, MinMaxObserver
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e, prepare_qat_pt2e
from torchao.quantization.pt2e.quantizer import (
    QuantizationAnnotation,
    Quantizer,
    SharedQuantizationSpec,
)

from tests.helpers.chunked_models import ATEN, FIXED, UINT8, Apply, X, derived, export, int8
from tests.helpers.oracle import leaves, sqnr
from torchq_compat import Output, annotate_outputs, check_sharing
from torchq_compat.errors import AnnotationError

OPS = torch.ops.quantized_decomposed
QUANTIZE = OPS.quantize_per_tensor.default


Annotate = Callable[[Node], None]


class OfOneOp(Quantizer):
    """Annotates the nodes of one operator; keeps the observers that torchao made, by point."""

    def __init__(self, target: Any, annotate: Annotate) -> None:
        super().__init__()
        self.target, self.annotate_node = target, annotate
        self.observers: dict[Any, Any] = {}

    def annotate(self, model: GraphModule) -> GraphModule:
        for node in list(model.graph.nodes):
            if node.target is self.target:
                self.annotate_node(node)
        return model

    def validate(self, model: GraphModule) -> None:
        check_sharing(model)

    def prepare_obs_or_fq_callback(self, model: GraphModule, observers: dict[Any, Any]) -> None:
        self.observers = {self.name(point): observer for point, observer in observers.items()}

    @staticmethod
    def name(point: Any) -> Any:
        return tuple(node.name for node in point) if isinstance(point, tuple) else point.name


def quantized(
    graph_module: GraphModule, quantizer: Quantizer, *args: Tensor
) -> tuple[GraphModule, GraphModule]:
    with torch.no_grad():
        prepared = prepare_pt2e(graph_module, quantizer)
        prepared(*args)
        return prepared, convert_pt2e(prepared)


def result_qparams(converted: GraphModule) -> list[tuple[float, int] | None]:
    """Return the (scale, zero point) of each result of a converted graph; None for a result without q-dq."""
    found: list[tuple[float, int] | None] = []
    for node in leaves_of(converted.graph.output_node().args):
        is_dq = node.target is OPS.dequantize_per_tensor.default
        found.append((node.args[1], node.args[2]) if is_dq else None)
    return found


def leaves_of(args: Any) -> list[Node]:
    return [a for a in torch.utils._pytree.tree_leaves(args) if isinstance(a, Node)]


def minmax_qparams(value: Tensor, dtype: torch.dtype = torch.int8) -> tuple[float, int]:
    info = torch.iinfo(dtype)
    observer = MinMaxObserver(dtype=dtype, quant_min=info.min, quant_max=info.max)
    observer(value.detach())
    scale, zero_point = observer.calculate_qparams()
    return float(scale), int(zero_point)


def fake_quantized(value: Tensor, qparams: tuple[float, int]) -> Tensor:
    q = OPS.quantize_per_tensor(value, *qparams, -128, 127, torch.int8)
    return OPS.dequantize_per_tensor(q, *qparams, -128, 127, torch.int8)


with torch.random.fork_rng():
    torch.manual_seed(0)
    LSTM, GRU = nn.LSTM(8, 8), nn.GRU(8, 8)
NORM = torch.arange(8.0), torch.ones(8)

#: (name, target, function, number of outputs, indexes of outputs that cannot be quantized)
OPERATORS: list[tuple[str, Any, Any, int, tuple[int, ...]]] = [
    ("lstm", ATEN.lstm.input, lambda x: LSTM(x.unsqueeze(1)), 3, ()),
    ("gru", ATEN.gru.input, lambda x: GRU(x.unsqueeze(1)), 2, ()),
    ("chunk", ATEN.chunk.default, lambda x: x.chunk(3), 3, ()),
    ("split", ATEN.split.Tensor, lambda x: x.split(4, 1), 2, ()),
    ("split_sizes", ATEN.split_with_sizes.default, lambda x: x.split([1, 7], 1), 2, ()),
    ("unbind", ATEN.unbind.int, lambda x: x.unbind(0), 6, ()),
    ("topk", ATEN.topk.default, lambda x: x.topk(3), 2, (1,)),
    ("max", ATEN.max.dim, lambda x: x.max(0), 2, (1,)),
    ("norm", ATEN.native_layer_norm.default, lambda x: torch.native_layer_norm(x, [8], *NORM, 1e-5), 3, ()),
]
IDS = [row[0] for row in OPERATORS]


@pytest.mark.parametrize(("name", "target", "function", "count", "integers"), OPERATORS, ids=IDS)
def test_every_output_has_its_own_qparams(
    name: str, target: Any, function: Any, count: int, integers: tuple[int, ...]
) -> None:
    graph_module = export(function, X, modules=(LSTM, GRU))
    with torch.no_grad():
        expected = leaves(function(X))
    specs = [None if index in integers else int8() for index in range(count)]
    quantizer = OfOneOp(target, lambda node: annotate_outputs(node, {}, specs))
    _, converted = quantized(graph_module, quantizer, X)
    qparams = [
        None if i in integers else minmax_qparams(value.contiguous()) for i, value in enumerate(expected)
    ]
    assert result_qparams(converted) == qparams
    for value, result, expected_qparams in zip(expected, leaves(converted(X)), qparams, strict=True):
        assert torch.equal(
            result, value if expected_qparams is None else fake_quantized(value, expected_qparams)
        )


@pytest.mark.parametrize(("name", "target", "function", "count", "integers"), OPERATORS, ids=IDS)
def test_none_leaves_an_output_alone(
    name: str, target: Any, function: Any, count: int, integers: tuple[int, ...]
) -> None:
    """Only the first output is quantized."""
    graph_module = export(function, X, modules=(LSTM, GRU))
    quantizer = OfOneOp(target, lambda node: annotate_outputs(node, {}, [int8(), *[None] * (count - 1)]))
    _, converted = quantized(graph_module, quantizer, X)
    assert [expected_qparams is not None for expected_qparams in result_qparams(converted)] == [True] + [
        False
    ] * (count - 1)


class OfOneOpUnchecked(OfOneOp):
    def validate(self, model: GraphModule) -> None:
        pass


@pytest.mark.parametrize(("quantizer", "found"), [(OfOneOpUnchecked, 0), (OfOneOp, 2)])
def test_torchao_alone_drops_the_spec(quantizer: Any, found: int) -> None:
    """Why annotate_outputs exists: a spec on the node itself is dropped, unless check_sharing applies it."""

    def annotate(node: Node) -> None:
        node.meta["quantization_annotation"] = QuantizationAnnotation(output_qspec=int8(), _annotated=True)

    _, converted = quantized(export(lambda x: x.chunk(2), X), quantizer(ATEN.chunk.default, annotate), X)
    assert sum(each is not None for each in result_qparams(converted)) == found


@pytest.mark.parametrize(
    ("name", "target", "index"), [("topk", ATEN.topk.default, 1), ("max", ATEN.max.dim, 1)]
)
def test_integer_outputs_are_refused(name: str, target: Any, index: int) -> None:
    function = dict(zip(IDS, OPERATORS, strict=True))[name][2]
    quantizer = OfOneOp(target, lambda node: annotate_outputs(node, {}, [int8(), int8()]))
    with pytest.raises(
        AnnotationError, match=r"output 1 of (topk|max_1) is a tensor of torch.int64"
    ) as error:
        prepare_pt2e(export(function, X), quantizer)
    assert "Hint:" in str(error.value)


# -- the four kinds of spec


def test_fixed_qparams_of_an_output() -> None:
    quantizer = OfOneOp(ATEN.chunk.default, lambda node: annotate_outputs(node, {}, [FIXED, int8()]))
    _, converted = quantized(export(lambda x: x.chunk(2), X), quantizer, X)
    assert result_qparams(converted) == [(1 / 64, 3), minmax_qparams(X[3:])]
    assert torch.equal(converted(X)[0], fake_quantized(X[:3], (1 / 64, 3)))


def test_two_outputs_share() -> None:
    def annotate(node: Node) -> None:
        annotate_outputs(node, {}, [int8(), SharedQuantizationSpec(Output(node, 0))])

    quantizer = OfOneOp(ATEN.chunk.default, annotate)
    _, converted = quantized(export(lambda x: x.chunk(2, 1), X), quantizer, X)
    assert result_qparams(converted) == [minmax_qparams(X)] * 2
    assert quantizer.observers["getitem"] is quantizer.observers["getitem_1"]


def test_an_output_shares_with_a_later_one() -> None:
    """torchao alone fails an assertion here."""

    def annotate(node: Node) -> None:
        annotate_outputs(node, {}, [SharedQuantizationSpec(Output(node, 1)), int8()])

    _, converted = quantized(export(lambda x: x.chunk(2, 1), X), OfOneOp(ATEN.chunk.default, annotate), X)
    assert result_qparams(converted) == [minmax_qparams(X)] * 2


@pytest.mark.parametrize("output_leads", [False, True])
def test_an_output_and_an_input_share(output_leads: bool) -> None:
    """Either point may have the spec. The input's range is wider: the output has the input's qparams."""

    def annotate(node: Node) -> None:
        (x,) = node.all_input_nodes
        values, edge = Output(node, 0), (x, node)
        if output_leads:
            annotate_outputs(node, {x: SharedQuantizationSpec(values)}, [int8(), None])
        else:
            annotate_outputs(node, {x: int8()}, [SharedQuantizationSpec(edge), None])

    quantizer = OfOneOp(ATEN.topk.default, annotate)
    _, converted = quantized(export(lambda x: x.topk(3), X), quantizer, X)
    assert quantizer.observers["x", "topk"] is quantizer.observers["getitem"]
    assert result_qparams(converted) == [minmax_qparams(X), None]
    assert torch.equal(converted(X)[0], fake_quantized(X, minmax_qparams(X)).topk(3).values)


def test_an_output_derived_from_an_input_and_another_output() -> None:
    def annotate(node: Node) -> None:
        (x,) = node.all_input_nodes
        annotate_outputs(node, {x: int8()}, [UINT8, derived((x, node), Output(node, 0))])

    _, converted = quantized(export(lambda x: x.chunk(2), X), OfOneOp(ATEN.chunk.default, annotate), X)
    x_qparams = minmax_qparams(X)
    first = minmax_qparams(X[:3], torch.uint8)
    assert result_qparams(converted)[1] == pytest.approx((x_qparams[0] * first[0], 0), rel=1e-6)


def test_bias_derived_from_a_shared_output() -> None:
    """A linear behind an output: its int32 bias has the scale of the output times that of the weight."""
    torch.manual_seed(0)
    linear = nn.Linear(4, 3)

    def annotate(node: Node) -> None:
        x, weight, bias = node.args
        chunk = next(n for n in node.graph.nodes if n.target is ATEN.chunk.default)
        annotate_outputs(chunk, {}, [int8(), SharedQuantizationSpec(Output(chunk, 0))])
        # The bias comes first on purpose: torchao makes observers in the order of the map.
        specs = {bias: derived(Output(chunk, 1), (weight, node)), weight: int8(), x: int8()}
        annotate_outputs(node, specs, [None])

    graph_module = export(lambda x: linear(x.chunk(2, 1)[0]), X, modules=(linear,))
    _, converted = quantized(graph_module, OfOneOp(ATEN.linear.default, annotate), X)
    (bias,) = [
        n
        for n in converted.graph.nodes
        if n.target is OPS.dequantize_per_tensor.default and n.args[5] is torch.int32
    ]
    scale = minmax_qparams(X)[0] * minmax_qparams(linear.weight)[0]
    assert bias.args[1] == pytest.approx(scale, rel=1e-6)
    assert 30 < sqnr(linear(X[:, :4]), converted(X)[0]) < 60


def test_kinds_refer_to_another_nodes_output() -> None:
    def annotate(node: Node) -> None:
        chunk = next(n for n in node.graph.nodes if n.target is ATEN.chunk.default)
        # The chunk's own specs are set after they are referred to.
        annotate_outputs(node, {}, [SharedQuantizationSpec(Output(chunk, 1)), None])
        annotate_outputs(chunk, {}, [None, int8()])

    def function(x: Tensor) -> tuple[Tensor, ...]:
        first, second = x.chunk(2)
        return (*first.topk(2), second)

    quantizer = OfOneOp(ATEN.topk.default, annotate)
    _, converted = quantized(export(function, X), quantizer, X)
    expected = minmax_qparams(torch.cat([function(X)[0].flatten(), X[3:].flatten()]))
    assert result_qparams(converted) == [expected, None, expected]


def test_annotations_by_hand_may_name_an_output() -> None:
    def annotate(node: Node) -> None:
        chunk = next(n for n in node.graph.nodes if n.target is ATEN.chunk.default)
        annotate_outputs(chunk, {}, [int8(), None])
        node.meta["quantization_annotation"] = QuantizationAnnotation(
            output_qspec=SharedQuantizationSpec(Output(chunk, 0)), _annotated=True
        )

    quantizer = OfOneOp(ATEN.relu.default, annotate)
    graph_module = export(lambda x: (x.chunk(2)[0], x.chunk(2)[1].relu()), X)
    prepared = prepare_pt2e(graph_module, quantizer)
    assert quantizer.observers["relu"] is quantizer.observers["getitem"]
    prepared(X)


# -- getitems


def test_several_getitems_of_one_output_are_one_tensor() -> None:
    graph_module = export(lambda x: x.chunk(2), X)
    chunk = next(n for n in graph_module.graph.nodes if n.target is ATEN.chunk.default)
    output = graph_module.graph.output_node()
    with graph_module.graph.inserting_before(output):
        duplicate = graph_module.graph.call_function(operator.getitem, (chunk, -2))
        duplicate.meta["val"] = chunk.meta["val"][0]
        relu = graph_module.graph.call_function(ATEN.relu.default, (duplicate,))
        relu.meta["val"] = chunk.meta["val"][0]
    output.args = ((*output.args[0][:1], relu),)

    def annotate(node: Node) -> None:
        annotate_outputs(node, {}, [int8(HistogramObserver), None])

    quantizer = OfOneOp(ATEN.chunk.default, annotate)
    _, converted = quantized(graph_module, quantizer, X)
    histogram = quantizer.observers["getitem"].histogram
    assert float(histogram.sum()) == X[:3].numel()
    assert len([n for n in converted.graph.nodes if n.target is QUANTIZE]) == 1
    assert [user.target for user in chunk.users] == [operator.getitem]


def test_an_unused_output_gets_its_getitem_and_costs_nothing() -> None:
    graph_module = export(lambda x: x.chunk(2)[0], X)
    with torch.no_grad():
        quantizer = OfOneOp(ATEN.chunk.default, lambda n: annotate_outputs(n, {}, [int8(), UINT8]))
        prepared = prepare_pt2e(graph_module, quantizer)
        prepared(X)
        assert quantizer.observers["getitem_1"].max_val == X[3:].max()
        converted = convert_pt2e(prepared)
    assert len([n for n in converted.graph.nodes if n.target is QUANTIZE]) == 1


def test_a_node_with_one_output_is_annotated_like_any() -> None:
    quantizer = OfOneOp(ATEN.relu.default, lambda n: annotate_outputs(n, {n.args[0]: UINT8}, [int8()]))
    _, converted = quantized(export(lambda x: x.relu(), X), quantizer, X)
    assert result_qparams(converted) == [minmax_qparams(X.relu())]


def test_qat() -> None:
    fake = int8(FusedMovingAvgObsFakeQuantize)

    def annotate(node: Node) -> None:
        annotate_outputs(node, {}, [fake, SharedQuantizationSpec(Output(node, 0))])

    prepared = prepare_qat_pt2e(export(lambda x: x.chunk(2), X), OfOneOp(ATEN.chunk.default, annotate))
    x = X.clone().requires_grad_()
    sum(result.square().sum() for result in prepared(x)).backward()
    assert x.grad is not None
    assert x.grad.abs().sum() > 0
    assert len({id(m) for m in prepared.modules() if isinstance(m, FusedMovingAvgObsFakeQuantize)}) == 1


# -- refusals; each leaves the graph as it was


def chunk_of(graph_module: GraphModule) -> Node:
    return next(n for n in graph_module.graph.nodes if n.target is ATEN.chunk.default)


def refused(match: str, annotate: Callable[[Node], None]) -> None:
    graph_module = export(lambda x: x.chunk(2)[0], X)
    before = str(graph_module.graph)
    with pytest.raises(AnnotationError, match=match) as error:
        annotate(chunk_of(graph_module))
    assert "\nHint: " in str(error.value)
    assert str(graph_module.graph) == before
    assert all("quantization_annotation" not in node.meta for node in graph_module.graph.nodes)


def test_bad_specs_are_refused() -> None:
    refused("1 output specs were given .* 2 outputs", lambda n: annotate_outputs(n, {}, [int8()]))
    refused("output 5 .* does not exist", lambda n: annotate_outputs(n, {Output(n, 5): int8()}, [None, None]))
    refused(
        "output 0 of chunk is not a positional input",
        lambda n: annotate_outputs(n, {Output(n, 0): int8()}, [None, None]),
    )
    refused("output 1 of chunk is a dtype", lambda n: annotate_outputs(n, {}, [None, torch.int8]))


def test_a_graph_without_example_values_is_refused() -> None:
    traced = torch.fx.symbolic_trace(Apply(lambda x: torch.chunk(x, 2)[0]))
    (chunk,) = [n for n in traced.graph.nodes if n.target is torch.chunk]
    with pytest.raises(AnnotationError, match=r"carries no example value"):
        annotate_outputs(chunk, {}, [int8(), int8()])


def test_an_erased_node_is_refused() -> None:
    graph_module = export(lambda x: x.chunk(2), X)
    chunk = chunk_of(graph_module)
    with graph_module.graph.inserting_after(list(chunk.users)[-1]):
        duplicate = graph_module.graph.call_function(operator.getitem, (chunk, 0))
    duplicate.meta["val"] = chunk.meta["val"][0]
    annotate_outputs(chunk, {}, [int8(), None])
    with pytest.raises(AnnotationError, match="no longer in the graph"):
        annotate_outputs(chunk, {}, [int8(), SharedQuantizationSpec(duplicate)])
