"""Ready-made sets of constructors for ``lstm_utils`` and ``recurrent_parts``.

A function returns keyword arguments: ``get_lstm_with_individually_observed_parts(lstm, **int16_parts())``,
``get_individually_observed_parts(gru, **int16_parts(gru))``. With ``fake_quantize=True`` the constructors
make fake-quantizes, for quantization-aware training. ``whole_range_dynamic`` returns a QConfig instead.
"""

from typing import Any

import torch
from torch import nn
from torchao.quantization.pt2e.fake_quantize import FakeQuantize, FixedQParamsFakeQuantize
from torchao.quantization.pt2e.observer import FixedQParamsObserver

from torchq_compat.errors import ConfigError
from torchq_compat.read.observer_classes import PowerOfTwoMinMaxObserver
from torchq_compat.read.observers import with_whole_range
from torchq_compat.recurrent.cells import LSTM, RNN_RELU, kind_of
from torchq_compat.recurrent.families import FAMILIES
from torchq_compat.support.argument_checks import FLAG, checked_arguments, instance_of, optional
from torchq_compat.support.dtypes import dtype_range
from torchq_compat.support.torch_ao import PlaceholderObserver, QConfig, default_dynamic_qconfig

__all__ = ["int8_parts", "int8_products", "int8_with_int16_cell", "int16_parts", "whole_range_dynamic"]


RECURRENT = optional(instance_of(*(family.float_class for family in FAMILIES)))


@checked_arguments(module=RECURRENT, fake_quantize=FLAG)
def int8_parts(module: nn.Module | None = None, *, fake_quantize: bool = False) -> dict[str, Any]:
    """Return FX's default: all parts follow the QConfig, with fixed scales 1/256 (sigmoid) and 2/256 (tanh).

    Source: ``torch.ao.nn.quantizable.LSTM`` and the fixed qparams of torch.ao's default QConfigMapping. There
    is nothing to override, so the result is empty; the QConfig decides between observers and fake-quantizes.

    Args:
        module: the recurrent module to quantize; not used.
        fake_quantize: not used.

    Returns:
        An empty dict.

    Example:
        >>> from torchq_compat.profiles import int8_parts
        >>> int8_parts()
        {}
    """
    del module, fake_quantize
    return {}


@checked_arguments(module=RECURRENT, fake_quantize=FLAG)
def int16_parts(module: nn.Module | None = None, *, fake_quantize: bool = False) -> dict[str, Any]:
    """Return the 16-bit profile that torch.ao documents for ``_get_lstm_with_individually_observed_parts``.

    Stored in 32 bits, as there: gate sums with scale 2^-11 from -16, sigmoid with scale 2^-16 over [0, 1),
    tanh with scale 2^-15 over [-1, 1), cell state with scale 2^-11 over [-16, 16). The hidden state is quint8
    with scale 2^-7 over [-1, 1); the projections follow the QConfig. Source: the example flow of
    pytorch#96343. For a GRU or RNN, only the groups it has are returned; a GRU's products of hidden state and
    gate have tanh's qparams; the hidden state of an RNN with ReLU, which is unbounded, follows the QConfig.

    Args:
        module: the recurrent module to quantize; default: an LSTM.
        fake_quantize: whether to return fake-quantizes, for quantization-aware training.

    Returns:
        Keyword argument ``<group>_obs_ctr`` -> constructor.

    Example:
        >>> from torchq_compat.profiles import int16_parts
        >>> sorted(int16_parts())[:2]
        ['cell_state_obs_ctr', 'hidden_state_obs_ctr']
    """

    def fixed(scale: float, zero_point: int, dtype: torch.dtype) -> Any:
        return _fixed(scale, zero_point, dtype, fake_quantize=fake_quantize)

    constructors = {
        "linear_output_obs_ctr": fixed(2**-11, 2**15, torch.int32),
        "sigmoid_obs_ctr": fixed(2**-16, 0, torch.int32),
        "tanh_obs_ctr": fixed(2**-15, 2**15, torch.int32),
        "cell_state_obs_ctr": fixed(2**-11, 0, torch.int32),
        "hidden_product_obs_ctr": fixed(2**-15, 2**15, torch.int32),
        "hidden_state_obs_ctr": fixed(2**-7, 2**7, torch.uint8),
    }
    if module is not None and kind_of(module) is RNN_RELU:
        del constructors["hidden_state_obs_ctr"]
    return _of_kind(module, constructors)


