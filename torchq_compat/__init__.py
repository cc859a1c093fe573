"""Run legacy FX graph mode quantization scripts on torch.export and torchao's PT2E.

Names are imported when they are first used, because the command line must start, and report errors, without
torch. The errors, which do not need torch, are imported at once.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torchq_compat import errors
from torchq_compat.errors import *  # noqa: F403 - errors.py lists them
from torchq_compat.support.discovery import HOMES

__all__ = [
    "ConvertedModel",
    "Output",
    "QuantizationGraphModule",
    "annotate_outputs",
    "calibrate",
    "check_annotations",
    "check_sharing",
    "compare",
    "convert_fx",
    "convert_to_reference_fx",
    "explain",
    "export",
    "fuse_fx",
    "get_default_convert_custom_config",
    "get_default_prepare_custom_config",
    "merge_observers",
    "prepare_fx",
    "prepare_qat_fx",
    "quantize_dynamic",
    "quantizer_from",
    "reroute_tuples",
    "streaming",
    "suggest",
    "to_executorch",
    "to_onnx",
]


if TYPE_CHECKING:
    from torchq_compat import checkpoints as checkpoints
    from torchq_compat import custom_config as custom_config
    from torchq_compat import custom_modules as custom_modules
    from torchq_compat import lstm_utils as lstm_utils
    from torchq_compat import nn as nn
    from torchq_compat import operators as operators
    from torchq_compat import profiles as profiles
    from torchq_compat import pt2e as pt2e
    from torchq_compat import quantize_eager as quantize_eager
    from torchq_compat import quantize_fx as quantize_fx
    from torchq_compat import recurrent_parts as recurrent_parts
    from torchq_compat.annotate.outputs import annotate_outputs, check_annotations, check_sharing
    from torchq_compat.annotate.quantizers import quantizer_from
    from torchq_compat.annotate.sharing import Output
    from torchq_compat.annotate.tuple_rerouting import reroute_tuples
    from torchq_compat.comparison.cases import calibrate
    from torchq_compat.comparison.collect import compare
    from torchq_compat.comparison.suggesting import suggest
    from torchq_compat.eager.quantize_dynamic import quantize_dynamic
    from torchq_compat.lower.executorch.lowering import to_executorch
    from torchq_compat.lower.export import export
    from torchq_compat.lower.onnx.lowering import to_onnx
    from torchq_compat.lower.streaming import streaming
    from torchq_compat.model.graph_module import ConvertedModel, QuantizationGraphModule
    from torchq_compat.quantize.distributed.merge_observers import merge_observers
    from torchq_compat.quantize.explain import explain
    from torchq_compat.quantize_fx import (
        convert_fx,
        convert_to_reference_fx,
        fuse_fx,
        get_default_convert_custom_config,
        get_default_prepare_custom_config,
        prepare_fx,
        prepare_qat_fx,
    )

    __version__: str

__all__ += errors.__all__

#: Name -> the module that defines it, for names that are not in quantize_fx.
HOMES.update(
    {
        "ConvertedModel": "torchq_compat.model.graph_module",
        "QuantizationGraphModule": "torchq_compat.model.graph_module",
        "Output": "torchq_compat.annotate.sharing",
        "annotate_outputs": "torchq_compat.annotate.outputs",
        "check_annotations": "torchq_compat.annotate.outputs",
        "check_sharing": "torchq_compat.annotate.outputs",
        "calibrate": "torchq_compat.comparison.cases",
        "compare": "torchq_compat.comparison.collect",
        "explain": "torchq_compat.quantize.explain",
        "export": "torchq_compat.lower.export",
        "merge_observers": "torchq_compat.quantize.distributed.merge_observers",
        "quantize_dynamic": "torchq_compat.eager.quantize_dynamic",
        "quantizer_from": "torchq_compat.annotate.quantizers",
        "reroute_tuples": "torchq_compat.annotate.tuple_rerouting",
        "suggest": "torchq_compat.comparison.suggesting",
        "streaming": "torchq_compat.lower.streaming",
        "to_executorch": "torchq_compat.lower.executorch.lowering",
        "to_onnx": "torchq_compat.lower.onnx.lowering",
        # for torch.onnx.export and torch.jit of a model
        "run_for_onnx": "torchq_compat.lower.onnx.forms",
        "lower_to_script": "torchq_compat.quantize_eager",
        "scripted_graph": "torchq_compat.lower.torchscript.scripted",
        "scripted_recurrent": "torchq_compat.lower.torchscript.scripted",
    }
)


#: torch.ao's private name -> the public function here; old scripts import the private names.
_LEGACY_NAMES = {"_reroute_tuple_getitem_pattern": "reroute_tuples"}


#: The modules that users import; all other modules are internal.
_MODULES = (
    "checkpoints",
    "custom_config",
    "custom_modules",
    "errors",
    "lstm_utils",
    "nn",
    "operators",
    "profiles",
    "pt2e",
    "quantize_eager",
    "quantize_fx",
    "recurrent_parts",
)

if not TYPE_CHECKING:  # A type checker reports every name that is not listed above.

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return importlib.import_module(f"{__name__}.{name}")
        if name == "__version__":
            return importlib.import_module("torchq_compat.port.process").package_version()
        if name in _LEGACY_NAMES:
            return getattr(sys.modules[__name__], _LEGACY_NAMES[name])
        if name not in __all__:
            raise AttributeError(f"module 'torchq_compat' has no attribute {name!r}")
        home = importlib.import_module(HOMES.get(name, "torchq_compat.quantize_fx"))
        value = getattr(home, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES, "__version__"})


class _Package(ModuleType):
    """The package; ``__path__`` is hidden from pydoc, or ``help`` would list the internal folders too."""

    @property
    def __path__(self) -> Any:  # type: ignore[override]
        asked_by = sys._getframe(1).f_globals.get("__name__")
        if asked_by == "pydoc":
            raise AttributeError("__path__")
        return vars(self)["__path__"]


sys.modules[__name__].__class__ = _Package
