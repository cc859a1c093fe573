"""All legacy names that this package knows, with their old and new places.

The table is shared: ``run`` redirects these functions in a running process, ``scan`` finds the names in
source code and ``rewrite`` replaces them there. It has names only, so that ``scan`` and ``rewrite`` do not
import torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from torchq_compat.config.old_keywords import KEYWORDS
from torchq_compat.migrate.source.moved_tables import MOVED, MOVED_CLASSES, MOVED_FUNCTIONS, Moved, unchanged

__all__ = [
    "CONVERTING",
    "DICT_GETTERS",
    "EAGER_FUNCTIONS",
    "ENGINE_INTERNALS",
    "KEYWORDS",
    "MOVED",
    "MOVED_CLASSES",
    "MOVED_FUNCTIONS",
    "NAMESPACES",
    "NOT_IN_NAMESPACES",
    "NUMERIC_SUITE",
    "PARAMETERS",
    "PREPARING",
    "Moved",
]

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
    "torch.ao.quantization.quantize_fx._convert_to_reference_decomposed_fx",
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
