"""LSTM, GRU and RNN as one operator each: ``aten.lstm.input`` and related, with q-dq around them."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e import quantizer as quantizers
from torchao.quantization.pt2e.observer import HistogramObserver, MinMaxObserver
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from torchq_compat.annotate.outputs import annotate_outputs, check_annotations
from torchq_compat.annotate.sharing import Output
from torchq_compat.capture.torch_export import SOURCE_FUNCTIONS
from torchq_compat.modules.registry import WriteOps
from torchq_compat.read.torch_ao_classes import PER_CHANNEL
from torchq_compat.recurrent.contracts import SequenceContract, bound_arguments
from torchq_compat.recurrent.exported_lstm import aten_recurrent
from torchq_compat.support.argument_checks import FLAG, checked_arguments, instance_of, optional
from torchq_compat.support.user_warnings import warn_user

# Quantizes LSTM, GRU and RNN as one operator each: q-dq around ``aten.lstm.input``, nothing inside.
#
# This is for a backend that has a kernel for the operator and handles the internal states itself. The
# alternative, ops that any quantizer can annotate, is ``decompose``.


EdgeSpecs = dict[Node | Output, Any]


SPEC = optional(instance_of(quantizers.QuantizationSpec))


@checked_arguments(activation=SPEC, weight=SPEC, weights=FLAG, states=FLAG)
def whole_op_lstm_quantizer(
    activation: quantizers.QuantizationSpec | None = None,
    weight: quantizers.QuantizationSpec | None = None,
    *,
    weights: bool = True,
    states: bool = True,
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
        weights: whether weights and biases are quantized. A kernel that quantizes them itself, as that of
            ExecuTorch's Cortex-M backend, wants them float.
        states: whether h0, c0, h_n and c_n are quantized; without them the output has its own observer.

    Warns:
        QuantizationWarning: TQ428, the recurrent operators of a program are all others, and stay float.

    Source of the flow: the PyTorch issue on quantizing operators with multiple outputs (RNN, LSTM).

    Returns:
        The Quantizer.

    Example:
        >>> import torch
        >>> from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
        >>> from torchq_compat.pt2e import whole_op_lstm_quantizer
        >>> lstm, x = torch.nn.LSTM(4, 8).eval(), torch.randn(5, 2, 4)
        >>> prepared = prepare_pt2e(torch.export.export(lstm, (x,)).module(), whole_op_lstm_quantizer())
        >>> _ = prepared(x)  # calibrate
        >>> convert_pt2e(prepared)(x)[0].shape
        torch.Size([5, 2, 8])
    """
    return WholeOpLSTMQuantizer(activation, weight, weights=weights, states=states)


@checked_arguments(activation=SPEC, weight=SPEC, weights=FLAG, states=FLAG)
def whole_op_recurrent_quantizer(
    activation: quantizers.QuantizationSpec | None = None,
    weight: quantizers.QuantizationSpec | None = None,
    *,
    weights: bool = True,
    states: bool = True,
) -> WholeOpRecurrentQuantizer:
    """Return a torchao Quantizer that quantizes every LSTM, GRU and RNN of a program as one operator.

    These are ``aten.lstm.input``, ``aten.gru.input``, ``aten.rnn_tanh.input`` and ``aten.rnn_relu.input``.
    It quantizes x, the states, all weights and biases, and the outputs, as ``whole_op_lstm_quantizer`` does:
    h0, the output and h_n share one observer.

    Args:
        activation: the spec of x and the states; default int8 per tensor, affine, HistogramObserver.
        weight: the spec of all weights, per tensor or per channel on axis 0; default int8 per tensor,
            symmetric, MinMaxObserver.
        weights: whether weights and biases are quantized, as in ``whole_op_lstm_quantizer``.
        states: whether the states are quantized; without them the output has its own observer.

    Returns:
        A Quantizer for ``prepare_pt2e``, ``prepare_qat_pt2e``, a ``ComposableQuantizer`` or ``prepare_fx``.

    Example:
        >>> import torch
        >>> from torchq_compat import convert_fx, prepare_fx
        >>> from torchq_compat.pt2e import whole_op_recurrent_quantizer
        >>> x = torch.randn(5, 1, 4)
        >>> prepared = prepare_fx(torch.nn.GRU(4, 8).eval(), whole_op_recurrent_quantizer(), (x,))
        >>> _ = prepared(torch.randn(50, 1, 4))  # calibrate
        >>> convert_fx(prepared)(x)[0].shape
        torch.Size([5, 1, 8])
    """
    return WholeOpRecurrentQuantizer(activation, weight, weights=weights, states=states)


