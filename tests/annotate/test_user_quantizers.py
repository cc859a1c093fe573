"""prepare_fx and prepare_qat_fx carry out what a user's Quantizer annotates, or say why they do not."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.ao.quantization as legacy
import torchao.quantization.pt2e as pt2e
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.fake_quantize import FakeQuantize
from torchao.quantization.pt2e.observer import (
    HistogramObserver,
    MinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    PerChannelMinMaxObserver,
    PlaceholderObserver,
)
from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e
from torchao.quantization.pt2e.quantizer import (
    ComposableQuantizer,
    QuantizationSpec,
    Quantizer,
    SharedQuantizationSpec,
)

import torchq_compat as tc
from tests.helpers.oracle import leaves, quantize_nodes, sqnr
from tests.helpers.quantizers import ATEN, ByHand, annotate, int8_spec
from torchq_compat import Output, annotate_outputs
from torchq_compat.annotate.observed_graph import observer_nodes
from torchq_compat.custom_config import PrepareCustomConfig
from torchq_compat.errors import AnnotationError, ConfigError, QuantizationWarning
from torchq_compat.pt2e import whole_op_lstm_quantizer, whole_op_recurrent_quantizer

INT8 = int8_spec()
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Halves(nn.Module):
    """A model of chunk, topk and arithmetic."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, b = x.chunk(2, 1)
        values, _ = a.topk(2)
        return torch.relu(a + b), values, b


def at(target: Any, write: Callable[[Node], object]) -> ByHand:
    return ByHand(lambda node: write(node) if node.target is target else None)


def converted_by(quantizer: Quantizer, *, is_qat: bool = False) -> tuple[GraphModule, GraphModule]:
    prepare = tc.prepare_qat_fx if is_qat else tc.prepare_fx
    static = torch.export.Dim.STATIC
    prepared = prepare(Halves().train(is_qat), quantizer, (X,), dynamic_shapes=([static, static],))
    prepared(X)
    return prepared, tc.convert_to_reference_fx(prepared)


def alone(quantizer: Quantizer) -> Quantizer:
    return quantizer


def composed(quantizer: Quantizer) -> Quantizer:
    return ComposableQuantizer([ByHand(lambda node: None), quantizer])


EVERY_WAY = pytest.mark.parametrize(
    ("within", "is_qat"), [(alone, False), (composed, False), (alone, True), (composed, True)]
)


@EVERY_WAY
@pytest.mark.parametrize(
    ("target", "given", "expected"),
    [
        (ATEN.chunk.default, INT8, [0, 1]),
        (ATEN.chunk.default, [INT8, None], [0]),
        (ATEN.chunk.default, (None, INT8), [1]),
        (ATEN.topk.default, INT8, [0]),
        (ATEN.topk.default, [INT8, None], [0]),
    ],
)
def test_specs_on_operators_with_several_outputs(
    within: Any, is_qat: bool, target: Any, given: Any, expected: list[int]
) -> None:
    quantizer = within(at(target, lambda node: annotate(node, output=given)))
    _, converted = converted_by(quantizer, is_qat=is_qat)
    (node,) = [n for n in converted.graph.nodes if n.target is target]
    quantized = [q.args[0].args for q in quantize_nodes(converted)]
    assert sorted(quantized, key=lambda args: args[1]) == [(node, index) for index in expected]
    decision = next(d for d in tc.explain(converted) if d.path == node.name)
    assert decision.action == "quantized"


def itself(node: Node) -> Any:
    return SharedQuantizationSpec(node)


