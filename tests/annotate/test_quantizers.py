"""PT2E quantizers in place of FX's configuration, and FX's configuration in place of PT2E quantizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import (
    QConfigMapping,
    default_dynamic_qconfig,
    float_qparams_weight_only_qconfig,
    get_default_qat_qconfig_mapping,
    get_default_qconfig_mapping,
)
from torch.fx import GraphModule
from torchao.quantization.pt2e import HistogramObserver, PerChannelMinMaxObserver
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_qat_pt2e
from torchao.quantization.pt2e.quantizer import (
    ComposableQuantizer,
    QuantizationAnnotation,
    QuantizationSpec,
    Quantizer,
)
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config,
)

import torchq_compat as tc
from tests.helpers.oracle import (
    CONVERT_LSTM,
    MAP_LSTM,
    activation_qparams,
    by_us,
    calibrate,
    op_decisions,
    quantize_nodes,
    sqnr,
)
from tests.helpers.quantizers import prepared_by_torchao
from tests.parity.models import MODELS
from torchq_compat.errors import ConfigError
from torchq_compat.support.decisions import Action


def converted_by_torchao(model: nn.Module, quantizer: Quantizer, batches: list[Any]) -> GraphModule:
    return convert_pt2e(prepared_by_torchao(model, quantizer, batches))


@pytest.mark.parametrize("name", ["resnet", "transformer", "inplace_arithmetic", "linear_bn_leaky_relu"])
def test_translated_quantizer_in_a_plain_torchao_call(name: str) -> None:
    """The graph has the same ops and qparams as with prepare_fx, and the results are bit-equal."""
    torch.manual_seed(0)
    model = MODELS[name].make().eval()
    batches = [MODELS[name].batch() for _ in range(2)]
    mapping = get_default_qconfig_mapping("qnnpack")
    quantizer = tc.quantizer_from(mapping)
    theirs = converted_by_torchao(model, quantizer, batches)
    prepared, ours = by_us(model, mapping, batches)
    assert activation_qparams(theirs) == activation_qparams(ours)
    with torch.no_grad():
        assert torch.equal(theirs(*batches[0]), ours(*batches[0]))
    # Batch norms are folded before a quantizer sees the graph, so a plain torchao call reports none.
    assert [(d.path, d.action) for d in quantizer.report] == [
        (d.path, d.action) for d in op_decisions(prepared) if d.action is not Action.FOLDED
    ]


@pytest.mark.parametrize(
    "mapping",
    [
        QConfigMapping().set_object_type(nn.Linear, default_dynamic_qconfig),
        QConfigMapping().set_object_type(nn.Embedding, float_qparams_weight_only_qconfig),
    ],
    ids=["dynamic", "weight only"],
)
def test_translated_quantizer_without_calibration(mapping: QConfigMapping) -> None:
    torch.manual_seed(0)
    model, batch = MODELS["embedding"].make().eval(), MODELS["embedding"].batch()
    converted = converted_by_torchao(model, tc.quantizer_from(mapping), [batch])
    assert 30 < sqnr(model(*batch), converted(*batch)) < 60
    assert any(value.dtype in (torch.int8, torch.uint8) for value in converted.buffers())


@pytest.mark.slow
def test_translated_quantizer_trains() -> None:
    torch.manual_seed(0)
    model = MODELS["conv2_bn_relu"].make().train()
    batch = MODELS["conv2_bn_relu"].batch()
    mapping = get_default_qat_qconfig_mapping("qnnpack")
    prepared = prepare_qat_pt2e(torch.export.export(model, batch).module(), tc.quantizer_from(mapping))
    ours = tc.prepare_qat_fx(model, mapping, batch)
    torch.testing.assert_close(prepared(*batch), ours(*batch), rtol=0, atol=1e-6)


def test_translated_quantizer_refuses_bad_configuration() -> None:
    with pytest.raises(ConfigError, match="unknown key 'object_types'"):
        tc.quantizer_from({"object_types": []})


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.lstm = nn.LSTM(16, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(torch.relu(self.embed(x)))[0])


class LinearQuantizer(Quantizer):
    """A small quantizer as users write them: 8-bit linears, activations -100..100."""

    activation = QuantizationSpec(
        torch.int8, HistogramObserver.with_args(eps=2**-12), -100, 100, torch.per_tensor_affine
    )
    weight = QuantizationSpec(
        torch.int8,
        PerChannelMinMaxObserver.with_args(eps=2**-12),
        -127,
        127,
        torch.per_channel_symmetric,
        ch_axis=0,
    )

    def annotate(self, model: GraphModule) -> GraphModule:
        for node in model.graph.nodes:
            if node.target is torch.ops.aten.linear.default:
                node.meta[Q_ANNOTATION_KEY] = QuantizationAnnotation(
                    input_qspec_map={node.args[0]: self.activation, node.args[1]: self.weight},
                    output_qspec=self.activation,
                    _annotated=True,
                )
        return model

    def validate(self, model: GraphModule) -> None:
        pass


def x86_inductor() -> Quantizer:
    return X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config())


@pytest.mark.parametrize("make", [x86_inductor, LinearQuantizer], ids=["x86 inductor", "own"])
def test_quantizer_in_place_of_a_mapping_gives_torchaos_result(make: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    batches = [(torch.randn(6, 8),) for _ in range(2)]
    prepared, ours = by_us(model, make(), batches)
    theirs = converted_by_torchao(model, make(), batches)
    assert activation_qparams(ours) == activation_qparams(theirs) != set()
    assert [node.args[3:5] for node in quantize_nodes(ours)] == [
        node.args[3:5] for node in quantize_nodes(theirs)
    ]
    assert torch.equal(ours(*batches[0]), theirs(*batches[0]))
    name = type(make()).__name__
    reasons = {d.path: d.reason for d in tc.explain(prepared) if d.action == "quantized"}
    assert {"0", "2"} <= reasons.keys()
    assert set(reasons.values()) == {f"annotated by {name}"}


@pytest.mark.parametrize("make", [x86_inductor, LinearQuantizer], ids=["x86 inductor", "own"])
def test_quantizer_for_the_rest_of_a_model_with_a_custom_module(make: Any) -> None:
    torch.manual_seed(0)
    model = Tagger().eval()
    batches = [(torch.randn(5, 3, 8),) for _ in range(3)]
    prepared = tc.prepare_fx(model, make(), batches[0], MAP_LSTM)
    calibrate(prepared, batches)
    converted = tc.convert_fx(prepared, CONVERT_LSTM)
    x = torch.randn(9, 2, 8)
    assert 25 < sqnr(model(x), converted(x)) < 50
    actions = {d.path: d.action for d in tc.explain(converted)}
    assert actions["embed"] == actions["head"] == actions["lstm"] == "quantized"
    assert {value.dtype for value in converted.lstm.state_dict().values()} >= {torch.int8}


def test_quantizer_in_training() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4))
    quantizer = X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config(is_qat=True))
    trained = tc.prepare_qat_fx(model, quantizer, (torch.randn(6, 8),))
    trained(torch.randn(6, 8)).sum().backward()
    assert all(parameter.grad is not None for parameter in trained.parameters())
    torch.optim.SGD(trained.parameters(), lr=0.1).step()
    assert len(quantize_nodes(tc.convert_fx(trained))) == 1


def test_non_traceable_modules_stay_float_under_a_quantizer() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8))).eval()
    config = {"non_traceable_module_name": ["1"]}
    prepared = tc.prepare_fx(model, LinearQuantizer(), (torch.randn(6, 8),), config)
    assert {d.path: d.action for d in op_decisions(prepared)} == {"0": "quantized", "1": "float"}


def test_what_a_quantizer_cannot_be_combined_with() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8)).eval(), torch.randn(6, 8)
    with pytest.raises(ConfigError, match="backend_config beside a torchao Quantizer"):
        tc.prepare_fx(model, LinearQuantizer(), (x,), backend_config={"name": "", "configs": []})
    prepared = tc.prepare_fx(model, LinearQuantizer(), (x,))
    prepared(x)
    with pytest.raises(ConfigError, match="prepared with a torchao Quantizer"):
        tc.convert_fx(prepared, qconfig_mapping=QConfigMapping())


def test_translated_quantizer_in_a_composition_leaves_annotated_ops_alone() -> None:
    """The first linear is LinearQuantizer's (-100 to 100), the rest is FX's; neighbours share qparams at the
    seam."""

    class First(LinearQuantizer):
        def annotate(self, model: GraphModule) -> GraphModule:
            nodes = [n for n in model.graph.nodes if n.target is torch.ops.aten.linear.default]
            nodes[0].meta[Q_ANNOTATION_KEY] = QuantizationAnnotation(
                input_qspec_map={nodes[0].args[0]: self.activation, nodes[0].args[1]: self.weight},
                _annotated=True,
            )
            return model

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)).eval()
    batches = [(torch.randn(6, 8),) for _ in range(2)]
    translated = tc.quantizer_from(get_default_qconfig_mapping("qnnpack"))
    converted = converted_by_torchao(model, ComposableQuantizer([First(), translated]), batches)
    ranges = [node.args[3:] for node in quantize_nodes(converted)]
    assert ranges[0] == (-100, 100, torch.int8)
    assert ranges[1:] == [(0, 255, torch.uint8)] * 3
    reasons = [decision.reason for decision in translated.report]
    assert "before this one" in reasons[0]
    assert all("before this one" not in reason for reason in reasons[1:])
    assert 20 < sqnr(model(*batches[0]), converted(*batches[0])) < 50
