"""The script of the PyTorch issue on operators with several outputs (RNN, LSTM), and the blocks of the
tutorial on Quantizers, as literally as torch 2.13 allows: torch.export in the place of
``capture_pre_autograd_graph``, classes of specs from torchao, observers from torch.ao as they were imported.
"""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.ao.quantization.observer import HistogramObserver, MinMaxObserver
from torch.fx.passes.utils.source_matcher_utils import get_source_partitions
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer import (
    ComposableQuantizer,
    DerivedQuantizationSpec,
    FixedQParamsQuantizationSpec,
    QuantizationAnnotation,
    QuantizationSpec,
    Quantizer,
    SharedQuantizationSpec,
)

import torchq_compat as tc
from tests.helpers.oracle import leaves, sqnr
from torchq_compat.graph.observed_graph import observer_nodes

ATEN, OPS = torch.ops.aten, torch.ops.quantized_decomposed
QUANTIZE, DEQUANTIZE = OPS.quantize_per_tensor.default, OPS.dequantize_per_tensor.default


# -- the issue


@dataclass
class PartitionAnchors:
    inputs: list[Any] = field(default_factory=list)
    weights: list[Any] = field(default_factory=list)
    biases: list[Any] = field(default_factory=list)
    output: list[Any] = field(default_factory=list)


def get_bias_qparams(obs_or_fqs: list[Any]) -> tuple[Tensor, Tensor]:
    """Of executorch.backends.cadence.aot.quantizer.utils."""
    act_scale, _ = obs_or_fqs[0].calculate_qparams()
    weight_scale, _ = obs_or_fqs[1].calculate_qparams()
    bias_scale = act_scale * weight_scale
    return bias_scale, torch.zeros_like(bias_scale, dtype=torch.int32)


class LstmInputPattern:
    def get_anchors(self, lstm_node: fx.Node) -> PartitionAnchors:
        args: Any = lstm_node.args
        hidden_state_0, cell_state_0 = args[1][0], args[1][1]
        inputs = [(lstm_node, args[0]), (lstm_node, hidden_state_0), (lstm_node, cell_state_0)]
        weights = [(lstm_node, node) for node in args[2] if "weight" in node.target]
        weights_edges = [(x, y) for y, x in weights]
        bias_qspec = DerivedQuantizationSpec(
            derived_from=[
                (args[0], lstm_node),
                (hidden_state_0, lstm_node),
                (cell_state_0, lstm_node),
                *weights_edges,
            ],
            derive_qparams_fn=get_bias_qparams,
            dtype=torch.int32,
            quant_min=-(2**31),
            quant_max=2**31 - 1,
            qscheme=torch.per_tensor_affine,
        )
        biases = [(lstm_node, node, bias_qspec) for node in args[2] if "bias" in node.target]
        return PartitionAnchors(
            inputs=inputs, weights=weights, biases=biases, output=[(lstm_node,), (lstm_node,), (lstm_node,)]
        )


class CustomAtenQuantizer(Quantizer):
    def __init__(self, pattern: LstmInputPattern, activation: Any, weight: Any) -> None:
        super().__init__()
        self.pattern = pattern
        self.activation, self.weight = activation, weight

    def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
        for lstm_node in [node for node in model.graph.nodes if node.target is ATEN.lstm.input]:
            anchors = self.pattern.get_anchors(lstm_node)
            for output, *custom_spec in anchors.output:
                output.meta["quantization_annotation"] = QuantizationAnnotation(
                    output_qspec=(custom_spec[0] if custom_spec else self.activation),
                    _annotated=True,
                )

            def annotate_inputs(inputs: list[Any], spec: QuantizationSpec | None) -> None:
                for node, input_node, *custom_spec in inputs:
                    annotation = node.meta.get(
                        "quantization_annotation", QuantizationAnnotation(_annotated=True)
                    )
                    annotation.input_qspec_map[input_node] = custom_spec[0] if custom_spec else spec
                    node.meta["quantization_annotation"] = annotation

            annotate_inputs(anchors.inputs, self.activation)
            annotate_inputs(anchors.weights, self.weight)
            annotate_inputs(anchors.biases, None)
        return model

    def validate(self, model: fx.GraphModule) -> None:
        pass


act_qspec = QuantizationSpec(
    dtype=torch.int8,
    quant_min=-128,
    quant_max=127,
    qscheme=torch.per_tensor_affine,
    is_dynamic=False,
    observer_or_fake_quant_ctr=HistogramObserver.with_args(eps=2**-12),
)

wgt_qspec = QuantizationSpec(
    dtype=torch.int8,
    quant_min=-128,
    quant_max=127,
    qscheme=torch.per_tensor_symmetric,
    is_dynamic=False,
    observer_or_fake_quant_ctr=MinMaxObserver,
    ch_axis=0,
)


