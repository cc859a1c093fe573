"""Rewrite arguments of calls of FX: example inputs that are no tuple, keywords that torch 1.13 renamed,
``convert_fx(model, is_reference=True)``, removed in torch 1.13, and ``convert_fx(model)`` in a file that
trains to ``convert_fx(model, observer_qparams=True)``."""

import re
from collections.abc import Iterator

import libcst as cst

from torchq_compat.port.constructs import Edit, ImportRequest, Site
from torchq_compat.port.finders import Finder
from torchq_compat.port.names import CONVERTING, LEGACY_NAMES, PREPARING
from torchq_compat.port.source.fx_calls import FxCall, fx_call, fx_calls, last_value
from torchq_compat.port.source.imports import why_not_free
from torchq_compat.port.source.parsed import ParsedSource
from torchq_compat.read.old_forms import KEYWORDS

EXAMPLES = "TQ113"
MAX_STEPS = 8
#: Functions of torch that return one tensor.
MAKING = frozenset(
    f"torch.{name}"
    for name in (
        *("rand", "randn", "randint", "zeros", "ones", "empty", "full", "arange", "tensor", "from_numpy"),
        *("rand_like", "randn_like", "zeros_like", "ones_like", "stack", "cat", "as_tensor"),
    )
)
#: Methods that only tensors have in such a script.
METHODS = frozenset(
    (
        *("unsqueeze", "squeeze", "view", "reshape", "expand", "permute", "transpose", "contiguous", "float"),
        *("repeat", "clone", "detach", "long", "cuda", "cpu", "to", "half", "double"),
    )
)
#: This one was renamed too, but has no counterpart: see ``reviews.models``.
NOT_CARRIED_OVER = "_equalization_config"
NEW_NAME = "convert_to_reference_fx"


def find_keywords(source: ParsedSource) -> Iterator[Site]:
    for call in fx_calls(source):
        given = {arg.keyword.value for arg in call.node.args if arg.keyword is not None}
        for arg in call.node.args:
            keyword = arg.keyword
            new = KEYWORDS.get(keyword.value) if keyword is not None else None
            if keyword is None or new not in call.parameters or new == NOT_CARRIED_OVER:
                continue
            site = Site("TQ107", source.start(keyword), f"{keyword.value}=")
            edit = source.edit(keyword, new)
            yield site.settled(f"{new} is given too" if new in given else "", (edit,))


def find_is_reference(source: ParsedSource) -> Iterator[Site]:
    for call in fx_calls(source):
        if call.function != "convert_fx":
            continue
        for index, arg in enumerate(call.node.args):
            if arg.keyword is not None and arg.keyword.value == "is_reference":
                yield _of_is_reference(source, call, index)


def _of_is_reference(source: ParsedSource, call: FxCall, index: int) -> Site:
    arg = call.node.args[index]
    start = source.start(arg)
    value = arg.value.value if isinstance(arg.value, cst.Name) else ""
    site = Site("TQ108", start, f"is_reference={source.code(arg.value)}")
    if value not in ("True", "False") or not index:
        return site.settled("which function to call depends on a value", ())
    before = call.node.args[index - 1].value
    removed = Edit(source.full_end(before), source.full_end(arg.value), "")
    if b"#" in source.data[removed.start : start]:
        return site.settled("there is a comment before it", ())
    edits = [removed]
    imports: tuple[ImportRequest, ...] = ()
    if value == "True":
        function = call.node.func
        name = function.attr if isinstance(function, cst.Attribute) else function
        edits.append(source.edit(name, NEW_NAME))
        if name is function:
            imports = (ImportRequest("torchq_compat.quantize_fx", NEW_NAME, source.start(function)),)
    return site.settled("".join(why_not_free(source, request) for request in imports), edits, imports)


def find_examples(source: ParsedSource) -> Iterator[Site]:
    for call in fx_calls(source):
        is_whole = call.function in PREPARING and not call.has_stars
        arg = call.arg("example_inputs") if is_whole else None
        if arg is None:
            continue
        value, start = arg.value, source.start(arg.value)
        if isinstance(value, cst.List):
            yield from _list(source, value)
        elif _is_tensor(source, value, call.node):
            what = source.code(value)
            text = f"({source.full_code(value)[1:-1]},)" if value.lpar else f"({source.full_code(value)},)"
            first = source.start(value.lpar[0]) if value.lpar else start
            yield Site(EXAMPLES, start, what, (Edit(first, source.full_end(value), text),))


