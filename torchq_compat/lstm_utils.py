"""``torch.ao.quantization.fx.lstm_utils`` on PT2E: LSTMs whose parts are observed one by one.

Legacy: each helper built every cell with ``prepare_fx`` and then found the ops to re-observe by counting adds
and multiplications, in the forward direction only. Here each part has a name, in both directions; see
``recurrent.cells``. ``torchq_compat.recurrent_parts`` does the same for GRU, RNN and cells.
"""

from typing import Any

from torch import nn

from torchq_compat.errors import CustomModuleError
from torchq_compat.read.backend_configs import read_backend_config
from torchq_compat.recurrent import families
from torchq_compat.support.argument_checks import FLAG, checked_arguments
from torchq_compat.support.torch_ao import BackendConfig, quantizable

__all__ = [
    "get_lstm_with_individually_observed_parts",
    "get_reference_quantized_lstm_module",
]


ObserverOrFakeQuantizeConstructor = Any


@checked_arguments(example_inputs=families.CELL_INPUTS, split_gates=FLAG)
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
) -> families.ObservedLSTM:
    """Return an observed LSTM whose parts, in both directions, are observed with the given constructors.

    Legacy: ``_get_lstm_with_individually_observed_parts``. A constructor is an observer or fake-quantize
    class of torch.ao or torchao, or ``Class.with_args(...)``. A part without one follows
    ``float_lstm.qconfig``; sigmoid and tanh then have fixed qparams over [0, 1) and [-1, 1).

    Args:
        float_lstm: an ``nn.LSTM`` with a ``qconfig`` attribute, as passed to ``from_float``.
        example_inputs: inputs of the cell, as in FX: ``(x, (h, c))`` with x (B, I). If given, they are
            checked against the LSTM's sizes; they are not needed otherwise.
        backend_config: the dtypes that the parts may have; default: any integer dtype.
        linear_output_obs_ctr: for the sum of the two projections, which is the gates' input.
        sigmoid_obs_ctr: for the outputs of the input, forget and output gates.
        tanh_obs_ctr: for the output of the cell gate.
        cell_state_obs_ctr: for ``f * c``, ``i * g`` and their sum, the new cell state.
        hidden_state_obs_ctr: for ``o * tanh(c)``, the new hidden state and the module's output.
        split_gates: use one pair of projections and one sum per gate, not one of each that is four times as
            wide.
        igates_obs_ctr: for ``W_ih x + b_ih``.
        hgates_obs_ctr: for ``W_hh h + b_hh``.
        tanh_cell_state_obs_ctr: for ``tanh(c)``.
        weight_obs_ctr: for the weights of both projections.
        sigmoid_input_obs_ctr: for the inputs of the three sigmoid gates, separately from the op before them.
        tanh_input_obs_ctr: for the input of the cell gate, separately from the op before it.

    Raises:
        ConfigError: a constructor is not an observer or fake-quantize class, or ``backend_config`` does not
            allow a dtype; the message names the part.
        CustomModuleError: ``float_lstm`` is not an ``nn.LSTM`` or has no qconfig, or ``example_inputs`` do
            not fit its sizes.

    Returns:
        The observed LSTM, called with the arguments of ``float_lstm``: ``(x, (h_0, c_0))`` in float32.

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
    constructors = {name: value for name, value in locals().items() if name.endswith("_obs_ctr")}
    if not isinstance(float_lstm, nn.LSTM):
        raise CustomModuleError.call_failed(
            "float_lstm", f"an nn.LSTM is needed, got {type(float_lstm).__name__}"
        )
    observed = families.get_individually_observed_parts(
        float_lstm,
        example_inputs,
        backend_config,
        split_gates=split_gates,
        **constructors,
    )
    assert isinstance(observed, families.ObservedLSTM)
    return observed


def get_reference_quantized_lstm_module(
    observed_lstm: quantizable.LSTM,
    backend_config: BackendConfig | dict[str, Any] | None = None,
) -> families.ConvertedLSTM:
    """Return the q-dq form of ``observed_lstm``.

    Legacy: ``_get_reference_quantized_lstm_module``. There ``backend_config`` chose the reference modules; a
    q-dq graph has none, so ``backend_config`` has no effect here.

    Args:
        observed_lstm: a calibrated observed LSTM of this package; it is not changed.
        backend_config: checked, but not used.

    Returns:
        The converted LSTM, called with the arguments of the float LSTM.

    Raises:
        ConfigError: ``backend_config`` cannot be read.
        CustomModuleError: ``observed_lstm`` is not an LSTM observed by this package.

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
    return families.ConvertedLSTM.from_observed(observed_lstm)


_get_lstm_with_individually_observed_parts = get_lstm_with_individually_observed_parts
_get_reference_quantized_lstm_module = get_reference_quantized_lstm_module
