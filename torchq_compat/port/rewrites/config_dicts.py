"""Rewrite dict forms of configs to ``QConfigMapping``, ``PrepareCustomConfig``, ``ConvertCustomConfig``,
``FuseCustomConfig``."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from torchq_compat.port.constructs import ImportRequest, Site
from torchq_compat.port.finders import Finder
from torchq_compat.port.legacy_api import dict_forms
from torchq_compat.port.source.parsed import ParsedSource

QCONFIG_DICT = dict_forms.DictForm(
    code="TQ105",
    module="torch.ao.quantization",
    class_name="QConfigMapping",
    parameter="qconfig_mapping",
    setters={
        "": dict_forms.whole_value("set_global"),
        "object_type": dict_forms.of_tuples("set_object_type", 2),
        "module_name_regex": dict_forms.of_tuples("set_module_name_regex", 2),
        "module_name": dict_forms.of_tuples("set_module_name", 2),
        "module_name_object_type_order": dict_forms.of_tuples("set_module_name_object_type_order", 4),
    },
)


MODULE = "torchq_compat.custom_config"


def class_pairs(method: str) -> dict_forms.Setter:
    """Return a converter for ``{"static": {Float: Observed}}``: one call per pair."""

    def convert(source: ParsedSource, value: cst.BaseExpression) -> Iterator[dict_forms.Converted]:
        for mode, classes in _pairs(source, value):
            if dict_forms.string_key(mode) != "static":
                raise dict_forms.CannotRewriteError(f"{source.code(mode)} is not the static mode")
            for key, mapped in _pairs(source, classes):
                arguments = f"{source.full_code(key)}, {source.full_code(mapped)}"
                yield dict_forms.Converted(f".{method}({arguments})", key, (key, mapped))

    return convert


def _pairs(
    source: ParsedSource, node: cst.BaseExpression
) -> Iterator[tuple[cst.BaseExpression, cst.BaseExpression]]:
    if not isinstance(node, cst.Dict):
        raise dict_forms.CannotRewriteError(f"{source.code(node)} is not spelled out")
    for element in node.elements:
        if not isinstance(element, cst.DictElement):
            raise dict_forms.CannotRewriteError("the dict includes another dict with **")
        yield element.key, element.value


def standalone_modules(method: str) -> dict_forms.Setter:
    """Return a converter for a list of tuples ``(module, qconfig_dict, example_inputs,
    prepare_custom_config_dict, backend_config_dict)``."""

    def convert(source: ParsedSource, value: cst.BaseExpression) -> Iterator[dict_forms.Converted]:
        for entry, (module, qconfigs, inputs, prepare, backend) in dict_forms.tuples_of(source, value, 5):
            if source.has_comment(entry):
                raise dict_forms.CannotRewriteError("a standalone module has comments in its entry")
            mapping, mapping_imports = _nested(source, qconfigs, QCONFIG_DICT)
            config, config_imports = _nested(source, prepare, PREPARE)
            if isinstance(backend, cst.Dict):
                raise dict_forms.CannotRewriteError(
                    "a backend config as a dict: build the BackendConfig object"
                )
            parts = (source.full_code(module), mapping, source.full_code(inputs), config)
            arguments = ", ".join((*parts, source.full_code(backend)))
            yield dict_forms.Converted(
                f".{method}({arguments})", entry, (entry,), (*mapping_imports, *config_imports)
            )

    return convert


def _nested(
    source: ParsedSource, node: cst.BaseExpression, form: dict_forms.DictForm
) -> tuple[str, tuple[ImportRequest, ...]]:
    """Convert an inner config: a dict becomes an object; None and the result of a call are kept."""
    if isinstance(node, cst.Dict):
        return form.convert(source, node)
    if isinstance(node, cst.Call) or (isinstance(node, cst.Name) and node.value == "None"):
        return source.full_code(node), ()
    raise dict_forms.CannotRewriteError(f"{source.code(node)} may be a dict or an object")


PREPARE = dict_forms.DictForm(
    code="TQ106",
    module=MODULE,
    class_name="PrepareCustomConfig",
    parameter="prepare_custom_config",
    setters={
        "standalone_module_name": standalone_modules("set_standalone_module_name"),
        "standalone_module_class": standalone_modules("set_standalone_module_class"),
        "float_to_observed_custom_module_class": class_pairs("set_float_to_observed_mapping"),
        "non_traceable_module_name": dict_forms.whole_value("set_non_traceable_module_names"),
        "non_traceable_module_class": dict_forms.whole_value("set_non_traceable_module_classes"),
        "input_quantized_idxs": dict_forms.whole_value("set_input_quantized_indexes"),
        "output_quantized_idxs": dict_forms.whole_value("set_output_quantized_indexes"),
        "preserved_attributes": dict_forms.whole_value("set_preserved_attributes"),
    },
)
CONVERT = dict_forms.DictForm(
    code="TQ106",
    module=MODULE,
    class_name="ConvertCustomConfig",
    parameter="convert_custom_config",
    setters={
        "observed_to_quantized_custom_module_class": class_pairs("set_observed_to_quantized_mapping"),
        "preserved_attributes": dict_forms.whole_value("set_preserved_attributes"),
    },
)
FUSE = dict_forms.DictForm(
    code="TQ106",
    module=MODULE,
    class_name="FuseCustomConfig",
    parameter="fuse_custom_config",
    setters={"preserved_attributes": dict_forms.whole_value("set_preserved_attributes")},
)


def find(source: ParsedSource) -> Iterator[Site]:
    for form in (PREPARE, CONVERT, FUSE):
        yield from form.find(source)


OF_QCONFIGS = Finder("TQ105", QCONFIG_DICT.find)
OF_CUSTOM_CONFIGS = Finder("TQ106", find)
