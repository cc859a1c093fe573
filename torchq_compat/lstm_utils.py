"""``torch.ao.quantization.fx.lstm_utils``: LSTMs whose parts are observed one by one.

Legacy: each helper built every cell with ``prepare_fx`` and then found the ops to re-observe by counting adds
and multiplications, in the forward direction only. Here a part has a name, in both directions; see
``custom_modules.recurrent.cell.cell_parts``. ``torchq_compat.recurrent_parts`` does the same for GRU, RNN and
cells.

New: an ``aten.lstm.input`` that torch.export left whole, quantized as one operator or decomposed, for any
torchao Quantizer; no FX configuration takes part.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from torchq_compat.config.backend_configs import read_backend_config
from torchq_compat.custom_modules.recurrent.modules.families import ConvertedLSTM, ObservedLSTM
from torchq_compat.custom_modules.recurrent.modules.observed_parts import (
    CELL_INPUTS,
    get_individually_observed_parts,
)
from torchq_compat.errors import CustomModuleError
from torchq_compat.exported_lstm import convert_decomposed_lstm, decompose_lstm, prepare_decomposed_lstm
from torchq_compat.exported_lstm.whole_op import whole_op_lstm_quantizer
from torchq_compat.support.argument_checks import FLAG, checked_arguments
from torchq_compat.support.torch_ao import BackendConfig, quantizable

__all__ = [
    "convert_decomposed_lstm",
    "decompose_lstm",
    "get_lstm_with_individually_observed_parts",
    "get_reference_quantized_lstm_module",
    "prepare_decomposed_lstm",
    "whole_op_lstm_quantizer",
]

ObserverOrFakeQuantizeConstructor = Any


@checked_arguments(example_inputs=CELL_INPUTS, split_gates=FLAG)
def get_lstm_with_individually_observed_parts(
    float_lstm: nn.LSTM,
    example_inputs: tuple[Any, ...] | None = None,
    backend_config: BackendConfig | dict[str, Any] | None = None,
    linear_output_obs_ctr: ObserverOrFakeQuantizeConstructor | None = None,
    sigmoid_obs_ctr: ObserverOrFakeQuantizeConstructor | None = None,
    tanh_obs_ctr: ObserverOrFakeQuantizeConstructor | None = None,
    cell_state_obs_ctr: ObserverOrFakeQuantizeConstructor | None = None,
    hidden_state_obs_ctr: ObserverOrFakeQuantizeConstructor | None = None,
    split_gates: bool = False,
    *,
    igates_obs_ctr: ObserverOrFakeQuantizeConstructor | None = None,
    hgates_obs_ctr: ObserverOrFakeQuantizeConstructor | None = None,
    tanh_cell_state_obs_ctr: ObserverOrFakeQuantizeConstructor | None = None,
    weight_obs_ctr: ObserverOrFakeQuantizeConstructor | None = None,
    sigmoid_input_obs_ctr: ObserverOrFakeQuantizeConstructor | None = None,
    tanh_input_obs_ctr: ObserverOrFakeQuantizeConstructor | None = None,
) -> ObservedLSTM:
    """Make an observed LSTM, in both directions, with the given constructors on its parts.

    Legacy: ``_get_lstm_with_individually_observed_parts``. A constructor is an observer or fake-quantize
    class of torch.ao or torchao, or ``Class.with_args(...)``. A part without one follows
    ``float_lstm.qconfig``; sigmoid and tanh then have fixed qparams over [0, 1) and [-1, 1).

    Args:
        float_lstm: an ``nn.LSTM`` with a ``qconfig`` attribute, as ``from_float`` gets it.
        example_inputs: of the cell, as FX wanted them: ``(x, (h, c))`` with x (B, I). Checked against the
            LSTM's sizes when given, otherwise not needed.
        backend_config: which dtypes the parts may have; default: any integer dtype.
        linear_output_obs_ctr: the sum of the two projections, which is the gates' input.
        sigmoid_obs_ctr: outputs of the input, forget and output gate.
        tanh_obs_ctr: output of the cell gate.
        cell_state_obs_ctr: ``f * c``, ``i * g`` and their sum, the new cell state.
        hidden_state_obs_ctr: ``o * tanh(c)``, the new hidden state and the module's output.
        split_gates: one projection pair and one sum per gate instead of one four times as wide.
        igates_obs_ctr: ``W_ih x + b_ih``.
        hgates_obs_ctr: ``W_hh h + b_hh``.
        tanh_cell_state_obs_ctr: ``tanh(c)``.
        weight_obs_ctr: the weights of both projections.
        sigmoid_input_obs_ctr: the inputs of the three sigmoid gates, apart from what produced them.
        tanh_input_obs_ctr: the input of the cell gate, apart from what produced it.

    Raises:
        ConfigError: a constructor that is none, or a dtype ``backend_config`` does not allow; the message
            names the part.
        CustomModuleError: no ``nn.LSTM``, no qconfig, or example inputs that do not fit its sizes.

    Returns:
        The observed LSTM, called as ``float_lstm`` is: ``(x, (h_0, c_0))`` in float32.

    Example:
        >>> import torch
        >>> from torch.ao.quantization import get_default_qconfig
        >>> from torchq_compat.lstm_utils import get_lstm_with_individually_observed_parts
        >>> lstm = torch.nn.LSTM(4, 8).eval()
        >>> lstm.qconfig = get_default_qconfig("x86")
        >>> observed = get_lstm_with_individually_observed_parts(lstm)
        >>> observed(torch.randn(5, 2, 4))[0].shape
        torch.Size([5, 2, 8])
    """
    if not isinstance(float_lstm, nn.LSTM):
        raise CustomModuleError.call_failed(
            "float_lstm", f"an nn.LSTM is needed, got {type(float_lstm).__name__}"
        )
    observed = get_individually_observed_parts(
        float_lstm,
        example_inputs,
        backend_config,
        split_gates=split_gates,
        igates_obs_ctr=igates_obs_ctr,
        hgates_obs_ctr=hgates_obs_ctr,
        linear_output_obs_ctr=linear_output_obs_ctr,
        sigmoid_obs_ctr=sigmoid_obs_ctr,
        tanh_obs_ctr=tanh_obs_ctr,
        cell_state_obs_ctr=cell_state_obs_ctr,
        hidden_state_obs_ctr=hidden_state_obs_ctr,
        tanh_cell_state_obs_ctr=tanh_cell_state_obs_ctr,
        weight_obs_ctr=weight_obs_ctr,
        sigmoid_input_obs_ctr=sigmoid_input_obs_ctr,
        tanh_input_obs_ctr=tanh_input_obs_ctr,
    )
    assert isinstance(observed, ObservedLSTM)
    return observed


def get_reference_quantized_lstm_module(
    observed_lstm: quantizable.LSTM,
    backend_config: BackendConfig | dict[str, Any] | None = None,
) -> ConvertedLSTM:
    """Return the q-dq form of an observed LSTM, which is not changed.

    Legacy: ``_get_reference_quantized_lstm_module``. ``backend_config`` chose the reference modules FX used;
    a q-dq graph has none, so it changes nothing here.

    Args:
        observed_lstm: an observed LSTM of this package, calibrated.
        backend_config: read and checked, not used.

    Returns:
        The converted LSTM, called as the float one is.

    Raises:
        ConfigError: a ``backend_config`` that cannot be read.
        CustomModuleError: not an LSTM observed by this package.

    Example:
        >>> import torch
        >>> from torch.ao.quantization import get_default_qconfig
        >>> from torchq_compat import lstm_utils
        >>> lstm = torch.nn.LSTM(4, 8).eval()
        >>> lstm.qconfig = get_default_qconfig("x86")
        >>> observed = lstm_utils.get_lstm_with_individually_observed_parts(lstm)
        >>> x = torch.randn(5, 2, 4)
        >>> _ = observed(x)  # calibrate
        >>> lstm_utils.get_reference_quantized_lstm_module(observed)(x)[0].shape
        torch.Size([5, 2, 8])
    """
    read_backend_config(backend_config)
    return ConvertedLSTM.from_observed(observed_lstm)


_get_lstm_with_individually_observed_parts = get_lstm_with_individually_observed_parts
_get_reference_quantized_lstm_module = get_reference_quantized_lstm_module
