"""The support table: one row per FX feature, and ``migration/support.md`` generated from it.

python -m migration.generate

Settings that prepare reads are not declared but tried: a setting that its reader refuses is a refused row,
with the reason of that error. The other rows are declared here, since no code could disagree with them: a
test compares the rows with torch.ao's own signatures, setters and observer classes.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from torch import nn

from migration.generate.quantizers_table import HEAD as QUANTIZERS
from migration.generate.quantizers_table import quantizers_table
from migration.generate.toolkits import toolkits_table
from torchq_compat.errors import ConfigError
from torchq_compat.read.custom_configs import read_prepare_custom_config
from torchq_compat.support.quantized_tensors import REPLACEMENTS
from torchq_compat.support.torch_ao import PrepareCustomConfig, QConfigMapping, quantizable


class Status(StrEnum):
    SUPPORTED = "supported"
    DIFFERS = "differs"
    REFUSED = "refused"


@dataclass(frozen=True)
class Feature:
    """One row.

    Attributes:
        area: the heading of its section.
        name: the name in FX.
        note: how it differs or why it is refused; empty if there is nothing to note.
    """

    area: str
    name: str
    status: Status
    note: str = ""


SUPPORTED, DIFFERS, REFUSED = Status.SUPPORTED, Status.DIFFERS, Status.REFUSED
NOT_LOWERED = "not read: explain says which kernels of the engine are used"
NO_SWAP = "not read: a captured model has operators, no modules to swap"
AREAS: dict[str, tuple[tuple[str, Status, str], ...]] = {
    "Functions": (
        ("prepare_fx", SUPPORTED, ""),
        ("prepare_fx: model", DIFFERS, "copied; FX marked it and shared its parameters"),
        ("prepare_fx: qconfig_mapping", SUPPORTED, "a torchao Quantizer too"),
        ("prepare_fx: example_inputs", DIFFERS, "needed: torch.export runs the model; sizes stay free"),
        ("prepare_fx: prepare_custom_config", SUPPORTED, ""),
        ("prepare_fx: _equalization_config", REFUSED, "PT2E has no input-weight equalization"),
        ("prepare_fx: backend_config", SUPPORTED, ""),
        ("prepare_qat_fx", SUPPORTED, "with the arguments of prepare_fx"),
        (
            "convert_fx",
            DIFFERS,
            "one graph on plain integers, the same for every engine and CPU; FX: quantized tensors",
        ),
        ("convert_fx: graph_module", DIFFERS, "copied; FX used it up"),
        ("convert_fx: convert_custom_config", SUPPORTED, ""),
        ("convert_fx: _remove_qconfig", DIFFERS, "nothing to remove: no module has a qconfig"),
        (
            "convert_fx: qconfig_mapping",
            SUPPORTED,
            "switches off; refuses what FX refuses; not custom modules",
        ),
        ("convert_fx: backend_config", DIFFERS, NOT_LOWERED),
        ("convert_fx: keep_original_weights", DIFFERS, NOT_LOWERED),
        ("convert_to_reference_fx", DIFFERS, "quantized_decomposed operators, not quantized tensors"),
        ("fuse_fx", SUPPORTED, "a model that torch.fx cannot trace is returned as it is: prepare fuses"),
        ("fuse_fx: fuse_custom_config", SUPPORTED, ""),
        ("fuse_fx: backend_config", SUPPORTED, "checked"),
    ),
    "QConfigMapping": (
        ("QConfigMapping.set_global", SUPPORTED, ""),
        ("QConfigMapping.set_object_type", DIFFERS, "x.add(y) is x + y in an exported graph"),
        ("QConfigMapping.set_module_name_regex", SUPPORTED, ""),
        ("QConfigMapping.set_module_name", SUPPORTED, ""),
        (
            "QConfigMapping.set_module_name_object_type_order",
            DIFFERS,
            "an index beyond the last call is warned about",
        ),
        ("QConfigMapping.from_dict", DIFFERS, "unknown keys are an error, not ignored"),
    ),
    "QConfig": (
        ("MinMaxObserver", SUPPORTED, ""),
        ("MovingAverageMinMaxObserver", SUPPORTED, "explain tells the share of values it cuts off"),
        ("PerChannelMinMaxObserver", SUPPORTED, ""),
        ("MovingAveragePerChannelMinMaxObserver", SUPPORTED, ""),
        ("HistogramObserver", SUPPORTED, ""),
        ("FixedQParamsObserver", DIFFERS, "0..255, its range for every dtype, is read as that of the dtype"),
        ("PlaceholderObserver", SUPPORTED, ""),
        ("RecordingObserver", SUPPORTED, "prepared; refused at convert, as in FX"),
        ("NoopObserver", SUPPORTED, "with float16; refused at convert with integers, as in FX"),
        ("ReuseInputObserver", SUPPORTED, ""),
        ("FakeQuantize", DIFFERS, "converts to the range that was trained, FX to that of the dtype"),
        ("FixedQParamsFakeQuantize", SUPPORTED, ""),
        ("FusedMovingAvgObsFakeQuantize", DIFFERS, "as FakeQuantize"),
        ("a user's own observer or fake-quantize class", SUPPORTED, ""),
        ("quint8, qint8, qint32", SUPPORTED, "PT2E writes uint8, int8, int32"),
        ("int16, uint16", DIFFERS, "FX has no such tensors"),
        ("quint4x2 embedding weights", DIFFERS, "FX's numbers; stored one value per byte, not two"),
        (
            "dynamic (is_dynamic)",
            SUPPORTED,
            "FX's numbers, reduced range of the x86 engines included; profiles.whole_range_dynamic lifts it",
        ),
        ("weight-only embeddings, float zero points", SUPPORTED, ""),
        ("float16, static and dynamic", SUPPORTED, ""),
        ("bfloat16", REFUSED, "no BackendConfig takes it; the op stays float and says so, as in FX"),
    ),
    "BackendConfig": (
        ("native, fbgemm, x86, onednn, qnnpack, executorch, tensorrt", SUPPORTED, ""),
        ("BackendConfig.set_name", SUPPORTED, ""),
        ("BackendConfig.set_backend_pattern_config", SUPPORTED, ""),
        ("BackendConfig.set_backend_pattern_configs", SUPPORTED, ""),
        ("BackendConfig.from_dict", DIFFERS, "unknown keys are an error, not ignored"),
        ("BackendPatternConfig.set_pattern", SUPPORTED, "single ops and chains"),
        ("BackendPatternConfig._set_pattern_complex_format", DIFFERS, "chains only; else refused"),
        ("BackendPatternConfig.set_observation_type", SUPPORTED, ""),
        ("BackendPatternConfig.add_dtype_config", SUPPORTED, ""),
        ("BackendPatternConfig.set_dtype_configs", SUPPORTED, ""),
        ("BackendPatternConfig._set_num_tensor_args_to_observation_type", SUPPORTED, ""),
        ("BackendPatternConfig._set_input_type_to_index", SUPPORTED, ""),
        ("BackendPatternConfig.set_fuser_method", DIFFERS, "says that the pattern fuses; is not called"),
        ("BackendPatternConfig.set_fused_module", DIFFERS, NO_SWAP),
        ("BackendPatternConfig.set_root_module", DIFFERS, NO_SWAP),
        ("BackendPatternConfig.set_qat_module", DIFFERS, NO_SWAP),
        ("BackendPatternConfig.set_reference_quantized_module", DIFFERS, NO_SWAP),
        ("BackendPatternConfig._set_root_node_getter", DIFFERS, "not read: the chain has one first op"),
        ("BackendPatternConfig._set_extra_inputs_getter", DIFFERS, "not read: what joins the chain is seen"),
        ("ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT", SUPPORTED, ""),
        (
            "ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT",
            DIFFERS,
            "never with the observer of an op further up behind a float one",
        ),
        ("ObservationType.INPUT_OUTPUT_NOT_OBSERVED", SUPPORTED, "as in FX: observed all the same"),
        ("DTypeConfig: input, output, weight and bias dtype, is_dynamic", SUPPORTED, ""),
        ("DTypeWithConstraints.dtype", SUPPORTED, ""),
        ("DTypeWithConstraints.quant_min_lower_bound", SUPPORTED, ""),
        ("DTypeWithConstraints.quant_max_upper_bound", SUPPORTED, ""),
        ("DTypeWithConstraints.scale_min_lower_bound", SUPPORTED, ""),
        ("DTypeWithConstraints.scale_max_upper_bound", SUPPORTED, "ignored, as in FX"),
        ("DTypeWithConstraints.scale_exact_match", SUPPORTED, ""),
        ("DTypeWithConstraints.zero_point_exact_match", SUPPORTED, ""),
    ),
    "ConvertCustomConfig and FuseCustomConfig": (
        ("ConvertCustomConfig.set_observed_to_quantized_mapping", SUPPORTED, ""),
        ("ConvertCustomConfig.set_preserved_attributes", SUPPORTED, ""),
        ("FuseCustomConfig.set_preserved_attributes", SUPPORTED, "the model is returned as it is"),
    ),
}
#: The differences of the setters that are supported.
PREPARE_NOTES = {
    "set_float_to_observed_mapping": "all inputs and outputs are quantized, nested ones too",
    "set_non_traceable_module_names": "one float call; parents of FX's leaves only, as there",
    "set_non_traceable_module_classes": "one float call; parents of FX's leaves only, as there",
    "set_input_quantized_indexes": "takes integers, or quantized tensors",
    "set_output_quantized_indexes": "returns integers; output_qparams() has the qparams",
}
#: How a script would use each setter of PrepareCustomConfig; reading the result shows whether it is refused.
PREPARE_SETTERS: dict[str, Callable[[PrepareCustomConfig], object]] = {
    "set_standalone_module_name": lambda config: config.set_standalone_module_name(
        "name", QConfigMapping(), (), None, None
    ),
    "set_standalone_module_class": lambda config: config.set_standalone_module_class(
        nn.Sequential, QConfigMapping(), (), None, None
    ),
    "set_float_to_observed_mapping": lambda config: config.set_float_to_observed_mapping(
        nn.LSTM, quantizable.LSTM
    ),
    "set_non_traceable_module_names": lambda config: config.set_non_traceable_module_names(["name"]),
    "set_non_traceable_module_classes": lambda config: config.set_non_traceable_module_classes([nn.GRU]),
    "set_input_quantized_indexes": lambda config: config.set_input_quantized_indexes([0]),
    "set_output_quantized_indexes": lambda config: config.set_output_quantized_indexes([0]),
    "set_preserved_attributes": lambda config: config.set_preserved_attributes(["name"]),
}


def features() -> Iterator[Feature]:
    """Yield all rows, by area."""
    for area, rows in AREAS.items():
        if area.startswith("Convert"):
            yield from _prepare_custom_config()
        for name, status, note in rows:
            yield Feature(area, name, status, note)


def _prepare_custom_config() -> Iterator[Feature]:
    for name, use in PREPARE_SETTERS.items():
        config = PrepareCustomConfig()
        use(config)
        note = PREPARE_NOTES.get(name, "")
        status = Status.DIFFERS if note else Status.SUPPORTED
        try:
            read_prepare_custom_config(config)
        except ConfigError as refusal:
            status, note = Status.REFUSED, refusal.message
        yield Feature("PrepareCustomConfig", f"PrepareCustomConfig.{name}", status, note)


HEAD = """# What of FX is carried over