@checked_arguments(module=RECURRENT, fake_quantize=FLAG)
def int8_with_int16_cell(module: nn.Module | None = None, *, fake_quantize: bool = False) -> dict[str, Any]:
    """Return the profile with 8-bit activations and a 16-bit cell state, the fixed point of embedded kernels.

    Gate sums are Q3.12 (int16, scale 2^-12), gate outputs and tanh(c) Q0.15 (int16, scale 2^-15); the cell
    state is int16 with the smallest power of two as scale that covers the calibrated range; hidden state and
    input follow the QConfig. Source: the integer LSTM (8x8_16) of the TensorFlow Lite quantization
    specification; tflite-micro#2670. For a GRU or RNN, only the groups it has are returned; a GRU's products
    of hidden state and gate are Q0.15.

    Args:
        module: the recurrent module to quantize; default: an LSTM.
        fake_quantize: whether to return fake-quantizes, for quantization-aware training.

    Returns:
        Keyword argument ``<group>_obs_ctr`` -> constructor.

    Example:
        >>> import torch
        >>> from torchq_compat.profiles import int8_with_int16_cell
        >>> "cell_state_obs_ctr" in int8_with_int16_cell(torch.nn.GRU(4, 8))
        False
    """
    q3_12 = _fixed(2**-12, 0, torch.int16, fake_quantize=fake_quantize)
    q0_15 = _fixed(2**-15, 0, torch.int16, fake_quantize=fake_quantize)
    cell_state = PowerOfTwoMinMaxObserver.with_args(dtype=torch.int16)
    constructors = {
        "igates_obs_ctr": q3_12,
        "hgates_obs_ctr": q3_12,
        "linear_output_obs_ctr": q3_12,
        "sigmoid_obs_ctr": q0_15,
        "tanh_obs_ctr": q0_15,
        "tanh_cell_state_obs_ctr": q0_15,
        "cell_state_obs_ctr": FakeQuantize.with_args(observer=cell_state) if fake_quantize else cell_state,
        "hidden_product_obs_ctr": q0_15,
    }
    return _of_kind(module, constructors)


@checked_arguments(module=RECURRENT, fake_quantize=FLAG)
def int8_products(module: nn.Module | None = None, *, fake_quantize: bool = False) -> dict[str, Any]:
    """Return the profile with 8-bit matrix products, and gates and states in float.

    The projections follow the QConfig: their input, the hidden state they read, and their weights are
    integers. All other parts, including the output and the states, stay float. Source: ONNX Runtime's
    ``DynamicQuantizeLSTM``, with static qparams in place of dynamic ones. The integer products of this
    package do not overflow, so a QConfig with the whole range, such as ``get_default_qconfig("onednn")``, is
    more accurate than one with a reduced range. For a GRU or RNN, only the groups it has are returned.

    Args:
        module: the recurrent module to quantize; default: an LSTM.
        fake_quantize: not used; parts that stay float have no fake-quantize.

    Returns:
        Keyword argument ``<group>_obs_ctr`` -> constructor of an observer that quantizes nothing.

    Example:
        >>> from torchq_compat.profiles import int8_products
        >>> int8_products()["cell_state_obs_ctr"]().dtype
        torch.float32
    """
    del fake_quantize
    stays_float = PlaceholderObserver.with_args(dtype=torch.float32)
    groups = (LSTM if module is None else kind_of(module)).groups
    observed = {group for group in groups if group != "weight" and not group.endswith("_input")}
    return {f"{group}_obs_ctr": stays_float for group in sorted(observed)}


@checked_arguments(qconfig=instance_of(QConfig))
def whole_range_dynamic(qconfig: QConfig = default_dynamic_qconfig) -> QConfig:
    """Return a dynamic QConfig whose activations use all 256 integers, on every engine and CPU.

    torch.ao spreads dynamic activations over half of them where its x86 engines could overflow; the integer
    products of this package cannot overflow. The whole range gains some 6 dB at the same speed. Use the
    result with ``prepare_fx``, or as an entry in the spec of ``quantize_dynamic``;
    ``quantize_dynamic(whole_range=True)`` uses it for every module. torch.ao and FX treat it as ``qconfig``.

    Args:
        qconfig: the dynamic QConfig, with 8-bit activations; its weight observer is kept.

    Returns:
        The QConfig.

    Raises:
        ConfigError: ``qconfig`` is not dynamic, or its activations are not 8-bit integers.

    Example:
        >>> from torchq_compat.profiles import whole_range_dynamic
        >>> whole_range_dynamic().activation().whole_range
        True
    """
    result = with_whole_range(qconfig)
    if result is None:
        raise ConfigError.of("TQ910.not_dynamic")
    return result


def _of_kind(module: nn.Module | None, constructors: dict[str, Any]) -> dict[str, Any]:
    """Return the ``constructors`` of the groups that ``module`` has; if it is None, that an LSTM has."""
    groups = (LSTM if module is None else kind_of(module)).groups
    return {name: value for name, value in constructors.items() if name.removesuffix("_obs_ctr") in groups}


def _fixed(scale: float, zero_point: int, dtype: torch.dtype, *, fake_quantize: bool) -> Any:
    low, high = dtype_range(dtype)
    observer = FixedQParamsObserver.with_args(
        scale=scale, zero_point=zero_point, dtype=dtype, quant_min=low, quant_max=high
    )
    return FixedQParamsFakeQuantize.with_args(observer=observer) if fake_quantize else observer
