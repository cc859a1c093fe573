"""``torchq_compat.pt2e`` beside torchao's own functions, with the Quantizers that can be imported here."""

from __future__ import annotations

import copy
import operator
import warnings
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.ao.quantization.observer as legacy_observer
import torchao.quantization.pt2e.quantizer.x86_inductor_quantizer as x86
from torch import Tensor, fx, nn
from torch.ao.quantization import get_default_qconfig_mapping
from torch.fx import GraphModule
from torchao.quantization.granularity import PerGroup
from torchao.quantization.pt2e import (
    MinMaxObserver,
    compare_results,
    extract_results_from_loggers,
    prepare_for_propagation_comparison,
    qat_utils,
    quantize_pt2e,
)
from torchao.quantization.pt2e import utils as pt2e_utils
from torchao.quantization.pt2e._affine_quantization import AffineQuantizedMinMaxObserver
from torchao.quantization.pt2e.observer import MappingType
from torchao.quantization.pt2e.quantizer import (
    ComposableQuantizer,
    DerivedQuantizationSpec,
    FixedQParamsQuantizationSpec,
    QuantizationAnnotation,
    QuantizationSpec,
    Quantizer,
)

import torchq_compat as tc
from tests.annotate.test_issue_script import QUANTIZE
from tests.helpers.exported_patterns import exporting_once
from tests.helpers.oracle import sqnr
from tests.helpers.xnnpack import xnnpack_quantizer
from torchq_compat import pt2e
from torchq_compat.errors import AnnotationError, ArgumentError, QuantizationNote

ATEN = torch.ops.aten
INT8 = QuantizationSpec(torch.int8, MinMaxObserver, -128, 127, torch.per_tensor_affine)


def exported(model: nn.Module, *inputs: Tensor) -> GraphModule:
    module: Any = torch.export.export(model, inputs).module()
    return module


def x86_quantizer(*, is_qat: bool = False) -> Quantizer:
    config = x86.get_default_x86_inductor_quantization_config(is_qat=is_qat)
    return x86.X86InductorQuantizer().set_global(config)


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.fc = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4 * 36, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.relu(self.bn(self.conv(x))).flatten(1))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.softmax(self.q(x) @ self.k(x).transpose(-1, -2), -1)
        return scores @ self.v(x)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), (6, 8)),
    "convolutional": (Convolutional, (2, 3, 8, 8)),
    "attention": (Attention, (2, 5, 8)),
}


def plain(model: GraphModule, quantizer: Quantizer, batches: list[Tensor]) -> GraphModule:
    prepared = quantize_pt2e.prepare_pt2e(copy.deepcopy(model), quantizer)
    for batch in batches:
        prepared(batch)
    return quantize_pt2e.convert_pt2e(prepared)


def ours(model: GraphModule, quantizer: Quantizer, batches: list[Tensor]) -> GraphModule:
    prepared = pt2e.prepare_pt2e(model, quantizer)
    for batch in batches:
        prepared(batch)
    return pt2e.convert_pt2e(prepared)


@pytest.mark.executorch
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("make", [x86_quantizer, xnnpack_quantizer], ids=["x86", "xnnpack"])
def test_the_bits_of_plain_pt2e(make: Callable[[], Quantizer], name: str) -> None:
    factory, shape = MODELS[name]
    torch.manual_seed(0)
    model, batches = factory().eval(), [torch.randn(shape) for _ in range(3)]
    graph = exported(model, batches[0])
    before = str(graph.graph)
    expected = plain(graph, make(), batches)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", QuantizationNote)
        converted = ours(graph, make(), batches)
    assert str(graph.graph) == before
    assert Counter(n.target for n in converted.graph.nodes) == Counter(n.target for n in expected.graph.nodes)
    assert any(n.target is QUANTIZE for n in converted.graph.nodes)
    assert torch.equal(expected(batches[1]), converted(batches[1]))
    assert 20 < sqnr(model(batches[1]), converted(batches[1])) < 60