def _list(source: ParsedSource, value: cst.List) -> Iterator[Site]:
    start, end = source.start(value), source.full_end(value)
    if (
        value.lpar
        or any(isinstance(element, cst.StarredElement) for element in value.elements)
        or not value.elements
    ):
        yield Site(EXAMPLES, start, source.code(value), refusal="it is a list and should be a tuple")
        return
    inner = source.code(value)[1:-1].strip().rstrip(",")
    text = f"({inner},)" if len(value.elements) == 1 else f"({inner})"
    yield Site(EXAMPLES, start, source.code(value), (Edit(start, end, text),))


def _is_tensor(source: ParsedSource, value: cst.BaseExpression, at: cst.CSTNode) -> bool:
    """Return whether ``value`` is surely one tensor."""
    for _ in range(MAX_STEPS):
        if isinstance(value, cst.Name):
            assigned = last_value(source, value, at)
            if assigned is None:
                return False
            value, at = assigned, assigned
        elif isinstance(value, cst.Call):
            if source.names(value.func) and source.names(value.func) <= MAKING:
                return True
            if not isinstance(value.func, cst.Attribute) or value.func.attr.value not in METHODS:
                return False
            value = value.func.value
        elif isinstance(value, cst.Subscript):
            if not isinstance(value.slice[0].slice, cst.Slice):
                return _is_of_batch(value)
            value = value.value
        else:
            return False
    return False


def _is_of_batch(value: cst.Subscript) -> bool:
    """Return whether ``value`` is ``next(iter(loader))[0]``, as the official tutorials take the images."""
    match value:
        case cst.Subscript(cst.Call(cst.Name("next")), [cst.SubscriptElement(cst.Index(cst.Integer()))]):
            return True
    return False


RENAMED_KEYWORDS = Finder("TQ107", find_keywords)
IS_REFERENCE = Finder("TQ108", find_is_reference)
EXAMPLE_INPUTS = Finder(EXAMPLES, find_examples)


TRAINED = "TQ116"
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


def find_trained(source: ParsedSource) -> Iterator[Site]:
    for call in fx_calls(source):
        if call.function not in CONVERTING or not source.names(call.node.func) <= LEGACY_NAMES:
            continue  # A call that is ported already is as its author wants it.
        names = [arg.keyword.value for arg in call.node.args if arg.keyword is not None]
        if call.node.args and ARGUMENT not in names and _is_trained(source, call):
            yield _of_trained(source, call)


def _is_trained(source: ParsedSource, call: FxCall) -> bool:
    """Return whether the model that ``call`` converts may be trained: by the call that prepared it, else by
    those in the file, else by the names in it."""
    model = call.node.args[0].value
    result = fx_call(source, last_value(source, model, call.node) if isinstance(model, cst.Name) else model)
    if result is not None and result.function in PREPARING:
        return result.function == "prepare_qat_fx"
    prepares = {item.function for item in fx_calls(source)} & set(PREPARING)
    if prepares:
        return "prepare_qat_fx" in prepares
    names = (name.lower() for name in source.used_names() if name.startswith(QUANTIZATION))
    return any(word in name for name in names for word in OF_TRAINING)


def _of_trained(source: ParsedSource, call: FxCall) -> Site:
    last = call.node.args[-1]
    start, end = source.start(last), source.full_end(last.value)
    line = source.line_before(start)
    behind = source.line_end(end)
    if line.strip():
        edit = Edit(end, end, f", {ARGUMENT}=True")
    elif ENDS_LINE.fullmatch(source.data[end:behind]):
        # The argument has a line of its own, with its comma and perhaps a comment.
        edit = Edit(behind, behind, f"{line}{ARGUMENT}=True,{source.module.default_newline}")
    else:
        edit = Edit(end, end, f",{source.module.default_newline}{line}{ARGUMENT}=True")
    return Site(TRAINED, source.start(call.node), source.code(call.node.func), (edit,))


OBSERVER_QPARAMS = Finder(TRAINED, find_trained)
