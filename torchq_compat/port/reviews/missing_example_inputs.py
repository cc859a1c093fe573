"""Find calls that prepare without ``example_inputs``, or with some that no model runs on."""

from collections.abc import Iterator

import libcst as cst

from torchq_compat.port.constructs import Site
from torchq_compat.port.finders import Finder
from torchq_compat.port.legacy_api.fx_calls import fx_calls, sure_value
from torchq_compat.port.legacy_api.names import PREPARING
from torchq_compat.port.source.parsed import ParsedSource

MISSING = "torch.export captures the model by running it once"
MAX_STEPS = 8
#: The keys of a custom config dict.
OLD_KEYS = (
    "standalone_module_name",
    "standalone_module_class",
    "float_to_observed_custom_module_class",
    "non_traceable_module_name",
    "non_traceable_module_class",
    "input_quantized_idxs",
    "output_quantized_idxs",
    "preserved_attributes",
    "additional_quant_pattern",
    "additional_fuser_method_mapping",
    "additional_qat_module_mapping",
)


def find(source: ParsedSource) -> Iterator[Site]:
    for call in fx_calls(source):
        if call.function not in PREPARING or call.has_stars:
            continue
        arg = call.arg("example_inputs")
        refusal = MISSING if arg is None else _refusal(source, _value(source, arg.value, call.node))
        if refusal:
            yield Site("TQ201", source.start(call.node), call.function, refusal=refusal)


def _value(source: ParsedSource, value: cst.BaseExpression, at: cst.CSTNode) -> cst.BaseExpression:
    """Return what a variable surely holds, through several; ``value`` itself where that is not known."""
    for _ in range(MAX_STEPS):
        if not isinstance(value, cst.Name):
            break
        assigned = sure_value(source, value, at)
        if assigned is None:
            break
        value, at = assigned, assigned
    return value


def _refusal(source: ParsedSource, value: cst.BaseExpression) -> str:
    """Return why no model runs on ``value``; empty where it may."""
    if isinstance(value, cst.Name) and value.value == "None":
        return "example_inputs is None; the first batch of the calibration loader will do"
    if isinstance(value, cst.Dict) and _is_config(value):
        return "before torch 1.13 the third argument was a custom config; now it is example_inputs"
    if _holds_no_tensor(value):
        return "it holds no tensor: write torch.rand(shape) for a shape, torch.tensor(data) for data"
    if isinstance(value, cst.Call) and source.code(value.func) == "next":
        return "a batch of a loader has targets too, which are no argument of the model: (batch[0],)"
    return ""


def _holds_no_tensor(value: cst.BaseExpression) -> bool:
    """Return whether ``value`` is spelled out, and all of it is numbers, strings and shapes."""
    if isinstance(value, (cst.Tuple, cst.List)):
        return all(_holds_no_tensor(element.value) for element in value.elements)
    if isinstance(value, cst.UnaryOperation):
        return _holds_no_tensor(value.expression)
    if isinstance(value, cst.Call):  # x.size()
        return isinstance(value.func, cst.Attribute) and value.func.attr.value == "size" and not value.args
    if isinstance(value, cst.Attribute):
        return value.attr.value == "shape"
    return isinstance(value, (cst.BaseNumber, cst.BaseString))


def _is_config(value: cst.Dict) -> bool:
    """Return whether the keys of a dict are settings, and not the parameters of a model."""
    keys = [e.key for e in value.elements if isinstance(e, cst.DictElement)]
    names = [key.raw_value for key in keys if isinstance(key, cst.SimpleString)]
    return not names or all(name in OLD_KEYS for name in names)


REVIEW = Finder("TQ201", find)
