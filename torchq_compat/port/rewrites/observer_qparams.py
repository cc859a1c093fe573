"""Rewrite ``convert_fx(model)`` in a file that trains to ``convert_fx(model, observer_qparams=True)``."""

import re
from collections.abc import Iterator

import libcst as cst

from torchq_compat.port.constructs import Edit, Site
from torchq_compat.port.finders import Finder
from torchq_compat.port.legacy_api.fx_calls import FxCall, fx_call, fx_calls, last_value
from torchq_compat.port.legacy_api.names import CONVERTING, PREPARING
from torchq_compat.port.source.moved_tables import LEGACY_NAMES
from torchq_compat.port.source.parsed import ParsedSource

CODE = "TQ116"
ARGUMENT = "observer_qparams"
QUANTIZATION = (
    "torch.ao.quantization.",
    "torch.quantization.",
    "torch.ao.nn.",
    "torch.nn.",
    "torchq_compat.",
)
#: What may follow the last argument, if a line may be added behind it.
ENDS_LINE = re.compile(rb"[ \t]*,[ \t]*(#.*)?\r?\n")
#: Parts of names that only code has which trains, or fake-quantizes.
OF_TRAINING = ("qat", "fake_quant", "fakequant")


def find(source: ParsedSource) -> Iterator[Site]:
    # Calls that are ported already are as their author wants them.
    calls = [call for call in fx_calls(source) if call.function in CONVERTING and _is_legacy(source, call)]
    for call in calls:
        if call.node.args and not _has_argument(call) and _is_trained(source, call):
            yield _site(source, call)


def _is_trained(source: ParsedSource, call: FxCall) -> bool:
    """Return whether the model that ``call`` converts may be trained: by the call that prepared it, else by
    those in the file, else by the names in it."""
    model = call.node.args[0].value
    result = fx_call(source, last_value(source, model, call.node) if isinstance(model, cst.Name) else model)
    if result is not None and result.function in PREPARING:
        return result.function == "prepare_qat_fx"
    prepares = {item.function for item in fx_calls(source)} & set(PREPARING)
    return "prepare_qat_fx" in prepares if prepares else _trains(source)


def _is_legacy(source: ParsedSource, call: FxCall) -> bool:
    return source.names(call.node.func) <= LEGACY_NAMES


def _has_argument(call: FxCall) -> bool:
    return any(arg.keyword is not None and arg.keyword.value == ARGUMENT for arg in call.node.args)


def _trains(source: ParsedSource) -> bool:
    """Return whether the file names anything of quantization-aware training."""
    return any(
        name.startswith(QUANTIZATION) and any(word in name.lower() for word in OF_TRAINING)
        for name in source.used_names()
    )


def _site(source: ParsedSource, call: FxCall) -> Site:
    last = call.node.args[-1]
    start, end = source.start(last), source.full_end(last.value)
    line = source.data[source.data.rfind(b"\n", 0, start) + 1 : start]
    behind = source.data.find(b"\n", end) + 1
    if line.strip():
        edit = Edit(end, end, f", {ARGUMENT}=True")
    elif ENDS_LINE.fullmatch(source.data[end:behind]):
        # The argument has a line of its own, with its comma and perhaps a comment.
        edit = Edit(behind, behind, f"{line.decode()}{ARGUMENT}=True,{source.newline()}")
    else:
        edit = Edit(end, end, f",{source.newline()}{line.decode()}{ARGUMENT}=True")
    return Site(CODE, source.start(call.node), source.code(call.node.func), (edit,))


REWRITE = Finder(CODE, find)