@EVERY_WAY
@pytest.mark.parametrize(
    ("write", "points"),
    [
        (at(ATEN.chunk.default, lambda n: annotate(n, output=[INT8])), ["'chunk'", "1 specs", "2 outputs"]),
        (at(ATEN.topk.default, lambda n: annotate(n, output=[INT8, INT8])), ["output 1 of topk", "int64"]),
        (
            at(ATEN.relu.default, lambda n: annotate(n, output=itself(n.args[0]))),
            ["output of relu", "output of add", "no spec observes"],
        ),
        (
            at(
                ATEN.relu.default,
                lambda n: annotate(n, {n.args[0]: itself(n)}, SharedQuantizationSpec((n.args[0], n))),
            ),
            ["round in a circle", "the edge (add -> relu)", "the output of relu"],
        ),
        (
            at(
                ATEN.relu.default,
                lambda n: annotate(n, output=QuantizationSpec(torch.int8, MinMaxObserver, -128, 127)),
            ),
            ["output of relu", "no qscheme"],
        ),
        (at(ATEN.relu.default, lambda n: annotate(n, output="int8")), ["output of relu is a str"]),
        (
            at(ATEN.relu.default, lambda n: annotate(n, output=int8_spec(PlaceholderObserver))),
            ["output of relu", "computes no qparams"],
        ),
        (
            at(
                ATEN.relu.default,
                lambda n: annotate(n, {next(iter(n.graph.nodes)): INT8}),
            ),
            ["x is not a positional input", "'relu'"],
        ),
        (
            at(ATEN.chunk.default, lambda n: [annotate(user, {n: INT8}) for user in n.users]),
            ["the edge (chunk -> getitem) is a", "cannot be quantized"],
        ),
    ],
)
def test_what_cannot_be_carried_out_is_refused(
    within: Any, is_qat: bool, write: ByHand, points: list[str]
) -> None:
    with pytest.raises(AnnotationError) as error:
        converted_by(within(write), is_qat=is_qat)
    for point in [*points, "Hint:"]:
        assert point in str(error.value)


def test_one_edge_told_twice() -> None:
    """Two getitems of one output are one tensor; the error names both."""

    def write(node: Node) -> None:
        with node.graph.inserting_after(node.args[0]):
            again = node.graph.call_function(operator.getitem, node.args[0].args)
        again.meta["val"] = node.args[0].meta["val"]
        node.args = (node.args[0], again)
        annotate_outputs(node, {node.args[0]: INT8, again: int8_spec(HistogramObserver)}, [None])

    with pytest.raises(AnnotationError, match=r"getitem and getitem_\w+ are the same input of node 'add'"):
        converted_by(at(ATEN.add.Tensor, write))
    with pytest.raises(AnnotationError, match="are the same input"):
        converted_by(
            at(
                ATEN.add.Tensor,
                lambda n: annotate_outputs(
                    n, {n.args[0]: INT8, Output(n.args[0].args[0], 0): int8_spec(HistogramObserver)}, [None]
                ),
            )
        )


def test_a_plain_prepare_checks_an_annotated_graph_with_one_call() -> None:
    class Checking(ByHand):
        def validate(self, model: GraphModule) -> None:
            tc.check_annotations(model)

    exported = torch.export.export(Halves(), (X,)).module()
    prepared = prepare_pt2e(
        exported,
        Checking(lambda n: annotate(n, output=INT8) if n.target is ATEN.chunk.default else None),
    )
    assert sum("activation_post_process" in str(n.target) for n in prepared.graph.nodes) == 2


@pytest.mark.parametrize("target", [ATEN.chunk.default, ATEN.topk.default])
def test_observers_of_outputs_keep_the_debug_handle(target: Any) -> None:
    """torchao's numeric comparison finds an observer by the ``from_node`` of the node it observes."""
    prepared, _ = converted_by(at(target, lambda n: annotate(n, output=INT8)))
    found = [(node.meta["from_node"], node.args[0]) for node, _ in observer_nodes(prepared)]
    assert len(found) == (2 if target is ATEN.chunk.default else 1)
    for handle, observed in found:
        assert isinstance(observed, Node)
        assert handle == observed.meta["from_node"]


# -- observers of torch.ao in specs

FAKE = legacy.FusedMovingAvgObsFakeQuantize


class Own(legacy.MinMaxObserver):
    """An observer of the user's own."""


