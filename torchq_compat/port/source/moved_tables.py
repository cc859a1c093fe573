"""FX's functions and configuration classes: their legacy modules and their modules now."""

from collections.abc import Mapping
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