class CustomComposableQuantizer(ComposableQuantizer):
    def __init__(self) -> None:
        super().__init__([CustomAtenQuantizer(LstmInputPattern(), act_qspec, wgt_qspec)])

    def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
        for quantizer in self.quantizers:
            quantizer.annotate(model)
        return model


class Checked(CustomComposableQuantizer):
    """The one line that a plain ``prepare_pt2e`` needs."""

    def validate(self, model: fx.GraphModule) -> None:
        tc.check_annotations(model)


def by_torchao(model: nn.Module, example: tuple[Tensor, ...], batches: list[Any], quantizer: Any) -> Any:
    m = prepare_pt2e(torch.export.export(model, example).module(), quantizer)
    for data in batches:
        m(*data)
    return len(list(observer_nodes(m))), convert_pt2e(m)


def by_prepare_fx(model: nn.Module, example: tuple[Tensor, ...], batches: list[Any], quantizer: Any) -> Any:
    m = tc.prepare_fx(model, quantizer, example)
    for data in batches:
        m(*data)
    return len(list(observer_nodes(m))), tc.convert_to_reference_fx(m)


@pytest.mark.parametrize(
    ("flow", "quantizer"), [(by_torchao, Checked), (by_prepare_fx, CustomComposableQuantizer)]
)
def test_the_script_of_the_issue(flow: Any, quantizer: Any) -> None:
    """Its complaint was: no quantize nodes after lstm.input."""
    torch.manual_seed(0)
    input_shape = (1, 64)
    model = nn.LSTM(64, hidden_size=16, bidirectional=False, bias=True, num_layers=1).eval()
    random_tensors = (torch.randn(input_shape),)
    calibration_inputs = [random_tensors, random_tensors]
    example_input = (torch.ones(input_shape),)

    observers, m = flow(model, example_input, calibration_inputs, quantizer())

    assert observers == 3 + 2 + 2 + 3  # inputs, weights, biases, outputs
    targets = [node.target for node in m.graph.nodes]
    assert targets.count(QUANTIZE) == 3 + 3  # weights and biases are folded
    assert targets.count(DEQUANTIZE) == 3 + 2 + 2 + 3
    assert targets.count(operator.getitem) == 3
    (lstm,) = [node for node in m.graph.nodes if node.target is ATEN.lstm.input]
    for getitem in lstm.users:
        assert [user.target for user in getitem.users] == [QUANTIZE]
    for expected, result in zip(leaves(model(*random_tensors)), leaves(m(*random_tensors)), strict=True):
        assert 25 < sqnr(expected, result) < 60


# -- the tutorial

act_quantization_spec = QuantizationSpec(
    dtype=torch.int8,
    quant_min=-128,
    quant_max=127,
    qscheme=torch.per_tensor_affine,
    is_dynamic=False,
    observer_or_fake_quant_ctr=HistogramObserver.with_args(eps=2**-12),
)
weight_quantization_spec = QuantizationSpec(
    dtype=torch.int8,
    quant_min=-127,
    quant_max=127,
    qscheme=torch.per_tensor_symmetric,
    observer_or_fake_quant_ctr=MinMaxObserver.with_args(eps=2**-12),
)


def derive_qparams_fn(obs_or_fqs: list[Any]) -> tuple[Tensor, Tensor]:
    assert len(obs_or_fqs) == 2, (
        f"Expecting two obs/fqs, one for activation and one for weight, got: {len(obs_or_fqs)}"
    )
    act_obs_or_fq = obs_or_fqs[0]
    weight_obs_or_fq = obs_or_fqs[1]
    act_scale, _ = act_obs_or_fq.calculate_qparams()
    weight_scale, _ = weight_obs_or_fq.calculate_qparams()
    return torch.tensor([act_scale * weight_scale]).to(torch.float32), torch.tensor([0]).to(torch.int32)