@pytest.mark.parametrize(
    ("constructor", "reference"),
    [
        (legacy.MinMaxObserver, MinMaxObserver),
        (legacy.MinMaxObserver.with_args(eps=0.5), MinMaxObserver.with_args(eps=0.5)),
        (legacy.MinMaxObserver.with_args(eps=0.25).with_args(eps=0.5), MinMaxObserver.with_args(eps=0.5)),
        (MinMaxObserver.with_args(eps=0.25).with_args(eps=0.5), MinMaxObserver.with_args(eps=0.5)),
        (Own.with_args(eps=0.5), MinMaxObserver.with_args(eps=0.5)),
        (partial(legacy.MinMaxObserver, eps=0.5), MinMaxObserver.with_args(eps=0.5)),
        (
            legacy.FakeQuantize.with_args(observer=legacy.MinMaxObserver),
            FakeQuantize.with_args(observer=MinMaxObserver),
        ),
    ],
)
@pytest.mark.parametrize("by_hand", [True, False])
def test_observers_of_torch_ao(constructor: Any, reference: Any, by_hand: bool) -> None:
    """The q-dq is that of torchao's observer of the same name; two specs with equal settings share an
    observer."""

    def of(each: Any) -> Quantizer:
        spec, same = int8_spec(each), int8_spec(each)

        def write(node: Node) -> None:
            if by_hand:
                annotate(node, {node.args[0]: spec}, spec)
                annotate(node.args[0], output=same)
            else:
                annotate_outputs(node, {node.args[0]: spec}, [spec])
                annotate_outputs(node.args[0], {}, [same])

        return at(ATEN.relu.default, write)

    (_, ours), (_, theirs) = converted_by(of(constructor)), converted_by(of(reference))
    found = [node.args[1:] for node in quantize_nodes(ours)]
    assert len(found) == 2
    assert found == [node.args[1:] for node in quantize_nodes(theirs)]


def test_fake_quantizes_of_torch_ao_train() -> None:
    prepared, converted = converted_by(
        at(ATEN.relu.default, lambda n: annotate(n, output=int8_spec(FAKE))), is_qat=True
    )
    assert len(quantize_nodes(converted)) == 1
    assert tc.explain(prepared).find("relu")[0].action == "quantized"


@pytest.mark.parametrize(
    ("fake_quantize", "observer"),
    [
        (legacy.FixedQParamsFakeQuantize, legacy.FixedQParamsObserver),
        (pt2e.fake_quantize.FixedQParamsFakeQuantize, pt2e.observer.FixedQParamsObserver),
    ],
)
def test_fake_quantizes_of_fixed_qparams(fake_quantize: Any, observer: Any) -> None:
    """These fake-quantizes have no constructor arguments but their observer."""
    constructor = fake_quantize.with_args(observer=observer.with_args(scale=0.125, zero_point=3))
    _, converted = converted_by(
        at(ATEN.relu.default, lambda n: annotate(n, output=int8_spec(constructor))), is_qat=True
    )
    (quantize,) = quantize_nodes(converted)
    assert quantize.args[1:] == (0.125, 3, -128, 127, torch.int8)


@pytest.mark.parametrize("constructor", [legacy.MinMaxObserver, MinMaxObserver, PlaceholderObserver])
def test_dynamic_specs(constructor: Any) -> None:
    torch.manual_seed(0)
    dynamic = QuantizationSpec(torch.int8, constructor, -128, 127, torch.per_tensor_affine, is_dynamic=True)
    model = nn.Sequential(nn.Linear(8, 4)).eval()
    quantizer = at(ATEN.linear.default, lambda n: annotate(n, {n.args[0]: dynamic, n.args[1]: INT8}))
    prepared = tc.prepare_fx(model, quantizer, (X,))
    prepared(X)
    converted = tc.convert_to_reference_fx(prepared)
    assert 25 < sqnr(model(X), converted(X)) < 60
    assert 25 < sqnr(model(100 * X), converted(100 * X)) < 60


def test_an_observer_is_no_constructor() -> None:
    with pytest.raises(AnnotationError, match=r"is an observer: MinMaxObserver\(\.\.\.\)"):
        converted_by(at(ATEN.relu.default, lambda n: annotate(n, output=int8_spec(MinMaxObserver(eps=0.5)))))


