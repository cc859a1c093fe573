"""Find models of FX that are prepared without inputs, equalized, pickled whole, or exported to ONNX through
TorchScript."""

from collections.abc import Iterator

import libcst as cst

from torchq_compat.port.constructs import Site
from torchq_compat.port.finders import Finder
from torchq_compat.port.legacy_api.fx_calls import fx_call, fx_calls, last_value, sure_value
from torchq_compat.port.legacy_api.names import PREPARING
from torchq_compat.port.rewrites.config_dicts import PREPARE
from torchq_compat.port.source.parsed import ParsedSource

OLD_EXPORTER = "torch.onnx.utils.export"
EXPORTERS = {"torch.onnx.export", OLD_EXPORTER}
MISSING = "torch.export captures the model by running it once"
MAX_STEPS = 8
#: The keys of a custom config dict.
OLD_KEYS = (
    *PREPARE.setters,
    *(f"additional_{name}" for name in ("quant_pattern", "fuser_method_mapping", "qat_module_mapping")),
)


def find_equalized(source: ParsedSource) -> Iterator[Site]:
    """Yield ``_equalization_config``, which has no counterpart."""
    for call in fx_calls(source):
        arg = call.arg("_equalization_config")
        if arg is not None and source.code(arg.value) != "None":
            refusal = "PT2E has none; equalize the float model before, as the guide shows"
            yield Site("TQ202", source.start(arg), source.code(arg), refusal=refusal)


def find_saved(source: ParsedSource) -> Iterator[Site]:
    """Yield ``torch.save(model)`` and ``torch.save({"model": model})`` of a prepared or converted model."""
    for call in source.nodes(cst.Call):
        if source.names(call.func) != {"torch.save"} or not call.args:
            continue
        saved = call.args[0].value
        values = [e.value for e in saved.elements] if isinstance(saved, cst.Dict) else [saved]
        if any(_is_result(source, value, call) for value in values):
            refusal = "a quantized model cannot be pickled; where it is loaded has to change with it"
            yield Site("TQ205", source.start(call), source.code(call), refusal=refusal)


def find_exported(source: ParsedSource) -> Iterator[Site]:
    for call in source.nodes(cst.Call):
        names = source.names(call.func)
        is_exporter = bool(names) and names <= EXPORTERS and bool(call.args) and _is_old(call, names)
        if is_exporter and _is_result(source, call.args[0].value, call):
            refusal = (
                "the exporter on TorchScript has no ops for it; give dynamo=True and the reference conversion"
            )
            yield Site("TQ207", source.start(call), source.code(call.func), refusal=refusal)


def _is_old(call: cst.Call, names: frozenset[str]) -> bool:
    """Return whether ``call`` exports through TorchScript; ``dynamo`` is True by default."""
    return names <= {OLD_EXPORTER} or any(
        arg.keyword is not None
        and arg.keyword.value == "dynamo"
        and isinstance(arg.value, cst.Name)
        and arg.value.value == "False"
        for arg in call.args
    )


def _is_result(source: ParsedSource, model: cst.BaseExpression, at: cst.CSTNode) -> bool:
    result = fx_call(source, last_value(source, model, at) if isinstance(model, cst.Name) else model)
    return result is not None and result.function != "fuse_fx"


def find_without_inputs(source: ParsedSource) -> Iterator[Site]:
    """Yield calls that prepare without ``example_inputs``, or with some that no model runs on."""
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


SAVED = Finder("TQ205", find_saved)
EXPORTED = Finder("TQ207", find_exported)
EQUALIZED = Finder("TQ202", find_equalized)
WITHOUT_INPUTS = Finder("TQ201", find_without_inputs)
