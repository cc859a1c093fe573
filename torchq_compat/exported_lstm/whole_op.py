"""The LSTM as one quantized operator: q-dq around ``aten.lstm.input``, nothing inside.

For a backend that has an LSTM kernel and its own way with the internal state. The other way, ops that any
quantizer can annotate, is ``decompose``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.observer import HistogramObserver, MinMaxObserver
from torchao.quantization.pt2e.quantizer import (
    DerivedQuantizationSpec,
    QuantizationSpec,
    Quantizer,
    SharedQuantizationSpec,
)
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from torchq_compat.exported_lstm.aten_lstm import AtenLSTM, aten_lstms
from torchq_compat.multi_output import Output, annotate_outputs, check_sharing
from torchq_compat.support.argument_checks import checked_arguments, instance_of, optional

__all__ = ["WholeOpLSTMQuantizer", "whole_op_lstm_quantizer"]

PER_CHANNEL = (torch.per_channel_affine, torch.per_channel_symmetric)
EdgeSpecs = dict[Node | Output, Any]


SPEC = optional(instance_of(QuantizationSpec))


@checked_arguments(activation=SPEC, weight=SPEC)
def whole_op_lstm_quantizer(
    activation: QuantizationSpec | None = None, weight: QuantizationSpec | None = None
) -> WholeOpLSTMQuantizer:
    """Return a torchao Quantizer that quantizes every ``aten.lstm.input`` as one operator.

    Use it with ``prepare_pt2e``, ``prepare_qat_pt2e`` or inside a ``ComposableQuantizer``. Quantized are x,
    h0, c0, each weight, the biases, and each of the three outputs. An LSTM has one set of qparams for its
    hidden state and one for its cell state: h0, the output and h_n share one observer, c0 and c_n another. A
    bias is int32 with zero point 0 and the scale of the sum it is added to: that of the weight times that of
    what the weight multiplies, x in the first layer and otherwise the hidden state.

    Args:
        activation: of x and both states; default int8 per tensor, affine, HistogramObserver.
        weight: of all weights, per tensor or per channel on axis 0; default int8 per tensor, symmetric,
            MinMaxObserver.

    Source of the flow: the PyTorch issue on quantizing operators with multiple outputs (RNN, LSTM).

    Returns:
        The Quantizer.

    Example:
        >>> import torch
        >>> from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
        >>> from torchq_compat.lstm_utils import whole_op_lstm_quantizer
        >>> lstm, x = torch.nn.LSTM(4, 8).eval(), torch.randn(5, 2, 4)
        >>> prepared = prepare_pt2e(torch.export.export(lstm, (x,)).module(), whole_op_lstm_quantizer())
        >>> _ = prepared(x)  # calibrate
        >>> convert_pt2e(prepared)(x)[0].shape
        torch.Size([5, 2, 8])
    """
    return WholeOpLSTMQuantizer(activation or _default_activation(), weight or _default_weight())


class WholeOpLSTMQuantizer(Quantizer):  # type: ignore[misc]
    """See ``whole_op_lstm_quantizer``. Nodes that are annotated already are left alone."""

    def __init__(self, activation: QuantizationSpec, weight: QuantizationSpec) -> None:
        super().__init__()
        self.activation = activation
        self.weight = weight

    def annotate(self, model: GraphModule) -> GraphModule:
        for lstm in aten_lstms(model):
            annotation = lstm.node.meta.get(Q_ANNOTATION_KEY)
            if annotation is None or not annotation._annotated:
                annotate_outputs(lstm.node, self._input_specs(lstm), self._output_specs(lstm))
        return model

    def validate(self, model: GraphModule) -> None:
        """Refuse what torchao could not carry out.

        Raises:
            AnnotationError: specs of this quantizer, or of one before it.
        """
        check_sharing(model)

    def _input_specs(self, lstm: AtenLSTM) -> EdgeSpecs:
        specs: EdgeSpecs = dict.fromkeys((lstm.x, lstm.h0, lstm.c0), self.activation)
        for direction in lstm.directions:
            for name, parameter in direction.parameters.items():
                if name.startswith("weight"):
                    specs[parameter] = self.weight
                else:
                    weight = direction.parameters[name.replace("bias", "weight")]
                    multiplied = lstm.x if name == "bias_ih" and direction.layer == 0 else lstm.h0
                    specs[parameter] = self._bias_spec((multiplied, lstm.node), (weight, lstm.node))
        return specs

    def _output_specs(self, lstm: AtenLSTM) -> list[SharedQuantizationSpec]:
        hidden = SharedQuantizationSpec((lstm.h0, lstm.node))
        cell = SharedQuantizationSpec((lstm.c0, lstm.node))
        return [hidden, hidden, cell]

    def _bias_spec(self, multiplied: tuple[Node, Node], weight: tuple[Node, Node]) -> DerivedQuantizationSpec:
        per_channel = self.weight.qscheme in PER_CHANNEL
        limits = torch.iinfo(torch.int32)
        return DerivedQuantizationSpec(
            derived_from=[multiplied, weight],
            derive_qparams_fn=product_of_scales,
            dtype=torch.int32,
            quant_min=limits.min,
            quant_max=limits.max,
            qscheme=torch.per_channel_symmetric if per_channel else torch.per_tensor_symmetric,
            ch_axis=0 if per_channel else None,
        )


def product_of_scales(observers: list[Any]) -> tuple[Tensor, Tensor]:
    """Scale of an accumulator: that of the activation times that of the weight. Zero point 0."""
    activation, weight = observers
    scale = activation.calculate_qparams()[0] * weight.calculate_qparams()[0]
    return scale, torch.zeros_like(scale, dtype=torch.int32)


def _default_activation() -> QuantizationSpec:
    return QuantizationSpec(
        dtype=torch.int8,
        quant_min=-128,
        quant_max=127,
        qscheme=torch.per_tensor_affine,
        observer_or_fake_quant_ctr=HistogramObserver.with_args(eps=2**-12),
    )


def _default_weight() -> QuantizationSpec:
    return QuantizationSpec(
        dtype=torch.int8,
        quant_min=-128,
        quant_max=127,
        qscheme=torch.per_tensor_symmetric,
        observer_or_fake_quant_ctr=MinMaxObserver,
    )
