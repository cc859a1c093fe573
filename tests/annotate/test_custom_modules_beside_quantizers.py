"""What a user's Quantizer is given by prepare_fx, and what custom modules beside it are quantized with."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.ao.quantization as legacy
import torchao.quantization.pt2e.quantizer.x86_inductor_quantizer as x86
from torch import Tensor, fx, nn
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.observer import MovingAverageMinMaxObserver
from torchao.quantization.pt2e.quantizer import Quantizer

import torchq_compat as tc
from tests.helpers.once import made_once
from tests.helpers.oracle import leaves, sqnr
from tests.helpers.quantizers import ATEN, ByHand, annotate, int8_spec
from torchq_compat.errors import ConfigError, InputError, QuantizationWarning

MAPPED = tc.get_default_prepare_custom_config


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.fc = nn.LSTM(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, (_, c) = self.lstm(x)
        return self.fc(y), c


@made_once
def tagger() -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    return Tagger().eval(), [torch.randn(6, 3, 8) for _ in range(4)]


def on_linears(node: Node, **specs: Any) -> None:
    if node.target is ATEN.linear.default:
        x, weight = node.all_input_nodes[:2]
        annotate(node, {x: specs["x"], weight: specs["weight"]}, specs["x"])


def of_linears(x: Any = None, weight: Any = None) -> ByHand:
    given = {"x": x or int8_spec(), "weight": weight or int8_spec(qscheme=torch.per_tensor_symmetric)}
    return ByHand(lambda node: on_linears(node, **given))


class Tracing(Quantizer):
    """Traces the graph anew before it annotates, as passes of exported programs do; knows operators only."""

    def __init__(self, inner: Quantizer, *, only_numbers: bool = False) -> None:
        self.inner = inner
        self.only_numbers = only_numbers
        self.given: list[str] = []

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        self.given = [node.op for node in model.graph.nodes]
        graph = fx.Graph()
        values: dict[Node, Any] = {}
        for node in model.graph.nodes:
            if node.op == "call_module":
                raise NotImplementedError("call_module is not supported")
            if self.only_numbers and node.target is ATEN.sym_size.int:
                raise ValueError("sizes have to be numbers")
            value = leaves(node.meta.get("val"))
            if value and node.op == "call_function" and node.target is not operator.getitem:
                with value[0].fake_mode:
                    args = fx.node.map_arg(node.args, lambda each: each.meta["val"])
                    assert len(leaves(node.target(*args, **node.kwargs))) == len(value)
            values[node] = graph.node_copy(node, values.__getitem__)
        graph.set_codegen(model.graph._codegen)
        return GraphModule(model, graph)

    def annotate(self, model: GraphModule) -> GraphModule:
        return self.inner.annotate(model)

    def validate(self, model: GraphModule) -> None:
        assert not any(node.op == "call_module" for node in model.graph.nodes)


@pytest.mark.parametrize("config", [None, MAPPED()], ids=["float", "mapped"])
def test_a_quantizer_is_given_operators_only_and_may_trace_them_anew(config: Any) -> None:
    model, batches = tagger()
    quantizer = Tracing(of_linears())
    expected = []
    for each in (of_linears(), quantizer):
        if config is None:
            with pytest.warns(QuantizationWarning, match="'lstm' stays float"):
                prepared = tc.prepare_fx(model, each, (batches[0],))
        else:
            prepared = tc.prepare_fx(model, each, (batches[0],), config)
        for batch in batches:
            prepared(batch)
        converted = tc.convert_to_reference_fx(prepared)
        expected.append(leaves(converted(torch.cat(batches))))
        assert all(len(value) for value in expected[-1])
    assert "call_module" not in quantizer.given
    assert "call_function" in quantizer.given
    assert all(map(torch.equal, *expected))


def test_sizes_are_fixed_for_a_quantizer_that_needs_it_and_that_is_told() -> None:
    model, batches = tagger()

    class OfRecurrences(ByHand):
        def annotate(self, model: GraphModule) -> GraphModule:
            for node in model.graph.find_nodes(op="call_function", target=ATEN.lstm.input):
                annotate(node, {node.args[0]: int8_spec()}, int8_spec())
            return model

        def prepare_obs_or_fq_callback(self, model: GraphModule, observers: dict[Any, Any]) -> None:
            if any(isinstance(size, torch.SymInt) for point in observers for size in shape_of(point)):
                raise ValueError("sizes have to be numbers")

    def shape_of(point: Any) -> Any:
        node = point[0] if isinstance(point, tuple) else point
        return node.meta["val"].shape

    free = torch.export.Dim.AUTO
    with pytest.warns(QuantizationWarning, match=r"OfRecurrences needs fixed sizes \(ValueError: sizes"):
        tc.prepare_fx(
            model, OfRecurrences(lambda node: None), (batches[0],), dynamic_shapes=({0: free, 1: free},)
        )
    quantizer = Tracing(OfRecurrences(lambda node: None), only_numbers=True)
    with pytest.warns(QuantizationWarning, match=r"Tracing needs fixed sizes \(ValueError: sizes have"):
        prepared = tc.prepare_fx(model, quantizer, (batches[0],))
    (decision,) = (each for each in tc.explain(prepared) if each.code == "TQ329")
    assert decision.action == "fixed"
    prepared(batches[1])
    with pytest.raises(InputError):
        prepared(torch.randn(7, 3, 8))
    converted = tc.convert_to_reference_fx(prepared)
    assert all(
        25 < sqnr(*pair) < 60
        for pair in zip(leaves(model(batches[1])), leaves(converted(batches[1])), strict=True)
    )


def test_what_a_quantizer_raises_is_raised() -> None:
    model, batches = tagger()

    class Failing(ByHand):
        def validate(self, model: GraphModule) -> None:
            raise LookupError("no such table")

    with pytest.raises(LookupError, match="no such table"):
        tc.prepare_fx(model, Failing(lambda node: None), (batches[0],), MAPPED())


def worst(quantizer: Quantizer, model: nn.Module, of: int = 0, **given: Any) -> tuple[float, Any]:
    batches = tagger()[1]
    prepared = tc.prepare_fx(model, quantizer, (batches[0],), MAPPED(), **given)
    for batch in batches[:3]:
        prepared(batch)
    converted = tc.convert_to_reference_fx(prepared)
    decision, *_ = tc.explain(converted).find("lstm")
    return sqnr(model(batches[3])[of], converted(batches[3])[of]), decision


def test_custom_modules_have_the_specs_of_the_quantizer_or_the_whole_range() -> None:
    model, _ = tagger()
    reduced, decision = worst(
        of_linears(), model, of=1, custom_module_qconfig=legacy.get_default_qconfig("x86")
    )
    assert decision.values[0].dtype is torch.uint8
    inductor = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
    for quantizer, source, dtype in (
        (of_linears(), "ByHand", torch.int8),
        (inductor, "X86InductorQuantizer", torch.uint8),
        (ByHand(lambda node: None), "the default with the whole range", torch.uint8),
    ):
        measured, decision = worst(quantizer, model)
        assert decision.values[0].dtype is dtype
        assert decision.reason.endswith(f"qconfig from {source}")
        assert measured > reduced + 0.5


def test_a_moving_average_of_the_quantizer_does_not_run_over_time_steps() -> None:
    model, _ = tagger()
    averaged, _ = worst(of_linears(x=int8_spec(MovingAverageMinMaxObserver)), model, of=1)
    whole, _ = worst(of_linears(), model, of=1)
    assert averaged > whole - 1


def test_the_qconfig_of_a_module_is_honoured() -> None:
    model, batches = Tagger().eval(), tagger()[1]
    model.lstm.qconfig = None
    prepared = tc.prepare_fx(model, of_linears(), (batches[0],), MAPPED())
    (decision,) = tc.explain(prepared).find("lstm")
    assert decision.action == "float"
    assert decision.reason.startswith("its qconfig is None (module.qconfig)")
    model.lstm.qconfig = legacy.QConfig(
        activation=legacy.MinMaxObserver.with_args(dtype=torch.qint8), weight=legacy.default_weight_observer
    )
    # As where torch.ao propagates QConfigs, it wins over those given for all.
    of_all = legacy.get_default_qconfig("x86")
    for given in ({}, {"custom_module_qconfig": of_all}, {"custom_module_qconfig": {"": of_all}}):
        _, decision = worst(of_linears(), model, **given)
        assert decision.values[0].dtype is torch.int8
        assert decision.reason.endswith("qconfig from module.qconfig")
    with pytest.raises(ConfigError, match="custom_module_qconfig"):
        tc.prepare_fx(
            model,
            legacy.get_default_qconfig_mapping(),
            (batches[0],),
            custom_module_qconfig=model.lstm.qconfig,
        )
