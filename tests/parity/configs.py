"""The QConfigMappings and BackendConfigs of the parity corpus."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.ao.quantization.qconfig
import torch.nn.functional as F
from torch import nn
from torch.ao.quantization import (
    FixedQParamsObserver,
    HistogramObserver,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    PerChannelMinMaxObserver,
    QConfig,
    QConfigMapping,
    default_dynamic_qconfig,
    default_per_channel_symmetric_qnnpack_qconfig,
    default_symmetric_qnnpack_qconfig,
    float16_dynamic_qconfig,
    float16_static_qconfig,
    float_qparams_weight_only_qconfig,
    get_default_qat_qconfig_mapping,
    get_default_qconfig,
    get_default_qconfig_mapping,
    per_channel_dynamic_qconfig,
)
from torch.ao.quantization.backend_config import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    DTypeWithConstraints,
    ObservationType,
    get_executorch_backend_config,
    get_fbgemm_backend_config,
    get_native_backend_config,
    get_onednn_backend_config,
    get_qnnpack_backend_config,
    get_tensorrt_backend_config,
)
from torch.ao.quantization.backend_config.x86 import get_x86_backend_config

__all__ = ["BACKENDS", "MAPPINGS", "NAMED_QCONFIGS", "QAT_MAPPINGS"]

X86 = get_default_qconfig("x86")
QNNPACK = get_default_qconfig("qnnpack")
INT8 = QConfig(
    activation=MinMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_tensor_symmetric),
    weight=PerChannelMinMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_channel_symmetric),
)


def with_activation(activation: Any) -> QConfig:
    return QConfig(activation=activation, weight=QNNPACK.weight)


def everywhere(qconfig: QConfig | None) -> Callable[[], QConfigMapping]:
    return lambda: QConfigMapping().set_global(qconfig)


MAPPINGS: dict[str, Callable[[], Any]] = {
    **{
        name: lambda name=name: get_default_qconfig_mapping(name)
        for name in ("x86", "fbgemm", "qnnpack", "onednn")
    },
    "global": everywhere(X86),
    "none": everywhere(None),
    # Observers.
    "min_max": everywhere(with_activation(MinMaxObserver)),
    "symmetric": everywhere(with_activation(MinMaxObserver.with_args(qscheme=torch.per_tensor_symmetric))),
    "moving_average": everywhere(
        with_activation(MovingAverageMinMaxObserver.with_args(averaging_constant=0.3))
    ),
    "histogram": everywhere(with_activation(HistogramObserver.with_args(bins=256))),
    "reduced_range": everywhere(with_activation(MinMaxObserver.with_args(reduce_range=True))),
    "own_range": everywhere(with_activation(MinMaxObserver.with_args(quant_min=0, quant_max=100))),
    "fixed": everywhere(with_activation(FixedQParamsObserver.with_args(scale=2**-4, zero_point=64))),
    "own_eps": everywhere(with_activation(MinMaxObserver.with_args(eps=2**-4))),
    "per_channel_activations": everywhere(with_activation(PerChannelMinMaxObserver.with_args(ch_axis=1))),
    "affine_weights": everywhere(
        QConfig(MinMaxObserver, MinMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_tensor_affine))
    ),
    "weights_by_input": everywhere(
        QConfig(MinMaxObserver, PerChannelMinMaxObserver.with_args(dtype=torch.qint8, ch_axis=1))
    ),
    "int8_activations": everywhere(INT8),
    "symmetric_qnnpack": everywhere(default_symmetric_qnnpack_qconfig),
    "per_channel_symmetric_qnnpack": everywhere(default_per_channel_symmetric_qnnpack_qconfig),
    # Dynamic, weight-only, half precision.
    "dynamic": everywhere(default_dynamic_qconfig),
    "per_channel_dynamic": everywhere(per_channel_dynamic_qconfig),
    "fp16_dynamic": everywhere(float16_dynamic_qconfig),
    "fp16_static": everywhere(float16_static_qconfig),
    "weight_only_embeddings": lambda: (
        QConfigMapping()
        .set_object_type(nn.Embedding, float_qparams_weight_only_qconfig)
        .set_object_type(nn.EmbeddingBag, float_qparams_weight_only_qconfig)
    ),
    "embeddings_and_static": lambda: (
        get_default_qconfig_mapping("x86")
        .set_object_type(nn.Embedding, float_qparams_weight_only_qconfig)
        .set_object_type(nn.EmbeddingBag, float_qparams_weight_only_qconfig)
    ),
    "embeddings_and_dynamic": lambda: (
        QConfigMapping()
        .set_global(default_dynamic_qconfig)
        .set_object_type(nn.Embedding, float_qparams_weight_only_qconfig)
        .set_object_type(nn.EmbeddingBag, float_qparams_weight_only_qconfig)
    ),
    # Levels.
    "linear_only": lambda: QConfigMapping().set_object_type(nn.Linear, X86),
    "conv_only": lambda: QConfigMapping().set_object_type(nn.Conv2d, X86),
    "functions_only": lambda: (
        QConfigMapping()
        .set_object_type(F.linear, X86)
        .set_object_type(F.conv2d, X86)
        .set_object_type(F.relu, X86)
    ),
    "methods_off": lambda: (
        get_default_qconfig_mapping("x86")
        .set_object_type("reshape", None)
        .set_object_type("mean", None)
        .set_object_type("transpose", None)
    ),
    "reshape_only": lambda: QConfigMapping().set_object_type("reshape", X86).set_object_type(nn.Linear, X86),
    "add_off": lambda: (
        get_default_qconfig_mapping("x86")
        .set_object_type(torch.add, None)
        .set_object_type(operator.add, None)
    ),
    "torch_add_off": lambda: get_default_qconfig_mapping("x86").set_object_type(torch.add, None),
    "operator_mul_off": lambda: get_default_qconfig_mapping("x86").set_object_type(operator.mul, None),
    "relu_off": lambda: get_default_qconfig_mapping("x86").set_object_type(nn.ReLU, None),
    "regex": lambda: (
        QConfigMapping().set_module_name_regex(r"layer1\.\d\.conv\d", X86).set_module_name_regex("fc", X86)
    ),
    "fc_off": lambda: get_default_qconfig_mapping("x86").set_module_name("fc", None),
    "layer_off": lambda: get_default_qconfig_mapping("x86").set_module_name("layer1.0", None),
    "layer_off_but_conv": lambda: (
        get_default_qconfig_mapping("x86")
        .set_module_name("layer1", None)
        .set_module_name("layer1.0.conv1", X86)
    ),
    "second_linear_off": lambda: get_default_qconfig_mapping("x86").set_module_name_object_type_order(
        "", nn.Linear, 1, None
    ),
    "second_conv_of_block_off": lambda: get_default_qconfig_mapping("x86").set_module_name_object_type_order(
        "layer1.0", nn.Conv2d, 1, None
    ),
    "first_add_off": lambda: get_default_qconfig_mapping("x86").set_module_name_object_type_order(
        "", operator.add, 0, None
    ),
    "mixed_dtypes": lambda: get_default_qconfig_mapping("x86").set_module_name("layer1.1", INT8),
    "mixed_static_dynamic": lambda: get_default_qconfig_mapping("x86").set_object_type(
        nn.Linear, default_dynamic_qconfig
    ),
    # Dict forms, as in old scripts.
    "dict_global": lambda: {"": X86},
    "dict_levels": lambda: {
        "": X86,
        "object_type": [(nn.ReLU, X86), (F.relu, X86), ("reshape", X86)],
        "module_name_regex": [(r"layer1\.1.*", None)],
        "module_name": [("fc", None)],
        "module_name_object_type_order": [("layer1.0", nn.Conv2d, 0, None)],
    },
    "dict_d2go": lambda: {
        "": None,
        "module_name": [("backbone", QNNPACK), ("rpn", QNNPACK)],
    },
    "dict_d2go_regex": lambda: {"": QNNPACK, "module_name_regex": [(r"roi_heads\..*", None)]},
}

QAT_MAPPINGS: dict[str, Callable[[], Any]] = {
    f"qat_{name}": lambda name=name: get_default_qat_qconfig_mapping(name)
    for name in ("x86", "qnnpack", "fbgemm")
}

#: Every qconfig that torch.ao names, as the global one.
NAMED_QCONFIGS = {
    name: value
    for name, value in vars(torch.ao.quantization.qconfig).items()
    if isinstance(value, QConfig) and not name.startswith("_")
}
for _name, _qconfig in NAMED_QCONFIGS.items():
    (QAT_MAPPINGS if "qat" in _name else MAPPINGS)[_name] = everywhere(_qconfig)

STATIC = DTypeConfig(
    input_dtype=torch.quint8, output_dtype=torch.quint8, weight_dtype=torch.qint8, bias_dtype=torch.float
)


def native_entries() -> dict[Any, BackendPatternConfig]:
    return {
        config.pattern: config for config in get_native_backend_config().configs if config.pattern is not None
    }


def only_linear_and_conv() -> BackendConfig:
    """A user's config: two modules and one fused pair, static only; add shares the observer of its input."""
    native = native_entries()
    backend = BackendConfig("only linear and conv")
    for pattern in (nn.Linear, nn.Conv2d, (nn.Conv2d, nn.ReLU), torch.ao.nn.intrinsic.ConvReLU2d):
        backend.set_backend_pattern_config(native[pattern].set_dtype_configs([STATIC]))
    share = ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT
    return backend.set_backend_pattern_config(
        BackendPatternConfig(operator.add).set_observation_type(share).set_dtype_configs([STATIC])
    )