def test_inputs_weights_and_results_are_said() -> None:
    """Annotations on placeholders, parameters and results, which belong to no operator, take effect and are
    in explain."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4)).eval()

    def write(node: Node) -> None:
        if node.op == "placeholder" or str(node.target).endswith("weight"):
            annotate(node, output=INT8)
        elif node.op == "output":
            annotate(node, {node.all_input_nodes[0]: INT8})

    prepared = tc.prepare_fx(model, ByHand(write), (X,))
    prepared(X)
    converted = tc.convert_to_reference_fx(prepared)
    assert len(quantize_nodes(converted)) == 2  # the weight is folded
    quantized = {d.kind for d in tc.explain(converted) if d.action == "quantized"}
    assert quantized == {"input", "output", "Linear"}


def test_an_output_that_nothing_reads_is_said() -> None:
    class First(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.chunk(2, 1)[0] + 1

    quantizer = at(ATEN.chunk.default, lambda n: annotate(n, output=[None, INT8]))
    static = torch.export.Dim.STATIC
    prepared = tc.prepare_fx(First(), quantizer, (X,), dynamic_shapes=([static, static],))
    prepared(X)
    converted = tc.convert_to_reference_fx(prepared)
    assert quantize_nodes(converted) == []
    (decision,) = (d for d in tc.explain(converted) if d.kind == "chunk.default")
    assert (decision.action, "where nothing reads it" in decision.reason) == ("float", True)


class Loop(nn.Module):
    """A ``scan`` written by the user."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.relu(self.fc(h) + x)
            return h, h.clone()

        return torch.sigmoid(scan(step, x[0], x)[1])


@pytest.mark.filterwarnings("ignore::torchq_compat.errors.QuantizationWarning")
@pytest.mark.parametrize(
    ("by_mapping", "is_qat"),
    [
        (False, False),
        pytest.param(True, False, marks=pytest.mark.slow),
        pytest.param(False, True, marks=pytest.mark.slow),
    ],
)
def test_bodies_of_loops_stay_float(by_mapping: bool, is_qat: bool) -> None:
    torch.manual_seed(0)

    def write(node: Node) -> None:
        if node.target in (ATEN.sigmoid.default, ATEN.relu.default):
            annotate(node, output=INT8)

    model, x = Loop().train(is_qat), torch.randn(5, 3, 8)
    mapping = (legacy.get_default_qat_qconfig_mapping if is_qat else legacy.get_default_qconfig_mapping)(
        "x86"
    )
    prepare = tc.prepare_qat_fx if is_qat else tc.prepare_fx
    fixed = (torch.export.Dim.STATIC,) * 3  # Each size that is tried compiles the scan anew.
    quantizer = mapping if by_mapping else ByHand(write)
    prepared = prepare(model, quantizer, (x,), dynamic_shapes=(fixed,))
    with torch.no_grad():
        prepared(x)
        converted = tc.convert_to_reference_fx(prepared.eval())
        assert 25 < sqnr(model(x), converted(x)) < 60
    assert [d.action for d in tc.explain(converted) if d.kind == "sigmoid.default"] == ["quantized"]


def test_a_quantizer_that_returns_nothing() -> None:
    """torchao goes on with the graph that it passed in."""

    class Silent(ByHand):
        def annotate(self, model: GraphModule) -> None:
            super().annotate(model)

    _, converted = converted_by(
        Silent(lambda n: annotate(n, output=INT8) if n.target is ATEN.relu.default else None)
    )
    assert len(quantize_nodes(converted)) == 1


def test_a_transform_that_returns_nothing() -> None:
    class Silent(ByHand):
        def transform_for_annotation(self, model: GraphModule) -> Any:
            return None

    _, converted = converted_by(
        Silent(lambda n: annotate(n, output=INT8) if n.target is ATEN.relu.default else None)
    )
    assert len(quantize_nodes(converted)) == 1


def test_a_class_among_the_children_is_an_error() -> None:
    inner = ComposableQuantizer([ByHand(lambda n: None), ByHand])
    with pytest.raises(ConfigError, match=r"quantizers\[1\].*Quantizer"):
        tc.prepare_fx(nn.Linear(8, 4).eval(), ComposableQuantizer([inner]), (X,))


