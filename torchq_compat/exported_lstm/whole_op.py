"""Quantizes LSTM, GRU and RNN as one operator each: q-dq around ``aten.lstm.input``, nothing inside.

This is for a backend that has a kernel for the operator and handles the internal states itself. The
alternative, ops that any quantizer can annotate, is ``decompose``.
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

from torchq_compat.exported_lstm.aten_recurrent import (
    LSTM_OP,
    RECURRENT_OPS,
    AtenRecurrent,
    aten_recurrents,
    refuse_packed,
)
from torchq_compat.multi_output import Output, annotate_outputs, check_annotations
from torchq_compat.support.argument_checks import checked_arguments, instance_of, optional

__all__ = [
    "WholeOpLSTMQuantizer",
    "WholeOpRecurrentQuantizer",
    "whole_op_lstm_quantizer",
    "whole_op_recurrent_quantizer",
]

PER_CHANNEL = (torch.per_channel_affine, torch.per_channel_symmetric)
EdgeSpecs = dict[Node | Output, Any]


SPEC = optional(instance_of(QuantizationSpec))


@checked_arguments(activation=SPEC, weight=SPEC)
def whole_op_lstm_quantizer(
    activation: QuantizationSpec | None = None, weight: QuantizationSpec | None = None
) -> WholeOpLSTMQuantizer:
    """Return a torchao Quantizer that quantizes every ``aten.lstm.input`` as one operator.

    Use it with ``prepare_pt2e``, ``prepare_qat_pt2e`` or inside a ``ComposableQuantizer``. It quantizes x,
    h0, c0, all weights and biases, and the three outputs. An LSTM has one set of qparams for its hidden state
    and one for its cell state: h0, the output and h_n share one observer, c0 and c_n another. A bias is int32
    with zero point 0 and the scale of the sum it is added to: the weight's scale times the scale of what the
    weight multiplies, which is x for ``bias_ih`` of the first layer and otherwise the hidden state.

    Args:
        activation: the spec of x and both states; default int8 per tensor, affine, HistogramObserver.
        weight: the spec of all weights, per tensor or per channel on axis 0; default int8 per tensor,
            symmetric, MinMaxObserver.

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


@checked_arguments(activation=SPEC, weight=SPEC)
def whole_op_recurrent_quantizer(
    activation: QuantizationSpec | None = None, weight: QuantizationSpec | None = None
) -> WholeOpRecurrentQuantizer:
    """Return a torchao Quantizer that quantizes every LSTM, GRU and RNN of a program as one operator.

    These are ``aten.lstm.input``, ``aten.gru.input``, ``aten.rnn_tanh.input`` and ``aten.rnn_relu.input``.
    It quantizes x, the states, all weights and biases, and the outputs, as ``whole_op_lstm_quantizer`` does:
    h0, the output and h_n share one observer.

    Args:
        activation: the spec of x and the states; default int8 per tensor, affine, HistogramObserver.
        weight: the spec of all weights, per tensor or per channel on axis 0; default int8 per tensor,
            symmetric, MinMaxObserver.

    Returns:
        A Quantizer for ``prepare_pt2e``, ``prepare_qat_pt2e``, a ``ComposableQuantizer`` or ``prepare_fx``.

    Example:
        >>> import torch
        >>> from torchq_compat import convert_fx, prepare_fx
        >>> from torchq_compat.recurrent_parts import whole_op_recurrent_quantizer
        >>> x = torch.randn(5, 1, 4)
        >>> prepared = prepare_fx(torch.nn.GRU(4, 8).eval(), whole_op_recurrent_quantizer(), (x,))
        >>> _ = prepared(torch.randn(50, 1, 4))  # calibrate
        >>> convert_fx(prepared)(x)[0].shape
        torch.Size([5, 1, 8])
    """
    return WholeOpRecurrentQuantizer(activation or _default_activation(), weight or _default_weight())


class WholeOpRecurrentQuantizer(Quantizer):  # type: ignore[misc]
    """The Quantizer of ``whole_op_recurrent_quantizer``. It skips nodes that are already annotated."""

    operators: tuple[Any, ...] = RECURRENT_OPS

    def __init__(self, activation: QuantizationSpec, weight: QuantizationSpec) -> None:
        super().__init__()
        self.activation = activation
        self.weight = weight

    def annotate(self, model: GraphModule) -> GraphModule:
        """Annotate every call of ``operators``.

        Raises:
            AtenLSTMError: if the model has an operator of a PackedSequence.
        """
        refuse_packed(model)
        for recurrent in aten_recurrents(model, self.operators):
            annotation = recurrent.node.meta.get(Q_ANNOTATION_KEY)
            if annotation is None or not annotation._annotated:
                specs = self._input_specs(recurrent)
                annotate_outputs(recurrent.node, specs, self._output_specs(recurrent))
        return model

    def validate(self, model: GraphModule) -> None:
        """Check that torchao can carry out all annotations.

        Raises:
            AnnotationError: if it cannot; the specs may be of this quantizer or of an earlier one.
        """
        check_annotations(model)

    def _input_specs(self, recurrent: AtenRecurrent) -> EdgeSpecs:
        specs: EdgeSpecs = dict.fromkeys((recurrent.x, *recurrent.states), self.activation)
        hidden = recurrent.states[0]
        for direction in recurrent.directions:
            for name, parameter in direction.parameters.items():
                if name.startswith("weight"):
                    specs[parameter] = self.weight
                else:
                    weight = direction.parameters[name.replace("bias", "weight")]
                    multiplied = recurrent.x if name == "bias_ih" and direction.layer == 0 else hidden
                    specs[parameter] = self._bias_spec((multiplied, recurrent.node), (weight, recurrent.node))
        return specs

    def _output_specs(self, recurrent: AtenRecurrent) -> list[SharedQuantizationSpec]:
        states = [SharedQuantizationSpec((state, recurrent.node)) for state in recurrent.states]
        return [states[0], *states]

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


class WholeOpLSTMQuantizer(WholeOpRecurrentQuantizer):
    """The Quantizer of ``whole_op_lstm_quantizer``."""

    operators = (LSTM_OP,)


def product_of_scales(observers: list[Any]) -> tuple[Tensor, Tensor]:
    """Return the scale of an accumulator, the activation's scale times the weight's, and zero point 0."""
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
