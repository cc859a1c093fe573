"""Find models of FX that are equalized, pickled whole, or exported to ONNX through TorchScript."""

from collections.abc import Iterator

import libcst as cst

from torchq_compat.port.constructs import Site
from torchq_compat.port.finders import Finder
from torchq_compat.port.legacy_api.fx_calls import fx_call, fx_calls, last_value
from torchq_compat.port.source.parsed import ParsedSource

OLD_EXPORTER = "torch.onnx.utils.export"
EXPORTERS = {"torch.onnx.export", OLD_EXPORTER}


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


SAVED = Finder("TQ205", find_saved)
EXPORTED = Finder("TQ207", find_exported)
EQUALIZED = Finder("TQ202", find_equalized)