def test_observers_that_quantize_nothing_are_said() -> None:
    spec = QuantizationSpec(torch.float32, PlaceholderObserver)
    with pytest.warns(QuantizationWarning, match="with observers that quantize nothing"):
        _, converted = converted_by(at(ATEN.relu.default, lambda n: annotate(n, output=spec)))
    assert quantize_nodes(converted) == []
    assert tc.explain(converted).find("relu")[0].action == "float"


# -- nested recurrent modules


class Mapped(nn.LSTM):
    """An LSTM that the custom config maps."""


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Mapped(6, 8), nn.LSTM(8, 8, 2), nn.GRU(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x)[0])[0])[0]


def test_each_recurrent_module_to_whom_it_belongs() -> None:
    """One is mapped by the custom config, one annotated by the Quantizer, one neither."""
    torch.manual_seed(0)
    model, batches = Three().eval(), [(torch.randn(5, 3, 6),) for _ in range(3)]
    mapping = PrepareCustomConfig().set_float_to_observed_mapping(Mapped, torch.ao.nn.quantizable.LSTM)
    with pytest.warns(QuantizationWarning, match="GRU at 'third' stays float: .*does not annotate its ops"):
        prepared = tc.prepare_fx(model, whole_op_lstm_quantizer(), batches[0], mapping)
    for batch in batches:
        prepared(*batch)
    converted = tc.convert_to_reference_fx(prepared)
    decisions = {d.path: d for d in tc.explain(converted)}
    assert "custom module" in decisions["first"].reason
    assert decisions["second"].reason == "annotated by WholeOpLSTMQuantizer"
    assert decisions["third"].action == "float"
    (lstm,) = [n for n in converted.graph.nodes if n.target is ATEN.lstm.input]
    assert len(lstm.all_input_nodes) == 3 + 8
    x = torch.randn(9, 2, 6)  # another length and batch
    assert 25 < sqnr(model(x), converted(x)) < 60


class Nested(nn.Module):
    def __init__(self, rnn: nn.Module) -> None:
        super().__init__()
        self.rnn = rnn

    def forward(self, x: Tensor) -> Any:
        return self.rnn(x)


class SideBySide(nn.Module):
    def __init__(self, rnns: list[nn.Module]) -> None:
        super().__init__()
        self.rnns = nn.ModuleList(rnns)

    def forward(self, x: Tensor) -> list[Any]:
        return [rnn(x) for rnn in self.rnns]


WHOLE: list[nn.Module] = [
    nn.LSTM(6, 8, 2, bidirectional=True, proj_size=3),
    nn.GRU(6, 8, batch_first=True),
    nn.RNN(6, 8, 2, nonlinearity="relu", bias=False),
    nn.RNN(6, 8),
]