@pytest.mark.parametrize("name", ["linear", pytest.param("convolutional", marks=pytest.mark.slow)])
def test_training_has_the_losses_of_plain_pt2e(name: str) -> None:
    """With an optimizer that was made before."""
    torch.manual_seed(0)
    factory, shape = MODELS[name]
    model, batches = factory().train(), [torch.randn(shape) for _ in range(3)]
    losses = []
    for prepare in (quantize_pt2e.prepare_qat_pt2e, pt2e.prepare_qat_pt2e):
        graph = exported(copy.deepcopy(model), batches[0])
        optimizer = torch.optim.SGD(graph.parameters(), 0.1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", QuantizationNote)
            prepared = prepare(graph, x86_quantizer(is_qat=True))
        for batch in batches:
            loss = prepared(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[:3] == losses[3:]
    assert losses[0] != losses[2]


class ByNode(Quantizer):
    def __init__(self, annotate: Callable[[fx.Node], QuantizationAnnotation | None]) -> None:
        self.annotation_of = annotate

    def annotate(self, model: GraphModule) -> GraphModule:
        for node in model.graph.nodes:
            annotation = self.annotation_of(node)
            if annotation is not None:
                node.meta["quantization_annotation"] = annotation
        return model

    def validate(self, model: GraphModule) -> None:
        pass


class Halves(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2)
        return first * second


def on_chunk(node: fx.Node) -> QuantizationAnnotation | None:
    if node.target is not ATEN.chunk.default:
        return None
    return QuantizationAnnotation({node.args[0]: INT8}, INT8, _annotated=True)


@pytest.mark.parametrize("wrap", [lambda q: q, lambda q: ComposableQuantizer([q])], ids=["alone", "composed"])
def test_one_spec_means_every_output(wrap: Callable[[Quantizer], Quantizer]) -> None:
    x = torch.randn(4, 3)
    graph = exported(Halves(), x)
    assert sum(n.target is QUANTIZE for n in plain(graph, ByNode(on_chunk), [x]).graph.nodes) == 1
    with pytest.warns(QuantizationNote, match=r"aten\.mul\.Tensor x1.*\[TQ423\]$"):
        converted = ours(graph, wrap(ByNode(on_chunk)), [x])
    assert sum(n.target is QUANTIZE for n in converted.graph.nodes) == 3
    (chunk,) = (n for n in converted.graph.nodes if n.target is ATEN.chunk.default)
    assert [n.target for n in chunk.users] == [operator.getitem] * 2


def test_what_no_annotation_covers_is_told() -> None:
    x = torch.randn(4, 3)
    with pytest.warns(QuantizationNote, match=r"ByNode annotates nothing at aten\.mul\.Tensor x1: they"):
        pt2e.prepare_pt2e(exported(Halves(), x), ByNode(on_chunk))

    def on_second(node: fx.Node) -> QuantizationAnnotation | None:
        is_second = node.name == "linear_1"
        return QuantizationAnnotation({node.args[0]: INT8}, None, _annotated=True) if is_second else None

    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with pytest.warns(QuantizationNote, match=r"ByNode annotates nothing at aten\.linear\.default x1: they"):
        pt2e.prepare_pt2e(exported(model, x), ByNode(on_second))
    quantizer = ByNode(
        lambda node: (
            on_chunk(node)
            or (QuantizationAnnotation({}, INT8, _annotated=True) if node.target is ATEN.mul.Tensor else None)
        )
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", QuantizationNote)
        pt2e.prepare_pt2e(exported(Halves(), x), quantizer)


def test_specs_stand_in_the_order_of_arguments() -> None:
    """In which torchao reads those of a convolution that it fuses with a batch norm to train it."""

    def annotate(node: fx.Node) -> QuantizationAnnotation | None:
        if node.target is not ATEN.linear.default:
            return None
        value, weight, bias = node.args
        return QuantizationAnnotation({weight: INT8, bias: None, value: INT8}, None, _annotated=True)

    graph = exported(nn.Linear(4, 3), torch.randn(5, 4))
    pt2e.check_annotations(ByNode(annotate).annotate(graph))
    (linear,) = graph.graph.find_nodes(op="call_function", target=ATEN.linear.default)
    specs = linear.meta["quantization_annotation"].input_qspec_map
    assert list(specs.items()) == list(zip(linear.args, (INT8, INT8, None), strict=True))


def test_nodes_of_the_given_module_are_those_that_the_quantizer_sees() -> None:
    """Specs by edge and node may be written before prepare, in a map of one's own or on the nodes."""
    x = torch.randn(4, 3)
    points: dict[Any, QuantizationSpec] = {}

    def by_map(node: fx.Node) -> QuantizationAnnotation | None:
        inputs = {source: points[source, node] for source in node.all_input_nodes if (source, node) in points}
        return QuantizationAnnotation(inputs, points.get(node), _annotated=True) if inputs else None

    for prepare in (quantize_pt2e.prepare_pt2e, pt2e.prepare_pt2e):
        for is_annotated_before in (False, True):
            graph = exported(Halves(), x)
            (mul,) = graph.graph.find_nodes(op="call_function", target=ATEN.mul.Tensor)
            points = {mul: INT8, **{(source, mul): INT8 for source in mul.all_input_nodes}}
            if is_annotated_before:
                mul.meta["quantization_annotation"], points = by_map(mul), {}
            with warnings.catch_warnings():
                warnings.simplefilter("error", QuantizationNote)
                prepared = prepare(graph, ByNode(by_map))
            prepared(x)
            converted = pt2e.convert_pt2e(prepared)
            assert sum(n.target is QUANTIZE for n in converted.graph.nodes) == 3
            assert torch.equal(graph(x), Halves()(x)) or prepare is quantize_pt2e.prepare_pt2e


def only_of(kind: Callable[..., Tensor], helper: Callable[..., GraphModule]) -> Callable[..., GraphModule]:
    return lambda model, function, *rest, **options: (
        helper(model, function, *rest, **options) if function is kind else model
    )


def test_train_and_eval_switch_batch_norms_and_return_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    # torchao exports patterns of four kinds of convolution in all their forms: most for what is not here.
    for name in ("_fuse_conv_bn_qat_helper", "_fold_conv_bn_qat_helper"):
        monkeypatch.setattr(qat_utils, name, only_of(nn.functional.conv2d, getattr(qat_utils, name)))
    per_channel_with_float_bias = (True, True, False, False)
    monkeypatch.setattr(
        qat_utils, "itertools", SimpleNamespace(product=lambda *flags: [per_channel_with_float_bias])
    )
    once = exporting_once(pt2e_utils._get_aten_graph_module_for_pattern)
    for module in (pt2e_utils, qat_utils):
        monkeypatch.setattr(module, "_get_aten_graph_module_for_pattern", once)
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    prepared = pt2e.prepare_qat_pt2e(exported(Convolutional().train(), x), x86_quantizer(is_qat=True))
    statistics = prepared.get_buffer("bn.running_mean")
    for model in (prepared.eval(), prepared.train(False)):
        before = statistics.clone()
        assert model is prepared
        model(x)
        assert torch.equal(statistics, before)
    prepared.train()(x)
    assert not torch.equal(statistics, before)
    converted = pt2e.convert_pt2e(prepared.eval())
    assert not converted.graph.find_nodes(op="call_function", target=ATEN.batch_norm.default)
    expected = converted(x)
    assert torch.equal(converted.eval()(x), expected)


def test_qparams_that_are_given_need_no_range() -> None:
    """torchao's convert writes a range of None, with which the model cannot be called."""
    x = torch.empty(4, 3).uniform_(-1.5, 1.5)
    x[0, :2] = torch.tensor([-1.5, 1.5])  # in the first half, whose qparams the second one has
    x[2, :2] = 1.5
    known = FixedQParamsQuantizationSpec(torch.uint8, 1 / 32, 128)

    def annotate(node: fx.Node) -> QuantizationAnnotation | None:
        if node.target is not ATEN.mul.Tensor:
            return None
        first, second = node.all_input_nodes
        derived = DerivedQuantizationSpec([(first, node)], lambda of: of[0].calculate_qparams(), torch.int8)
        return QuantizationAnnotation({first: INT8, second: derived}, known, _annotated=True)

    converted = ours(exported(Halves(), x), ByNode(annotate), [x])
    ranges = [node.args[3:] for node in converted.graph.find_nodes(op="call_function", target=QUANTIZE)]
    assert ranges == [(-128, 127, torch.int8)] * 2 + [(0, 255, torch.uint8)]
    assert 20 < sqnr(Halves()(x), converted(x)) < 60


def test_what_cannot_be_carried_out_is_refused_by_its_edge_and_nothing_changes() -> None:
    x = torch.randn(4, 3)
    graph = exported(Halves(), x)
    before = str(graph.graph)

    def wrong(node: fx.Node) -> QuantizationAnnotation | None:
        if node.target is not ATEN.chunk.default:
            return None
        return QuantizationAnnotation({node: INT8}, None, _annotated=True)

    with pytest.raises(AnnotationError, match="chunk") as error:
        pt2e.prepare_pt2e(graph, ByNode(wrong))
    assert error.value.hint
    assert str(graph.graph) == before
    assert all("quantization_annotation" not in node.meta for node in graph.graph.nodes)
    with pytest.raises(ArgumentError, match="model"):
        pt2e.prepare_pt2e(Halves(), ByNode(on_chunk))


def test_observers_of_torch_ao_quantize() -> None:
    spec = QuantizationSpec(torch.int8, legacy_observer.MinMaxObserver, -128, 127, torch.per_tensor_affine)
    quantizer = ByNode(
        lambda n: (
            QuantizationAnnotation({n.args[0]: spec}, None, _annotated=True)
            if n.target is ATEN.chunk.default
            else None
        )
    )
    x = torch.randn(4, 3)
    with pytest.warns(QuantizationNote):
        converted = ours(exported(Halves(), x), quantizer, [x])
    assert sum(n.target is QUANTIZE for n in converted.graph.nodes) == 1
    assert 30 < sqnr(Halves()(x), converted(x)) < 60


def test_a_derived_spec_needs_no_qscheme() -> None:
    """As Cortex-M's Quantizer writes it."""
    model, x = nn.Linear(4, 3).eval(), torch.randn(5, 4)

    def annotate(node: fx.Node) -> QuantizationAnnotation | None:
        if node.target is not ATEN.linear.default:
            return None
        value, weight, bias = node.args
        derived = DerivedQuantizationSpec(
            [(value, node), (weight, node)],
            lambda given: tuple(torch.cat([a.calculate_qparams()[i] for a in given][:1]) for i in (0, 1)),
            torch.int32,
            -(2**31),
            2**31 - 1,
        )
        return QuantizationAnnotation({value: INT8, weight: INT8, bias: derived}, INT8, _annotated=True)

    graph = exported(model, x)
    assert torch.equal(plain(graph, ByNode(annotate), [x])(x), ours(graph, ByNode(annotate), [x])(x))


def in_pt2e(
    model: nn.Module, x: Tensor, quantizer: Quantizer | None = None
) -> tuple[GraphModule, list[GraphModule]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", QuantizationNote)
        prepared = pt2e.prepare_pt2e(exported(model, x), quantizer or x86_quantizer())
    prepared(x)
    return copy.deepcopy(prepared), [pt2e.convert_pt2e(prepared)]


def in_fx(
    model: nn.Module, x: Tensor, quantizer: Quantizer | None = None
) -> tuple[GraphModule, list[GraphModule]]:
    prepared = tc.prepare_fx(model, quantizer or get_default_qconfig_mapping("x86"), (x,))
    prepared(x)
    return prepared, [tc.convert_to_reference_fx(prepared), tc.convert_fx(prepared)]


@pytest.mark.parametrize("flow", [in_pt2e, in_fx])
def test_the_numeric_debugger_finds_every_value(flow: Any) -> None:
    """Handles are kept by prepare, by convert and by the lowering to integers."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            first, second = self.a(x).chunk(2, -1)
            return self.b(torch.relu(first) + second)

    torch.manual_seed(0)
    x = torch.randn(5, 8)
    prepared, converted = flow(Gated().eval(), x)

    def results(model: GraphModule) -> Any:
        logged = prepare_for_propagation_comparison(copy.deepcopy(model))
        logged(x)
        return extract_results_from_loggers(logged)

    for each in converted:
        compared = compare_results(results(prepared), results(each))
        found = {handle.name: summary.results[0] for handle, summary in compared.items()}
        assert {"linear", "getitem", "getitem_1", "relu", "add", "linear_1"} <= found.keys()
        # Inside a lowered model values are integers.
        assert float(found["linear_1"].sqnr) > 20
        if each is converted[0]:
            assert all(float(found[name].sqnr) > 20 for name in ("linear", "relu", "add"))


@pytest.mark.parametrize("flow", [in_pt2e, in_fx])
def test_block_wise_observers(flow: Any) -> None:
    """They have no dtype, and write their q-dq themselves."""
    grouped = AffineQuantizedMinMaxObserver.with_args(
        mapping_type=MappingType.SYMMETRIC, target_dtype=torch.int8, granularity=PerGroup(4)
    )
    spec = QuantizationSpec(torch.int8, grouped, -7, 7)

    def annotate(node: fx.Node) -> QuantizationAnnotation | None:
        is_linear = node.target is ATEN.linear.default
        return QuantizationAnnotation({node.args[1]: spec}, None, _annotated=True) if is_linear else None

    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8)).eval(), torch.randn(5, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error", QuantizationNote)
        _, converted = flow(model, x, ByNode(annotate))
    expected = plain(exported(model, x), ByNode(annotate), [x])(x)
    for each in converted:
        assert torch.equal(each(x), expected)
    assert 15 < sqnr(model(x), expected) < 40