Made by `python -m migration.generate`; do not edit. The rows are data as well:

```python
from migration.generate.support_table import Status, features

refused = {feature.name: feature.note for feature in features() if feature.status is Status.REFUSED}
assert "prepare_fx: _equalization_config" in refused
```
"""
QUANTIZED_TENSORS_HEAD = """
## torch's quantized tensors

Deprecated since torch 2.13. One module uses them, `torchq_compat/support/quantized_tensors.py`.

| used for | what takes their place |
|---|---|
"""
DIFFERENCES_HEAD = """
## Cases of the parity corpus that differ

`tests/parity` runs models, mappings and backends through FX and through this package. Where the quantized
ops, the activation qparams or the outputs differ, it is listed here, from `known_differences.toml`; an
unlisted difference fails the tests, and so does a listed one that is gone.

| case | differs in | why |
|---|---|---|
"""


def support_page(known_differences: Path, quantizers: Path) -> str:
    """Return the text of ``migration/support.md``."""
    lines, area = [HEAD], ""
    for feature in features():
        if feature.area != area:
            area = feature.area
            lines.append(f"\n## {area}\n\n| FX | | how, or why not |\n|---|---|---|\n")
        lines.append(f"| {feature.name} | {feature.status} | {feature.note} |\n")
    lines.append(QUANTIZED_TENSORS_HEAD)
    lines += [f"| {use} | {replacement} |\n" for use, replacement in REPLACEMENTS.items()]
    lines.append(DIFFERENCES_HEAD)
    for entry in tomllib.loads(known_differences.read_text())["difference"]:
        lines.append(f"| `{entry['id']}` | {', '.join(entry['in'])} | {entry['reason']} |\n")
    return "".join([*lines, toolkits_table(), QUANTIZERS, quantizers_table(quantizers)])
