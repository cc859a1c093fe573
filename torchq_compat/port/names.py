"""All legacy names that this package knows, with their old and new places. Names only, without torch."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple


class Moved(NamedTuple):
    """The names of a legacy module, each with its name in the module that replaces it."""

    legacy: str
    replacement: str
    names: Mapping[str, str]


def unchanged(*names: str) -> dict[str, str]:
    """Return unchanged names in the form of ``Moved.names``."""
    return {name: name for name in names}


FUNCTIONS = unchanged("prepare_fx", "prepare_qat_fx", "convert_fx", "convert_to_reference_fx", "fuse_fx")
#: Private, but scripts for other runtimes call it.
REFERENCE = {"_convert_to_reference_decomposed_fx": "convert_to_reference_fx"}
PART_FUNCTIONS = {
    "_get_lstm_with_individually_observed_parts": "get_lstm_with_individually_observed_parts",
    "_get_reference_quantized_lstm_module": "get_reference_quantized_lstm_module",
}
CONFIG_CLASSES = unchanged(
    "PrepareCustomConfig", "ConvertCustomConfig", "FuseCustomConfig", "StandaloneModuleConfigEntry"
)
IMPORTED_BY_QUANTIZE_FX = unchanged("PrepareCustomConfig", "ConvertCustomConfig", "FuseCustomConfig")

MOVED_FUNCTIONS = (
    Moved("torch.ao.quantization.quantize_fx", "torchq_compat.quantize_fx", {**FUNCTIONS, **REFERENCE}),
    Moved("torch.quantization.quantize_fx", "torchq_compat.quantize_fx", FUNCTIONS),
    Moved("torch.ao.quantization.fx.lstm_utils", "torchq_compat.lstm_utils", PART_FUNCTIONS),
)
#: Both modules have the same classes, so only source code has to change.
MOVED_CLASSES = (
    Moved("torch.ao.quantization.fx.custom_config", "torchq_compat.custom_config", CONFIG_CLASSES),
    Moved("torch.ao.quantization.quantize_fx", "torchq_compat.custom_config", IMPORTED_BY_QUANTIZE_FX),
)
MOVED = (*MOVED_FUNCTIONS, *MOVED_CLASSES)
LEGACY_MODULES = frozenset(moved.legacy for moved in MOVED)
LEGACY_NAMES = frozenset(f"{moved.legacy}.{name}" for moved in MOVED for name in moved.names)


# All legacy names that this package knows, with their old and new places.
#
# The table is shared: ``run`` redirects these functions in a running process, ``scan`` finds the names in
# source code and ``rewrite`` replaces them there. It has names only, so that ``scan`` and ``rewrite`` do not
# import torch.

_NAMES = tomllib.loads(Path(__file__).with_name("names.toml").read_text())
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
PARAMETERS: Mapping[str, list[str]] = _NAMES["parameters"]

#: Functions that return a dict form -> functions that return the object, in the same module.
DICT_GETTERS: Mapping[str, str] = _NAMES["dict_getters"]

#: Namespaces that only re-export the contents of another namespace.
NAMESPACES: Mapping[str, str] = _NAMES["namespaces"]
#: Names that are defined in the old namespaces, or that the tables above move elsewhere.
NOT_IN_NAMESPACES = frozenset(
    {"torch.quantization.default_eval_fn", "torch.quantization.quantize_fx", "torch.quantization.fx"}
)

#: Prefixes of dotted names of FX's engine that have no counterpart in PT2E.
ENGINE_INTERNALS: list[str] = _NAMES["engine_internals"]
#: Prefixes of dotted names of the Numeric Suite, eager and FX.
NUMERIC_SUITE: list[str] = _NAMES["numeric_suite"]


# Observers and fake-quantizes of torch.ao that torchao has by the same names. Names only, no torch.


LEGACY, TORCHAO = "torch.ao.quantization", "torchao.quantization.pt2e"

PT2E_OBSERVERS = tuple(
    Moved(legacy, f"{TORCHAO}.{module}", unchanged(*names))
    for module, names in (("observer", _NAMES["observers"]), ("fake_quantize", _NAMES["fake_quantizes"]))
    for legacy in (f"{LEGACY}.{module}", LEGACY)
)


# Functions that captured a model for PT2E and were removed from torch. Names only, without torch.


#: The full name of a removed function that ``torch.export.export`` replaces -> whether it returned the graph
#: module, not the exported program.
REMOVED_CAPTURES: Mapping[str, bool] = {
    "torch._export.capture_pre_autograd_graph": True,
    "torch.export.export_for_training": False,
    "torch.export._trace._export_for_training": False,
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


def new_module(name: str, modules: Mapping[str, str] = REMOVED) -> str | None:
    """Return the new full name of ``name``, one of ``modules`` or something in one; None for others."""
    for old, new in modules.items():
        if name == old or name.startswith(f"{old}."):
            return new + name[len(old) :]
    return None
