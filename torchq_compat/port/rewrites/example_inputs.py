"""Rewrite ``prepare_fx(model, mapping, x)``: example inputs that are no tuple get parentheses and a comma."""

from collections.abc import Iterator

import libcst as cst

from torchq_compat.port.constructs import Edit, Site
from torchq_compat.port.finders import Finder
from torchq_compat.port.legacy_api.fx_calls import FxCall, fx_calls, last_value
from torchq_compat.port.legacy_api.names import PREPARING
from torchq_compat.port.source.parsed import ParsedSource

CODE = "TQ113"
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


def find(source: ParsedSource) -> Iterator[Site]:
    for call in fx_calls(source):
        arg = _example(call)
        if arg is None:
            continue
        value, start = arg.value, source.start(arg.value)
        if isinstance(value, cst.List):
            yield from _list(source, value)
        elif _is_tensor(source, value, call.node):
            what = source.code(value)
            text = f"({source.full_code(value)[1:-1]},)" if value.lpar else f"({source.full_code(value)},)"
            first = source.start(value.lpar[0]) if value.lpar else start
            yield Site(CODE, start, what, (Edit(first, source.full_end(value), text),))


def _example(call: FxCall) -> cst.Arg | None:
    if call.function not in PREPARING or call.has_stars:
        return None
    return call.arg("example_inputs")


def _list(source: ParsedSource, value: cst.List) -> Iterator[Site]:
    start, end = source.start(value), source.full_end(value)
    if (
        value.lpar
        or any(isinstance(element, cst.StarredElement) for element in value.elements)
        or not value.elements
    ):
        yield Site(CODE, start, source.code(value), refusal="it is a list and should be a tuple")
        return
    inner = source.code(value)[1:-1].strip().rstrip(",")
    text = f"({inner},)" if len(value.elements) == 1 else f"({inner})"
    yield Site(CODE, start, source.code(value), (Edit(start, end, text),))


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
                return _is_first_of_batch(value)
            value = value.value
        else:
            return False
    return False


def _is_first_of_batch(value: cst.Subscript) -> bool:
    """Return whether ``value`` is ``next(iter(loader))[0]``, with which the official tutorials take the
    images of a batch."""
    call = value.value
    index = value.slice[0].slice if len(value.slice) == 1 else None
    return (
        isinstance(call, cst.Call)
        and isinstance(call.func, cst.Name)
        and call.func.value == "next"
        and isinstance(index, cst.Index)
        and isinstance(index.value, cst.Integer)
    )


REWRITE = Finder(CODE, find)
