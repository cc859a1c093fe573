"""What ``rewrite`` leaves to a person, whatever it looks like."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from torchq_compat.migrate.dotted_names import names_in_import
from torchq_compat.migrate.fx_calls import fx_call, fx_calls, last_value
from torchq_compat.migrate.legacy_names import ENGINE_INTERNALS, MOVED
from torchq_compat.migrate.parsed_source import ParsedSource
from torchq_compat.migrate.sites import Site

__all__ = ["find_for_people"]

PREPARING = ("prepare_fx", "prepare_qat_fx")
LEGACY_STRINGS = frozenset(
    [moved.legacy for moved in MOVED] + [f"{moved.legacy}.{name}" for moved in MOVED for name in moved.names]
)


def find_for_people(source: ParsedSource) -> Iterator[Site]:
    yield from _missing_example_inputs(source)
    yield from _equalization(source)
    yield from _engine_internals(source)
    yield from _strings(source)
    yield from _whole_models(source)


def _missing_example_inputs(source: ParsedSource) -> Iterator[Site]:
    for call in fx_calls(source):
        if call.function not in PREPARING or call.has_stars:
            continue
        arg = call.arg("example_inputs")
        if arg is None:
            refusal = "torch.export captures the model by running it once"
        elif isinstance(arg.value, cst.Dict):
            refusal = "before torch 1.13 the third argument was a custom config; now it is example_inputs"
        else:
            continue
        yield Site("TQ201", source.start(call.node), call.function, refusal=refusal)


def _equalization(source: ParsedSource) -> Iterator[Site]:
    for call in fx_calls(source):
        arg = call.arg("_equalization_config")
        if arg is not None and source.code(arg.value) != "None":
            yield Site("TQ202", source.start(arg), source.code(arg), refusal="PT2E has no equalization")


def _engine_internals(source: ParsedSource) -> Iterator[Site]:
    """Imports and dotted uses; what is used of an imported name is not listed again."""
    refusal = "it is part of FX's own engine"
    for node in source.imports():
        for name in names_in_import(node):
            if _is_internal(source.follow(name)):
                yield Site("TQ203", source.start(node), name, refusal=refusal)
    for attribute in source.nodes(cst.Attribute):
        if _names_internal(source, attribute) and not _names_internal(source, attribute.value):
            yield Site("TQ203", source.start(attribute), source.code(attribute), refusal=refusal)


def _names_internal(source: ParsedSource, node: cst.CSTNode) -> bool:
    names = source.names(node)
    return bool(names) and all(map(_is_internal, names))


def _is_internal(name: str) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in ENGINE_INTERNALS)


def _strings(source: ParsedSource) -> Iterator[Site]:
    for string in source.nodes(cst.SimpleString):
        if string.raw_value in LEGACY_STRINGS:
            refusal = "a name in a text: only its user knows what it is for"
            yield Site("TQ204", source.start(string), source.code(string), refusal=refusal)


def _whole_models(source: ParsedSource) -> Iterator[Site]:
    """``torch.save(model)`` of a prepared or converted model."""
    for call in source.nodes(cst.Call):
        if source.names(call.func) != {"torch.save"} or not call.args:
            continue
        model = call.args[0].value
        value = last_value(source, model, call) if isinstance(model, cst.Name) else model
        made = fx_call(source, value)
        if made is not None and made.function != "fuse_fx":
            refusal = "a quantized model cannot be pickled; where it is loaded has to change with it"
            yield Site("TQ205", source.start(call), source.code(call), refusal=refusal)