@pytest.mark.parametrize("rnns", [*([rnn] for rnn in WHOLE), WHOLE], ids=[*map(str, WHOLE), "nested"])
@pytest.mark.parametrize("shape", [(7, 3, 6), (7, 6)], ids=["batch", "one sequence"])
def test_whole_operators_nested_and_root(rnns: list[nn.Module], shape: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    model, x = (SideBySide(rnns) if len(rnns) > 1 else rnns[0]).eval(), torch.randn(shape)
    prepared = tc.prepare_fx(model, whole_op_recurrent_quantizer(), (x,))
    for _ in range(4):
        prepared(torch.randn(shape))
    prepared(x)
    converted = tc.convert_to_reference_fx(prepared)
    for expected, result in zip(leaves(model(x)), leaves(converted(x)), strict=True):
        assert expected.shape == result.shape
        assert 25 < sqnr(expected, result) < 60
    kinds = [type(rnn).__name__ for rnn in rnns]
    decisions = [(d.kind, d.action) for d in tc.explain(converted) if d.kind in kinds]
    assert decisions == [(kind, "quantized") for kind in kinds]


def test_dropout_between_layers_follows_the_mode() -> None:
    """With dropout=1.0 the second layer sees zeros in training and its real input in evaluation."""
    torch.manual_seed(0)
    model, x = nn.LSTM(6, 8, 2, dropout=1.0), torch.randn(7, 3, 6)
    prepared = tc.prepare_qat_fx(model, whole_op_lstm_quantizer(), (x,))
    torch.testing.assert_close(prepared(x)[0], model(x)[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(prepared.eval()(x)[0], model.eval()(x)[0], rtol=0, atol=1e-6)
    assert not torch.allclose(prepared(x)[0], prepared.train()(x)[0])


def test_a_quantizer_that_stumbles_leaves_the_module_float() -> None:
    def stumble(node: Node) -> None:
        if node.target is ATEN.gru.input:
            raise IndexError("list index out of range")

    with pytest.warns(QuantizationWarning, match=r"ByHand fails on its ops: IndexError: list index"):
        prepared = tc.prepare_fx(Nested(nn.GRU(6, 8)).eval(), ByHand(stumble), (torch.randn(5, 3, 6),))
    assert tc.explain(prepared).find("rnn")[0].action == "float"


class OwnForward(nn.LSTM):
    def forward(self, x: Tensor, hx: Any = None) -> Any:
        return super().forward(2 * x, hx)


def test_a_module_that_computes_something_else_is_not_written_as_the_operator() -> None:
    torch.manual_seed(0)
    model, x = Nested(OwnForward(6, 8)).eval(), torch.randn(5, 3, 6)
    with pytest.warns(QuantizationWarning, match="OwnForward at 'rnn' stays float"):
        prepared = tc.prepare_fx(model, whole_op_lstm_quantizer(), (x,))
    torch.testing.assert_close(prepared(x)[0], model(x)[0], rtol=0, atol=1e-6)


def test_a_bad_spec_on_a_recurrent_operator_is_an_error() -> None:
    quantizer = at(ATEN.gru.input, lambda n: annotate_outputs(n, {}, [INT8]))
    with pytest.raises(AnnotationError, match=r"1 output specs were given for node .* has 2 outputs"):
        tc.prepare_fx(Nested(nn.GRU(6, 8)).eval(), quantizer, (torch.randn(5, 3, 6),))


def test_a_quantizer_that_rewrites_the_operator_has_the_module() -> None:
    """Like a Quantizer that decomposes what it cannot quantize as a whole before it annotates."""

    class Rewriting(ByHand):
        def transform_for_annotation(self, model: GraphModule) -> GraphModule:
            for node in [n for n in model.graph.nodes if n.target is ATEN.gru.input]:
                first = next(user for user in node.users if user.args[1] == 0)
                with model.graph.inserting_before(first):
                    again = model.graph.call_function(run_gru, node.args)
                again.meta = dict(first.meta)
                first.replace_all_uses_with(again)
            model.graph.eliminate_dead_code()
            model.recompile()
            return model

    class First(Nested):
        def forward(self, x: Tensor) -> Tensor:
            return self.rnn(x)[0]

    quantizer = Rewriting(lambda n: annotate(n, output=INT8) if n.target is run_gru else None)
    model, x = First(nn.GRU(6, 8)).eval(), torch.randn(5, 3, 6)
    prepared = tc.prepare_fx(model, quantizer, (x,))
    prepared(x)
    converted = tc.convert_to_reference_fx(prepared)
    assert len(quantize_nodes(converted)) == 1
    assert 30 < sqnr(model(x), converted(x)) < 60


def run_gru(*args: Any) -> Tensor:
    return ATEN.gru.input(*args)[0]


class Sliced(nn.Module):
    """Slices as written by users: with free sizes torch.export makes two slices of ``x[:, 1:3]``."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        whole = x[:]
        whole += 1
        return torch.relu(x[:, 1:3]), x[..., :2], whole


def test_a_slice_is_one_operator() -> None:
    def write(node: Node) -> None:
        if node.target is ATEN.slice.Tensor:
            annotate(node, output=INT8)

    prepared = tc.prepare_fx(Sliced(), ByHand(write), (X.clone(),))
    prepared(X.clone())
    converted = tc.convert_to_reference_fx(prepared)
    assert len(quantize_nodes(converted)) == 2
    expected, found = (leaves(each(X.clone())) for each in (Sliced(), converted))
    assert torch.equal(expected[2], found[2])
    assert all(20 < sqnr(a, b) < 60 for a, b in zip(expected[:2], found[:2], strict=True))


class Computing(nn.Module):
    def __init__(self, compute: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.compute = compute

    def forward(self, x: Tensor) -> list[Tensor]:
        return list(self.compute(x))


@pytest.mark.parametrize(
    ("compute", "floats"),
    [
        (lambda x: torch.var_mean(x, dim=1, correction=0), 2),
        pytest.param(lambda x: torch.native_layer_norm(x, [8], None, None, 1e-5), 3, marks=pytest.mark.slow),
        pytest.param(lambda x: torch.linalg.qr(x), 2, marks=pytest.mark.slow),
        pytest.param(lambda x: torch.frexp(x), 1, marks=pytest.mark.slow),
        pytest.param(lambda x: x.tensor_split(3, 1), 3, marks=pytest.mark.slow),
        pytest.param(lambda x: torch.std_mean(x, 0, keepdim=True), 2, marks=pytest.mark.slow),
    ],
)
def test_one_spec_for_every_float_output(compute: Any, floats: int) -> None:
    """For operators in no table the example values tell which outputs are floats."""

    def write(node: Node) -> None:
        if node.op == "call_function" and isinstance(node.meta.get("val"), (tuple, list)):
            annotate(node, output=INT8)

    static = torch.export.Dim.STATIC
    model = Computing(compute)
    prepared = tc.prepare_fx(model, ByHand(write), (X,), dynamic_shapes=([static, static],))
    prepared(X)
    converted = tc.convert_to_reference_fx(prepared)
    assert len(quantize_nodes(converted)) == floats
    for expected, found in zip(model(X), converted(X), strict=True):
        assert expected.dtype is found.dtype
        assert 35 < sqnr(expected, found) < 70 or not expected.is_floating_point()


def of_weights(constructor: Any) -> Quantizer:
    weight = QuantizationSpec(torch.int8, constructor, -127, 127, torch.per_channel_symmetric, ch_axis=0)
    return at(ATEN.linear.default, lambda n: annotate(n, {n.args[0]: INT8, n.args[1]: weight}, INT8))


PER_CHANNEL = legacy.MovingAveragePerChannelMinMaxObserver


@pytest.mark.parametrize(
    ("constructor", "reference", "is_qat"),
    [
        (legacy.default_per_channel_weight_observer, PerChannelMinMaxObserver, False),
        (
            legacy.FakeQuantize.with_args(observer=PER_CHANNEL),
            FakeQuantize.with_args(observer=MovingAveragePerChannelMinMaxObserver),
            True,
        ),
    ],
)
def test_observers_of_torch_ao_by_channel(constructor: Any, reference: Any, is_qat: bool) -> None:
    torch.manual_seed(0)
    model, found = nn.Sequential(nn.Linear(8, 5)), []
    for each in (constructor, reference):
        prepared = (tc.prepare_qat_fx if is_qat else tc.prepare_fx)(
            model.train(is_qat), of_weights(each), (X,)
        )
        prepared(X)
        found.append(tc.convert_to_reference_fx(prepared.eval()))
    ours, theirs = found
    assert sum("dequantize_per_channel" in str(node.target) for node in ours.graph.nodes) == 1
    assert torch.equal(ours(X), theirs(X))
    assert 25 < sqnr(model(X), ours(X)) < 60


def test_two_children_of_a_composable_quantizer_that_annotate_one_node() -> None:
    one, other = (at(ATEN.relu.default, lambda node: annotate(node, output=INT8)) for _ in range(2))
    with pytest.raises(AnnotationError, match="ByHand changed the annotation of 'relu'") as error:
        converted_by(ComposableQuantizer([one, other]))
    assert "(ByHand, ByHand)" in str(error.value)
    assert "let one of them" in str(error.value.hint)