class WholeOpRecurrentQuantizer(quantizers.Quantizer):  # type: ignore[misc]
    """The Quantizer of ``whole_op_recurrent_quantizer``. It skips nodes that are already annotated."""

    operators: tuple[Any, ...] = tuple(aten_recurrent.KINDS)

    def __init__(
        self,
        activation: quantizers.QuantizationSpec | None,
        weight: quantizers.QuantizationSpec | None,
        *,
        weights: bool,
        states: bool,
    ) -> None:
        super().__init__()
        histogram = HistogramObserver.with_args(eps=2**-12)
        self.activation = activation or _int8(torch.per_tensor_affine, histogram)
        self.weight = weight or _int8(torch.per_tensor_symmetric, MinMaxObserver)
        self.weights = weights
        self.states = states

    def annotate(self, model: GraphModule) -> GraphModule:
        """Annotate every call of ``operators``.

        Raises:
            AnnotationError: if the model has an operator of a PackedSequence.
        """
        aten_recurrent.refuse_packed(model)
        for recurrent in aten_recurrent.aten_recurrents(model, self.operators):
            annotation = recurrent.node.meta.get(Q_ANNOTATION_KEY)
            if annotation is None or not annotation._annotated:
                annotate_outputs(recurrent.node, self._input_specs(recurrent), self._output_specs(recurrent))
        present = {node.target for node in model.graph.nodes if node.target in aten_recurrent.KINDS}
        if present and not present.intersection(self.operators):
            warn_user("TQ428", names=", ".join(sorted(map(str, present))))
        return model

    def validate(self, model: GraphModule) -> None:
        """Check that torchao can carry out all annotations.

        Raises:
            AnnotationError: if it cannot; the specs may be of this quantizer or of an earlier one.
        """
        check_annotations(model)

    def _input_specs(self, recurrent: aten_recurrent.AtenRecurrent) -> EdgeSpecs:
        observed = (recurrent.x, *recurrent.states) if self.states else (recurrent.x,)
        specs: EdgeSpecs = dict.fromkeys(observed, self.activation)
        # Without an observer of the state, there are no qparams for the biases of what it is multiplied with.
        hidden = recurrent.states[0] if self.states else None
        for direction in recurrent.directions if self.weights else ():
            for name, parameter in direction.parameters.items():
                if name.startswith("weight"):
                    specs[parameter] = self.weight
                else:
                    weight = direction.parameters[name.replace("bias", "weight")]
                    multiplied = recurrent.x if name == "bias_ih" and direction.layer == 0 else hidden
                    if multiplied is not None:
                        edges = (multiplied, recurrent.node), (weight, recurrent.node)
                        specs[parameter] = self._bias_spec(*edges)
        return specs

    def _output_specs(self, recurrent: aten_recurrent.AtenRecurrent) -> list[Any]:
        if not self.states:
            return [self.activation, *(None for _ in recurrent.states)]
        states = [quantizers.SharedQuantizationSpec((state, recurrent.node)) for state in recurrent.states]
        return [states[0], *states]

    def _bias_spec(
        self, multiplied: tuple[Node, Node], weight: tuple[Node, Node]
    ) -> quantizers.DerivedQuantizationSpec:
        per_channel = self.weight.qscheme in PER_CHANNEL
        limits = torch.iinfo(torch.int32)
        return quantizers.DerivedQuantizationSpec(
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

    operators = (aten_recurrent.LSTM_OP,)


def product_of_scales(observers: list[Any]) -> tuple[Tensor, Tensor]:
    """Return the scale of an accumulator, the activation's scale times the weight's, and zero point 0."""
    activation, weight = observers
    scale = activation.calculate_qparams()[0] * weight.calculate_qparams()[0]
    return scale, torch.zeros_like(scale, dtype=torch.int32)


def _int8(qscheme: torch.qscheme, constructor: Any) -> quantizers.QuantizationSpec:
    return quantizers.QuantizationSpec(torch.int8, constructor, -128, 127, qscheme)


# Writes a float recurrent module as the operator torch.export captures for it, such as ``aten.lstm.input``.
#
# torch.export fixes the sequence length when it captures this operator. So the module is captured as an
# opaque call, and the operator, which accepts any length, is written afterwards.


ATEN = torch.ops.aten


def whole_op_writer(module: nn.Module, float_class: type[nn.Module]) -> WriteOps | None:
    """Return a function that writes the operator of ``module``, a ``float_class``; None if ``module`` does
    more than call the operator with its parameters."""
    if not isinstance(module, nn.RNNBase) or type(module).forward is not float_class.forward:
        return None
    if "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks:
        return None
    owned = dict(module.named_parameters(recurse=False))
    if any(name not in owned for name in module._flat_weights_names):
        return None  # A parametrization computes a parameter.
    recurrent = module

    def write(
        graph_module: GraphModule, call: Node, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Node] | None:
        x, state = bound_arguments(path, args, kwargs)
        if not isinstance(x, Node) or "val" not in x.meta:
            return None  # A PackedSequence.
        return _Writer(graph_module, call, path, recurrent, float_class).write(x, state)

    return write


class _Writer(aten_recurrent.NodeWriter):
    """Writes the nodes of one call of ``recurrent``, whose path is ``path``, before the node ``call``."""

    def __init__(
        self,
        graph_module: GraphModule,
        call: Node,
        path: str,
        recurrent: nn.RNNBase,
        float_class: type[nn.Module],
    ) -> None:
        super().__init__(graph_module, call)
        self.path = path
        self.recurrent = recurrent
        name = recurrent.mode.lower()
        self.operator = getattr(ATEN, name).input
        self.origin = {
            "torch_fn": (f"{name}_1", f"builtin_function_or_method.{name}"),
            SOURCE_FUNCTIONS: [(call.name, float_class)],
        }

    def write(self, x: Node, state: Any) -> list[Node]:
        """Return nodes for the output and the last states, as the module returns them."""
        recurrent = self.recurrent
        results = list(self.place.meta["val"])
        is_batched, batch = x.meta["val"].dim() == 3, 0 if recurrent.batch_first else 1
        given = [] if state is None else list(state) if isinstance(state, (tuple, list)) else [state]
        if not is_batched:
            # torch.nn computes one sequence as a batch of one.
            x = self._op(ATEN.unsqueeze.default, x, batch)
            given = [self._op(ATEN.unsqueeze.default, item, 1) for item in given]
            results = [results[0].unsqueeze(batch), *(value.unsqueeze(1) for value in results[1:])]
        states = given or self._zeros(x, batch)
        called = self._op(
            self.operator,
            x,
            states if len(states) > 1 else states[0],
            [self._parameter(name) for name in recurrent._flat_weights_names],
            recurrent.bias,
            recurrent.num_layers,
            float(recurrent.dropout),
            recurrent.training,
            recurrent.bidirectional,
            recurrent.batch_first,
            value=tuple(results),
        )
        nodes = []
        for index, value in enumerate(results):
            node = self._op(operator.getitem, called, index, value=value)
            if not is_batched:
                node = self._op(ATEN.squeeze.dim, node, batch if index == 0 else 1)
            nodes.append(node)
        return nodes

    def _zeros(self, x: Node, axis: int) -> list[Node]:
        """Return zeros for the states of a call that passes none, in the dtype and on the device of ``x``."""
        batch = self._op(ATEN.sym_size.int, x, axis, value=x.meta["val"].shape[axis])
        shapes = SequenceContract.of(self.recurrent).batched_state_shapes(batch)
        return [self._op(ATEN.new_zeros.default, x, shape) for shape in shapes]

    def _parameter(self, name: str) -> Node:
        node = self.attribute(f"{self.path}.{name}", getattr(self.recurrent, name))
        node.meta = {"val": node.meta["val"]}
        return node

    def _op(self, target: Any, *args: Any, value: Any = None) -> Node:
        return self.call(target, *args, value=value, **self.origin)
