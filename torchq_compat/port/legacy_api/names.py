"""All legacy names that this package knows, with their old and new places. Names only, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torchq_compat.port.source.moved_tables import Moved, unchanged

# All legacy names that this package knows, with their old and new places.
#
# The table is shared: ``run`` redirects these functions in a running process, ``scan`` finds the names in
# source code and ``rewrite`` replaces them there. It has names only, so that ``scan`` and ``rewrite`` do not
# import torch.


#: The functions that prepare a model, and those that convert a prepared one.
PREPARING = ("prepare_fx", "prepare_qat_fx")
CONVERTING = ("convert_fx", "convert_to_reference_fx")


#: Eager functions: only these names move, the rest of their modules stays.
EAGER_FUNCTIONS = tuple(
    Moved(module, "torchq_compat", unchanged("quantize_dynamic"))
    for module in (
        "torch.ao.quantization",
        "torch.ao.quantization.quantize",
        "torch.quantization",
        "torch.quantization.quantize",
    )
)
#: The functions of eager mode that ``run`` redirects; fusing makes the same modules in torch.ao and here.
EAGER_FLOW = (
    *("prepare", "prepare_qat", "convert", "quantize", "quantize_qat"),
    *("add_quant_dequant", "propagate_qconfig_", "swap_module"),
)
FUSING = ("fuse_modules", "fuse_modules_qat")
EAGER_MODE = tuple(
    Moved(f"{package}{module}", "torchq_compat.quantize_eager", unchanged(*names))
    for package in ("torch.ao.quantization", "torch.quantization")
    for module, names in (("", (*EAGER_FLOW, *FUSING)), (".quantize", EAGER_FLOW), (".fuse_modules", FUSING))
)
#: Positional parameters, in order.
PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "prepare_fx": (
        "model",
        "qconfig_mapping",
        "example_inputs",
        "prepare_custom_config",
        "_equalization_config",
        "backend_config",
    ),
    "prepare_qat_fx": (
        "model",
        "qconfig_mapping",
        "example_inputs",
        "prepare_custom_config",
        "backend_config",
    ),
    "convert_fx": (
        "graph_module",
        "convert_custom_config",
        "_remove_qconfig",
        "qconfig_mapping",
        "backend_config",
        "keep_original_weights",
    ),
    "convert_to_reference_fx": (
        "graph_module",
        "convert_custom_config",
        "_remove_qconfig",
        "qconfig_mapping",
        "backend_config",
    ),
    "fuse_fx": ("model", "fuse_custom_config", "backend_config"),
}

#: Functions that return a dict form -> functions that return the object, in the same module.
DICT_GETTERS: Mapping[str, str] = {
    "torch.ao.quantization.get_default_qconfig_dict": "get_default_qconfig_mapping",
    "torch.ao.quantization.get_default_qat_qconfig_dict": "get_default_qat_qconfig_mapping",
    "torch.ao.quantization.backend_config.get_native_backend_config_dict": "get_native_backend_config",
    "torch.ao.quantization.backend_config.get_tensorrt_backend_config_dict": "get_tensorrt_backend_config",
}

#: Namespaces that only re-export the contents of another namespace.
NAMESPACES: Mapping[str, str] = {
    "torch.quantization": "torch.ao.quantization",
    "torch.nn.intrinsic": "torch.ao.nn.intrinsic",
    "torch.nn.qat": "torch.ao.nn.qat",
    "torch.nn.quantizable": "torch.ao.nn.quantizable",
    "torch.nn.quantized": "torch.ao.nn.quantized",
}
#: Names that are defined in the old namespaces, or that the tables above move elsewhere.
NOT_IN_NAMESPACES = frozenset(
    {"torch.quantization.default_eval_fn", "torch.quantization.quantize_fx", "torch.quantization.fx"}
)

#: Prefixes of dotted names of FX's engine that have no counterpart in PT2E.
ENGINE_INTERNALS = (
    "torch.ao.quantization.fx._equalize",
    "torch.ao.quantization.fx._model_report",
    "torch.ao.quantization.fx.convert",
    "torch.ao.quantization.fx.fuse",
    "torch.ao.quantization.fx.fuse_handler",
    "torch.ao.quantization.fx.graph_module",
    "torch.ao.quantization.fx.match_utils",
    "torch.ao.quantization.fx.pattern_utils",
    "torch.ao.quantization.fx.prepare",
    "torch.ao.quantization.fx.qconfig_mapping_utils",
    "torch.ao.quantization.fx.quantize_handler",
    "torch.ao.quantization.fx.tracer",
    "torch.ao.quantization.fx.utils",
    "torch.ao.quantization.quantize_fx.QuantizationTracer",
    "torch.ao.quantization.quantize_fx.Scope",
    "torch.ao.quantization.quantize_fx.ScopeContextManager",
    "torch.quantization.fx",
    # Private functions of quantize_fx; ``run`` redirects those that have a meaning here.
    "torch.ao.quantization.quantize_fx._convert_fx",
    "torch.ao.quantization.quantize_fx._fuse_fx",
    "torch.ao.quantization.quantize_fx._prepare_fx",
    "torch.ao.quantization.quantize_fx._swap_ff_with_fxff",
    "torch.quantization.quantize_fx._convert_fx",
    "torch.quantization.quantize_fx._fuse_fx",
    "torch.quantization.quantize_fx._prepare_fx",
    "torch.quantization.quantize_fx._swap_ff_with_fxff",
)
#: Prefixes of dotted names of the Numeric Suite, eager and FX.
NUMERIC_SUITE = (
    "torch.ao.ns",
    "torch.quantization._numeric_suite",
    "torch.quantization._numeric_suite_fx",
)


# Observers and fake-quantizes of torch.ao that torchao has by the same names. Names only, no torch.


OBSERVERS = [
    "default_affine_fixed_qparams_observer",
    "default_debug_observer",
    "default_dynamic_quant_observer",
    "default_fixed_qparams_range_0to1_observer",
    "default_fixed_qparams_range_neg1to1_observer",
    "default_float_qparams_observer",
    "default_float_qparams_observer_4bit",
    "default_histogram_observer",
    "default_observer",
    "default_per_channel_weight_observer",
    "default_placeholder_observer",
    "default_reuse_input_observer",
    "default_symmetric_fixed_qparams_observer",
    "default_weight_observer",
    "get_observer_state_dict",
    "load_observer_state_dict",
    "per_channel_weight_observer_range_neg_127_to_127",
    "weight_observer_range_neg_127_to_127",
    "FixedQParamsObserver",
    "HistogramObserver",
    "MinMaxObserver",
    "MovingAverageMinMaxObserver",
    "MovingAveragePerChannelMinMaxObserver",
    "NoopObserver",
    "ObserverBase",
    "PerChannelMinMaxObserver",
    "PlaceholderObserver",
    "RecordingObserver",
    "ReuseInputObserver",
    "UniformQuantizationObserverBase",
    "AffineQuantizedObserverBase",
]
FAKE_QUANTIZES = [
    "FakeQuantizeBase",
    "FakeQuantize",
    "FixedQParamsFakeQuantize",
    "FusedMovingAvgObsFakeQuantize",
    "disable_fake_quant",
    "disable_observer",
    "enable_fake_quant",
    "enable_observer",
    "default_fake_quant",
    "default_weight_fake_quant",
    "default_dynamic_fake_quant",
    "default_fixed_qparams_range_neg1to1_fake_quant",
    "default_fixed_qparams_range_0to1_fake_quant",
    "default_symmetric_fixed_qparams_fake_quant",
    "default_affine_fixed_qparams_fake_quant",
    "default_per_channel_weight_fake_quant",
    "default_embedding_fake_quant",
    "default_embedding_fake_quant_4bit",
    "default_histogram_fake_quant",
    "default_fused_act_fake_quant",
    "default_fused_wt_fake_quant",
    "default_fused_per_channel_wt_fake_quant",
    "fused_wt_fake_quant_range_neg_127_to_127",
    "fused_per_channel_wt_fake_quant_range_neg_127_to_127",
]
LEGACY, TORCHAO = "torch.ao.quantization", "torchao.quantization.pt2e"

PT2E_OBSERVERS = tuple(
    Moved(legacy, f"{TORCHAO}.{module}", {name: name for name in names})
    for module, names in (("observer", OBSERVERS), ("fake_quantize", FAKE_QUANTIZES))
    for legacy in (f"{LEGACY}.{module}", LEGACY)
)


# Functions that captured a model for PT2E and were removed from torch. Names only, without torch.


class RemovedCapture(NamedTuple):
    """A removed function that ``torch.export.export`` replaces.

    Attributes:
        module, name: its old place.
        gave_module: whether it returned the graph module, not the exported program.
    """

    module: str
    name: str
    gave_module: bool


#: Full name -> the removed function.
REMOVED_CAPTURES: Mapping[str, RemovedCapture] = {
    f"{each.module}.{each.name}": each
    for each in (
        RemovedCapture("torch._export", "capture_pre_autograd_graph", gave_module=True),
        RemovedCapture("torch.export", "export_for_training", gave_module=False),
        RemovedCapture("torch.export._trace", "_export_for_training", gave_module=False),
    )
}


# Modules that torch has removed, and the new modules of their contents. Names only, without torch.


XNNPACK = "executorch.backends.xnnpack.quantizer.xnnpack_quantizer"
X86 = f"{TORCHAO}.quantizer.x86_inductor_quantizer"
#: Legacy module -> the module that replaces it, submodules included; the first match counts.
REMOVED: Mapping[str, str] = {
    **{
        f"{LEGACY}.{package}{old}": new
        for package in ("quantizer", "_pt2e.quantizer", "pt2e.quantizer")
        for old, new in (
            (".xnnpack_quantizer_utils", f"{XNNPACK}_utils"),
            (".xnnpack_quantizer", XNNPACK),
            (".qnnpack_quantizer", XNNPACK),
            ("", f"{TORCHAO}.quantizer"),
        )
    },
    f"{LEGACY}.quantize_pt2e": f"{TORCHAO}.quantize_pt2e",
    f"{LEGACY}._quantize_pt2e": f"{TORCHAO}.quantize_pt2e",
    f"{LEGACY}._pt2e": TORCHAO,
    f"{LEGACY}.pt2e": TORCHAO,
}
#: Functions of exported models that torch.ao.quantization itself had.
OF_EXPORTED = (
    "move_exported_model_to_eval",
    "move_exported_model_to_train",
    "allow_exported_model_train_eval",
)
#: A name in a removed module -> its module and its name now, where the module's successor does not have it.
NAMES_ELSEWHERE: Mapping[str, tuple[str, str]] = {
    "QNNPackQuantizer": (XNNPACK, "XNNPACKQuantizer"),
    "XNNPACKQuantizer": (XNNPACK, "XNNPACKQuantizer"),
    "get_symmetric_quantization_config": (XNNPACK, "get_symmetric_quantization_config"),
    "X86InductorQuantizer": (X86, "X86InductorQuantizer"),
    "get_default_x86_inductor_quantization_config": (X86, "get_default_x86_inductor_quantization_config"),
    **{name: (TORCHAO, name) for name in OF_EXPORTED},
    **{f"_{name}": (TORCHAO, name) for name in OF_EXPORTED},
}
MOVED_OF_EXPORTED = (Moved(LEGACY, TORCHAO, unchanged(*OF_EXPORTED)),)
#: PT2E's flow, whose annotations ``torchq_compat.pt2e`` checks; the first releases had other names.
PT2E_FUNCTIONS = {
    **unchanged("prepare_pt2e", "prepare_qat_pt2e", "convert_pt2e"),
    "prepare_pt2e_quantizer": "prepare_pt2e",
    "prepare_qat_pt2e_quantizer": "prepare_qat_pt2e",
}
MOVED_PT2E = tuple(
    Moved(module, "torchq_compat.pt2e", PT2E_FUNCTIONS)
    for module in (f"{TORCHAO}.quantize_pt2e", f"{LEGACY}.quantize_pt2e", f"{LEGACY}._quantize_pt2e")
)


def new_module(name: str) -> str | None:
    """Return the new full name of ``name``, a removed module or something in one; None for any other name."""
    for old, new in REMOVED.items():
        if name == old or name.startswith(f"{old}."):
            return new + name[len(old) :]
    return None