def without_argument_roles() -> BackendConfig:
    """A user's config that lacks the argument positions of weight and bias for F.linear and F.conv2d."""
    backend = BackendConfig("without argument roles")
    for function in (F.linear, F.conv2d):
        backend.set_backend_pattern_config(BackendPatternConfig(function).set_dtype_configs([STATIC]))
    return backend


def not_observed() -> BackendConfig:
    """A user's config whose linear is quantized without observers at its input and output."""
    linear = native_entries()[nn.Linear].set_dtype_configs([STATIC])
    linear.set_observation_type(ObservationType.INPUT_OUTPUT_NOT_OBSERVED)
    return BackendConfig("not observed").set_backend_pattern_config(linear)


def constrained(**limits: Any) -> Callable[[], BackendConfig]:
    """The native config with ``limits`` on quint8 activations."""

    def constrain(config: DTypeConfig) -> DTypeConfig:
        if config.input_dtype is not torch.quint8 or config.is_dynamic:
            return config
        dtype = DTypeWithConstraints(dtype=torch.quint8, **limits)
        output = dtype if config.output_dtype is torch.quint8 else config.output_dtype
        return DTypeConfig(dtype, output, config.weight_dtype, config.bias_dtype)

    def make() -> BackendConfig:
        backend = BackendConfig("constrained")
        for entry in get_native_backend_config().configs:
            entry.dtype_configs = [constrain(config) for config in entry.dtype_configs]
            backend.set_backend_pattern_config(entry)
        return backend

    return make


BACKENDS: dict[str, Callable[[], Any]] = {
    "default": lambda: None,
    "native": get_native_backend_config,
    "fbgemm": get_fbgemm_backend_config,
    "x86": get_x86_backend_config,
    "onednn": get_onednn_backend_config,
    "qnnpack": get_qnnpack_backend_config,
    "executorch": get_executorch_backend_config,
    "tensorrt": get_tensorrt_backend_config,
    "native_dict": lambda: get_native_backend_config().to_dict(),
    "only_linear_and_conv": only_linear_and_conv,
    "not_observed": not_observed,
    "without_argument_roles": without_argument_roles,
    "range_127": constrained(quant_min_lower_bound=0, quant_max_upper_bound=127),
    "range_255": constrained(quant_min_lower_bound=0, quant_max_upper_bound=255),
    "scale_min": constrained(scale_min_lower_bound=2**-12),
    "scale_min_loose": constrained(scale_min_lower_bound=2**-30),
    "fixed": constrained(scale_exact_match=2**-4, zero_point_exact_match=64),
}
