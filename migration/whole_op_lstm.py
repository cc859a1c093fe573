"""Quantize an exported LSTM as one operator: q-dq on its inputs, weights, biases and on all three outputs.

The script of the PyTorch issue "[pt2e][quant] Quantization of operators with multiple outputs (RNN, LSTM)",
where it printed a graph with no quantize nodes after lstm.input. Changed are: the imports (torchao; helpers
that came from ExecuTorch are written out here), and how the node is annotated, marked with "Was".

    python whole_op_lstm.py
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torchao.quantization.pt2e.observer import HistogramObserver, MinMaxObserver
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer import DerivedQuantizationSpec, QuantizationSpec, Quantizer

from torchq_compat import annotate_outputs, check_annotations


@dataclass
class PartitionAnchors:
    """Input nodes of the operator by role, and one entry per output."""

    inputs: list[fx.Node] = field(default_factory=list)
    weights: list[fx.Node] = field(default_factory=list)
    biases: list[tuple[fx.Node, DerivedQuantizationSpec]] = field(default_factory=list)
    outputs: int = 0


class CustomQuantizationPattern(ABC):
    @abstractmethod
    def targets(self) -> list[Any]:
        """Operators to quantize."""

    @abstractmethod
    def get_anchors(self, node: fx.Node) -> PartitionAnchors:
        """What to quantize around ``node``."""


class LstmInputPattern(CustomQuantizationPattern):
    """Basic quantization for all inputs and outputs of lstm.input."""

    def targets(self):
        return [torch.ops.aten.lstm.input]

    def get_anchors(self, node):
        x, (hidden_state_0, cell_state_0), parameters = node.args[:3]
        weights = [parameter for parameter in parameters if "weight" in parameter.target]
        biases = []
        for bias in (parameter for parameter in parameters if "bias" in parameter.target):
            # Was: every bias from x, h0, c0 and all weights, of which get_bias_qparams read the first two.
            weight = next(w for w in weights if w.target == bias.target.replace("bias", "weight"))
            multiplied = x if "bias_ih" in bias.target else hidden_state_0
            biases.append((bias, bias_spec([(multiplied, node), (weight, node)])))
        return PartitionAnchors([x, hidden_state_0, cell_state_0], weights, biases, outputs=3)


def bias_spec(derived_from):
    return DerivedQuantizationSpec(
        derived_from=derived_from,
        derive_qparams_fn=get_bias_qparams,
        dtype=torch.int32,
        quant_min=-(2**31),
        quant_max=2**31 - 1,
        qscheme=torch.per_tensor_affine,
    )


def get_bias_qparams(observers):
    """Scale of what is accumulated: activation times weight."""
    activation_scale, _ = observers[0].calculate_qparams()
    weight_scale, _ = observers[1].calculate_qparams()
    scale = activation_scale * weight_scale
    return scale, torch.zeros_like(scale, dtype=torch.int32)


class CustomAtenQuantizer(Quantizer):
    def __init__(self, pattern, activation, weight):
        super().__init__()
        self.pattern = pattern
        self.activation = activation
        self.weight = weight

    def annotate(self, model):
        for node in list(model.graph.nodes):
            if node.target in self.pattern.targets():
                anchors = self.pattern.get_anchors(node)
                input_specs = dict.fromkeys(anchors.inputs, self.activation)
                input_specs |= dict.fromkeys(anchors.weights, self.weight)
                input_specs |= dict(anchors.biases)
                # Was: QuantizationAnnotation(output_qspec=...) on the node, which torchao drops.
                annotate_outputs(node, input_specs, [self.activation] * anchors.outputs)
        return model

    def validate(self, model):
        check_annotations(model)


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
)


def quantized_lstm_model():
    """(float model, quantized graph module, an input)."""
    input_shape = (1, 64)
    model = nn.LSTM(64, hidden_size=16, bidirectional=False, bias=True, num_layers=1).eval()
    random_tensors = (torch.randn(input_shape),)
    calibration_inputs = [random_tensors, random_tensors]
    example_input = (torch.ones(input_shape),)

    exported = torch.export.export(model, example_input).module()
    m = prepare_pt2e(exported, CustomAtenQuantizer(LstmInputPattern(), act_qspec, wgt_qspec))
    with torch.no_grad():
        for data in calibration_inputs:
            m(*data)
    return model, convert_pt2e(m), random_tensors


if __name__ == "__main__":
    torch.manual_seed(0)
    _, quantized, _ = quantized_lstm_model()
    print(quantized.code)
    (lstm,) = [node for node in quantized.graph.nodes if node.target is torch.ops.aten.lstm.input]
    for getitem in sorted(lstm.users):
        print(f"output {getitem.args[1]} -> " + ", ".join(str(user.target) for user in getitem.users))
