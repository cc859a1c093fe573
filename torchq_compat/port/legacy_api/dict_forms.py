"""Dict forms of configurations in source code: find them, and write the equivalent objects.

``{"": qconfig, "object_type": [(nn.Linear, other)]}`` becomes
``QConfigMapping().set_global(qconfig).set_object_type(nn.Linear, other)``. The rewrites of the four dict
forms share this module; the keys are those that ``from_dict`` of the class reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import libcst as cst

from torchq_compat.port.constructs import Edit, ImportRequest, Site
from torchq_compat.port.legacy_api.fx_calls import fx_calls, only_value, possible_values
from torchq_compat.port.source.imports import why_not_free
from torchq_compat.port.source.parsed import ParsedSource

MAX_COLUMN = 100
INDENT = "    "


class CannotRewriteError(Exception):
    """The reason why a dict is left for manual review."""


@dataclass(frozen=True)
class Converted:
    """One setter call, the expressions it contains, and the imports they need."""

    call: str
    origin: cst.CSTNode
    taken: tuple[cst.CSTNode, ...]
    imports: tuple[ImportRequest, ...] = ()


Setter = Callable[[ParsedSource, cst.BaseExpression], Iterator[Converted]]


@dataclass(frozen=True)
class DictForm:
    """One dict form.

    Attributes:
        code: the code of the construct.
        module: the module of the class.
        class_name: the class of the object.
        parameter: the parameter of the FX functions that accepts it.
        setters: key of the dict -> function that converts its value.
    """

    code: str
    module: str
    class_name: str
    parameter: str
    setters: Mapping[str, Setter]

    def find(self, source: ParsedSource) -> Iterator[Site]:
        """Yield the dicts given to an FX function, directly or through a variable, each once."""
        matches: dict[cst.CSTNode, Site] = {}
        for call in fx_calls(source):
            arg = call.arg(self.parameter) if self.parameter in call.parameters else None
            value = arg.value if arg is not None else None
            if isinstance(value, cst.Name):
                bound = only_value(source, value)
                if bound is not None and _is_dict(bound[1]):
                    matches.setdefault(bound[1], self._variable_site(source, value.value, *bound))
                else:
                    for item, why in possible_values(source, value):
                        if _is_dict(item):
                            matches.setdefault(item, self._site(source, item, why))
            elif value is not None and _is_dict(value):
                matches.setdefault(value, self._site(source, value))
        yield from matches.values()

    def _variable_site(
        self, source: ParsedSource, name: str, assignment: cst.metadata.Assignment, value: cst.BaseExpression
    ) -> Site:
        statement = source.parent(assignment.node)
        refusal = ""
        if isinstance(statement, cst.AnnAssign):
            refusal = f"{name} is annotated as a dict"
        elif name in source.taken_by_others and assignment.scope is source.global_scope:
            refusal = f"another file uses {name}"
        for use in source.references(name, assignment.node):
            if not self._is_argument(source, use):
                refusal = f"{name} is also used at line {source.line(source.start(use))}"
                break
        return self._site(source, value, refusal)

    def _is_argument(self, source: ParsedSource, use: cst.Name) -> bool:
        arg = source.parent(use)
        call = source.parent(arg) if isinstance(arg, cst.Arg) else None
        return any(
            call is fx.node and self.parameter in fx.parameters and fx.arg(self.parameter) is arg
            for fx in fx_calls(source)
        )

    def _site(self, source: ParsedSource, value: cst.BaseExpression, refusal: str = "") -> Site:
        start, what = source.start(value), f"a dict for {self.parameter}"
        if refusal:
            return Site(self.code, start, what, refusal=refusal)
        try:
            text, imports = self.convert(source, value)
        except CannotRewriteError as reason:
            return Site(self.code, start, what, refusal=str(reason))
        return Site(self.code, start, what, (Edit(start, source.end(value), text),), imports)

    def convert(
        self, source: ParsedSource, value: cst.BaseExpression
    ) -> tuple[str, tuple[ImportRequest, ...]]:
        """Return the expression that builds the object, and the imports it needs.

        Raises:
            CannotRewriteError: the dict is not a literal, or has a key that FX does not know.
        """
        if not isinstance(value, cst.Dict):
            raise CannotRewriteError("the dict is built by code")
        request = ImportRequest(self.module, self.class_name, source.start(value))
        if refusal := why_not_free(source, request):
            raise CannotRewriteError(refusal)
        calls = list(self._calls(source, value))
        imports = (request, *(needed for call in calls for needed in call.imports))
        return _layout(source, value, f"{self.class_name}()", calls), imports

    def _calls(self, source: ParsedSource, value: cst.Dict) -> Iterator[Converted]:
        seen: set[str] = set()
        for element in value.elements:
            if not isinstance(element, cst.DictElement):
                raise CannotRewriteError("the dict includes another dict with **")
            key = string_key(element.key)
            if key is None or key not in self.setters:
                raise CannotRewriteError(f"FX knows no key {source.code(element.key)} here")
            if key in seen:
                raise CannotRewriteError(f"the key {key!r} is there twice")
            seen.add(key)
            yield from self.setters[key](source, element.value)


def string_key(node: cst.BaseExpression) -> str | None:
    value = node.evaluated_value if isinstance(node, cst.SimpleString) else None
    return value if isinstance(value, str) else None


def whole_value(method: str) -> Setter:
    """Return a converter for a value that is the single argument of ``method``."""

    def convert(source: ParsedSource, value: cst.BaseExpression) -> Iterator[Converted]:
        yield Converted(f".{method}({source.full_code(value)})", value, (value,))

    return convert


def of_tuples(method: str, arity: int) -> Setter:
    """Return a converter for a value that is a list of tuples, each the arguments of one call."""

    def convert(source: ParsedSource, value: cst.BaseExpression) -> Iterator[Converted]:
        for entry, parts in tuples_of(source, value, arity):
            arguments = ", ".join(source.full_code(part) for part in parts)
            yield Converted(f".{method}({arguments})", entry, tuple(parts))

    return convert


def tuples_of(
    source: ParsedSource, value: cst.BaseExpression, arity: int
) -> Iterator[tuple[cst.BaseExpression, list[cst.BaseExpression]]]:
    """Yield the entries of a list of tuples, each with its parts.

    Raises:
        CannotRewriteError: the list is not a literal.
    """
    for entry in _items(source, value):
        parts = _items(source, entry)
        if len(parts) != arity:
            raise CannotRewriteError(f"{source.code(entry)} should have {arity} parts")
        yield entry, parts


def _items(source: ParsedSource, node: cst.BaseExpression) -> list[cst.BaseExpression]:
    if not isinstance(node, (cst.List, cst.Tuple)):
        raise CannotRewriteError(f"{source.code(node)} is not spelled out")
    if any(isinstance(element, cst.StarredElement) for element in node.elements):
        raise CannotRewriteError(f"{source.code(node)} unpacks another sequence with *")
    return [element.value for element in node.elements]


def _is_dict(node: cst.BaseExpression) -> bool:
    if isinstance(node, (cst.Dict, cst.DictComp)):
        return True
    return isinstance(node, cst.Call) and isinstance(node.func, cst.Name) and node.func.value == "dict"


# --- layout ---


def _layout(source: ParsedSource, value: cst.Dict, head: str, calls: list[Converted]) -> str:
    """Return the calls on one line if it is short, otherwise on one line each, with the comments of the dict
    in place."""
    start, end = source.start(value), source.end(value)
    comments = [
        node
        for node in source.nodes(cst.Comment)
        if start <= source.start(node) < end and not _is_inside(source, node, calls)
    ]
    line = head + "".join(call.call for call in calls)
    column = len(source.data[source.data.rfind(b"\n", 0, start) + 1 : start].decode())
    if not comments and (len(calls) <= 1 or column + len(line) <= MAX_COLUMN):
        return line
    newline, indent = source.newline(), source.indent_at(start)
    lines = [head]
    pending = list(comments)
    for index, call in enumerate(calls):
        following = source.start(calls[index + 1].origin) if index + 1 < len(calls) else end
        while pending and source.start(pending[0]) < source.start(call.origin):
            lines.append(pending.pop(0).value)
        behind = ""
        while pending and source.start(pending[0]) < following and _is_behind_code(source, pending[0]):
            behind += f"  {pending.pop(0).value}"
        lines.append(call.call + behind)
    lines += [comment.value for comment in pending]
    body = "".join(f"{newline}{indent}{INDENT}{item}" for item in lines)
    return f"({body}{newline}{indent})"


def _is_inside(source: ParsedSource, node: cst.CSTNode, calls: list[Converted]) -> bool:
    return any(
        source.start(part) <= source.start(node) < source.end(part) for call in calls for part in call.taken
    )


def _is_behind_code(source: ParsedSource, comment: cst.CSTNode) -> bool:
    start = source.start(comment)
    return bool(source.data[source.data.rfind(b"\n", 0, start) + 1 : start].strip())