class BackendQuantizer(Quantizer):
    """Sections 1 to 4 of the tutorial, put together as section 5 says."""

    def __init__(self) -> None:
        super().__init__()
        self.additions = 0

    def annotate(self, gm: fx.GraphModule) -> fx.GraphModule:
        self.annotate_add(gm)
        self.annotate_sigmoid(gm)
        self.annotate_conv(gm)
        return gm

    def annotate_add(self, gm: fx.GraphModule) -> None:
        partitions = get_source_partitions(gm.graph, [operator.add, torch.add])
        add_partitions = list(itertools.chain(*partitions.values()))
        for add_partition in add_partitions:
            add_node = add_partition.output_nodes[0]
            input_act0 = add_node.args[0]
            share_qparams_with_input_act0_qspec = SharedQuantizationSpec((input_act0, add_node))
            input_qspec_map = {input_act0: act_quantization_spec}
            input_act1 = add_node.args[1]
            if isinstance(input_act1, fx.Node):
                input_qspec_map[input_act1] = share_qparams_with_input_act0_qspec
            add_node.meta["quantization_annotation"] = QuantizationAnnotation(
                input_qspec_map=input_qspec_map,
                output_qspec=act_quantization_spec,
                _annotated=True,
            )
        self.additions = len(add_partitions)

    def annotate_sigmoid(self, gm: fx.GraphModule) -> None:
        for sigmoid_node in [node for node in gm.graph.nodes if node.target is ATEN.sigmoid.default]:
            input_act = sigmoid_node.args[0]
            act_qspec = FixedQParamsQuantizationSpec(
                dtype=torch.uint8,
                quant_min=0,
                quant_max=255,
                qscheme=torch.per_tensor_affine,
                scale=1.0 / 256.0,
                zero_point=0,
            )
            sigmoid_node.meta["quantization_annotation"] = QuantizationAnnotation(
                input_qspec_map={input_act: act_qspec}, output_qspec=act_qspec, _annotated=True
            )

    def annotate_conv(self, gm: fx.GraphModule) -> None:
        for node in [node for node in gm.graph.nodes if node.target is ATEN.conv2d.default]:
            input_act, weight, bias = node.args[:3]
            bias_qspec = DerivedQuantizationSpec(
                derived_from=[(input_act, node), (weight, node)],
                derive_qparams_fn=derive_qparams_fn,
                dtype=torch.int32,
                quant_min=-(2**31),
                quant_max=2**31 - 1,
                qscheme=torch.per_tensor_symmetric,
            )
            input_qspec_map = {
                input_act: act_quantization_spec,
                weight: weight_quantization_spec,
                bias: bias_qspec,
            }
            node.meta["quantization_annotation"] = QuantizationAnnotation(
                input_qspec_map=input_qspec_map, output_qspec=act_quantization_spec, _annotated=True
            )

    def validate(self, gm: fx.GraphModule) -> None:
        pass


class Block(nn.Module):
    """Additions in the six ways that a ResNet-like block may write them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.bn1, self.bn2 = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.relu, self.gate = nn.ReLU(), nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        out = self.relu(out) + x
        out = torch.add(out, identity)
        out = out.add(x)
        out = 1 + out
        return self.gate(out) + x


def test_the_backend_quantizer_of_the_tutorial() -> None:
    torch.manual_seed(0)
    model, quantizer = Block().eval(), BackendQuantizer()
    batches = [(torch.randn(2, 4, 8, 8),) for _ in range(3)]
    _, converted = by_prepare_fx(model, batches[0], batches, quantizer)
    assert quantizer.additions == 6
    for node in [n for n in converted.graph.nodes if n.target is ATEN.add.Tensor]:
        inputs = [each for each in node.args if isinstance(each, fx.Node)]
        assert {each.target for each in inputs} == {DEQUANTIZE}
        assert len({each.args[1:] for each in inputs}) == 1  # the second input shares with the first
        assert [user.target for user in node.users] == [QUANTIZE]
    (sigmoid,) = [n for n in converted.graph.nodes if n.target is ATEN.sigmoid.default]
    assert sigmoid.args[0].args[1:3] == (1 / 256, 0)
    for node in [n for n in converted.graph.nodes if n.target is ATEN.conv2d.default]:
        x, weight, bias = node.args[:3]
        assert (weight.args[5], bias.args[5]) == (torch.int8, torch.int32)
        assert bias.args[1] == pytest.approx(x.args[1] * weight.args[1], rel=1e-6)
    labels = {decision.kind: decision.action for decision in tc.explain(converted)}
    assert labels["add.Tensor"] == labels["Conv2d"] == labels["Sigmoid"] == "quantized"
    assert 10 < sqnr(model(*batches[0]), converted(*batches[0])) < 50


def test_partitions_of_modules_are_found_as_before() -> None:
    found: dict[Any, int] = {}

    class Looking(BackendQuantizer):
        def annotate(self, gm: fx.GraphModule) -> fx.GraphModule:
            wanted = [nn.Conv2d, nn.ReLU, nn.Sigmoid]
            found.update({key: len(each) for key, each in get_source_partitions(gm.graph, wanted).items()})
            return gm

    tc.prepare_fx(Block().eval(), Looking(), (torch.randn(2, 4, 8, 8),))
    assert found == {nn.Conv2d: 2, nn.ReLU: 1, nn.Sigmoid: 1}  # one ReLU, called twice: torch tells by path
