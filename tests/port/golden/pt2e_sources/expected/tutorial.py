"""The blocks of the tutorial on Quantizers (sections 1 to 4), put together as its section 5 says."""

import itertools
import operator
from typing import List, Tuple

import torch
from torch import Tensor
from torch.export import export
from torch.ao.quantization import ObserverOrFakeQuantize
from torchao.quantization.pt2e.observer import HistogramObserver, MinMaxObserver
from torchq_compat.pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer import (
    DerivedQuantizationSpec,
    FixedQParamsQuantizationSpec,
    QuantizationAnnotation,
    QuantizationSpec,
    Quantizer,
    SharedQuantizationSpec,
)
from torch.fx.passes.utils.source_matcher_utils import get_source_partitions


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


def derive_qparams_fn(obs_or_fqs: List[ObserverOrFakeQuantize]) -> Tuple[Tensor, Tensor]:
    assert len(obs_or_fqs) == 2, \
        "Expecting two obs/fqs, one for activation and one for weight, got: {}".format(len(obs_or_fqs))
    act_obs_or_fq = obs_or_fqs[0]
    weight_obs_or_fq = obs_or_fqs[1]
    act_scale, act_zp = act_obs_or_fq.calculate_qparams()
    weight_scale, weight_zp = weight_obs_or_fq.calculate_qparams()
    return torch.tensor([act_scale * weight_scale]).to(torch.float32), torch.tensor([0]).to(torch.int32)


class BackendQuantizer(Quantizer):
    def __init__(self):
        super().__init__()
        self.additions = 0

    def annotate(self, gm):
        self.annotate_add(gm)
        self.annotate_sigmoid(gm)
        self.annotate_conv(gm)
        return gm

    def annotate_add(self, gm):
        partitions = get_source_partitions(gm.graph, [operator.add, torch.add])
        add_partitions = list(itertools.chain(*partitions.values()))
        for add_partition in add_partitions:
            add_node = add_partition.output_nodes[0]
            input_act0 = add_node.args[0]
            share_qparams_with_input_act0_qspec = SharedQuantizationSpec((input_act0, add_node))
            input_qspec_map = {input_act0: act_quantization_spec}
            input_act1 = add_node.args[1]
            if isinstance(input_act1, torch.fx.Node):
                input_qspec_map[input_act1] = share_qparams_with_input_act0_qspec
            add_node.meta["quantization_annotation"] = QuantizationAnnotation(
                input_qspec_map=input_qspec_map,
                output_qspec=act_quantization_spec,
                _annotated=True,
            )
        self.additions = len(add_partitions)

    def annotate_sigmoid(self, gm):
        for sigmoid_node in [node for node in gm.graph.nodes if node.target is torch.ops.aten.sigmoid.default]:
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

    def annotate_conv(self, gm):
        for node in [node for node in gm.graph.nodes if node.target is torch.ops.aten.conv2d.default]:
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

    def validate(self, gm):
        pass


def quantize(model, batches):
    """Its overall flow: capture, prepare, calibrate, convert."""
    exported_graph_module = export(
        model,
        batches[0], strict=True,
    ).module()
    quantizer = BackendQuantizer()
    prepared_graph_module = prepare_pt2e(exported_graph_module, quantizer)
    for batch in batches:
        prepared_graph_module(*batch)
    return quantizer, convert_pt2e(prepared_graph_module)
