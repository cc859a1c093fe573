"""Rewrite dict forms of configs to ``QConfigMapping``, ``PrepareCustomConfig``, ``ConvertCustomConfig`` and
``FuseCustomConfig``, and the functions that return such a dict to those that return the object.

``{"": qconfig, "object_type": [(nn.Linear, other)]}`` becomes
``QConfigMapping().set_global(qconfig).set_object_type(nn.Linear, other)``. The keys are those that
``from_dict`` of the class reads.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import libcst as cst

from torchq_compat.port.constructs import ImportRequest, Site
from torchq_compat.port.finders import Finder
from torchq_compat.port.names import DICT_GETTERS
from torchq_compat.port.source.fx_calls import fx_calls, only_value, possible_values
from torchq_compat.port.source.imports import why_not_free
from torchq_compat.port.source.parsed import ParsedSource

Expression = cst.BaseExpression
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


#: What converts the value of a key, called with the source, the value, and the rest: the method and its like.
Setter = tuple[Any, ...]


@dataclass(frozen=True)
class DictForm:
    """One dict form.

    Attributes:
        code: the code of the construct.
        module: the module of the class.
        class_name: the class of the object.
        parameter: the parameter of the FX functions that accepts it.
        setters: key of the dict -> what converts its value.
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
            arg = call.arg(self.parameter)
            value = arg.value if arg is not None else None
            if isinstance(value, cst.Name):
                for assignment, item, why in possible_values(source, value):
                    if _is_dict(item):
                        why = why or self._other_uses(source, value.value, assignment)
                        matches.setdefault(item, self._site(source, item, why))
            elif value is not None and _is_dict(value):
                matches.setdefault(value, self._site(source, value))
        yield from matches.values()

    def _other_uses(self, source: ParsedSource, name: str, assignment: cst.metadata.Assignment) -> str:
        """Return what else than an FX function uses the dict of a variable as one; empty if nothing does."""
        arguments = [call.arg(self.parameter) for call in fx_calls(source)]
        for use in source.references(name, assignment.node):
            if source.parent(use) not in arguments:
                return f"{name} is also used at line {source.line(source.start(use))}"
        if isinstance(source.parent(assignment.node), cst.AnnAssign):
            return f"{name} is annotated as a dict"
        is_global = isinstance(assignment.scope, cst.metadata.GlobalScope)
        return f"another file uses {name}" if is_global and name in source.taken_by_others else ""

    def _site(self, source: ParsedSource, value: Expression, refusal: str = "") -> Site:
        start, what = source.start(value), f"a dict for {self.parameter}"
        if refusal:
            return Site(self.code, start, what, refusal=refusal)
        try:
            text, imports = self.convert(source, value)
        except CannotRewriteError as reason:
            return Site(self.code, start, what, refusal=str(reason))
        return Site(self.code, start, what, (source.edit(value, text),), imports)

    def convert(self, source: ParsedSource, value: Expression) -> tuple[str, tuple[ImportRequest, ...]]:
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
            convert, *settings = self.setters[key]
            yield from convert(source, element.value, *settings)


def string_key(node: Expression) -> str | None:
    value = node.evaluated_value if isinstance(node, cst.SimpleString) else None
    return value if isinstance(value, str) else None


def whole_value(source: ParsedSource, value: Expression, method: str) -> Iterator[Converted]:
    """Convert a value that is the single argument of ``method``."""
    yield Converted(f".{method}({source.full_code(value)})", value, (value,))


def of_tuples(source: ParsedSource, value: Expression, method: str, arity: int) -> Iterator[Converted]:
    """Convert a value that is a list of tuples, each the arguments of one call."""
    for entry, parts in tuples_of(source, value, arity):
        arguments = ", ".join(source.full_code(part) for part in parts)
        yield Converted(f".{method}({arguments})", entry, tuple(parts))


def tuples_of(
    source: ParsedSource, value: Expression, arity: int
) -> Iterator[tuple[Expression, list[Expression]]]:
    """Yield the entries of a list of tuples, each with its parts.

    Raises:
        CannotRewriteError: the list is not a literal.
    """
    for entry in _items(source, value):
        parts = _items(source, entry)
        if len(parts) != arity:
            raise CannotRewriteError(f"{source.code(entry)} should have {arity} parts")
        yield entry, parts


def _items(source: ParsedSource, node: Expression) -> list[Expression]:
    if not isinstance(node, (cst.List, cst.Tuple)):
        raise CannotRewriteError(f"{source.code(node)} is not spelled out")
    if any(isinstance(element, cst.StarredElement) for element in node.elements):
        raise CannotRewriteError(f"{source.code(node)} unpacks another sequence with *")
    return [element.value for element in node.elements]


def _is_dict(node: Expression) -> bool:
    match node:
        case cst.Dict() | cst.DictComp() | cst.Call(cst.Name("dict")):
            return True
    return False


# --- layout ---


def _layout(source: ParsedSource, value: cst.Dict, head: str, calls: list[Converted]) -> str:
    """Return the calls on one line if it is short, otherwise on one line each, with the comments of the dict
    in place."""
    start, end = source.start(value), source.end(value)
    taken = [(source.start(part), source.end(part)) for call in calls for part in call.taken]
    comments = [
        node
        for node in source.nodes(cst.Comment)
        if start <= (at := source.start(node)) < end and not any(low <= at < high for low, high in taken)
    ]
    line = head + "".join(call.call for call in calls)
    column = len(source.line_before(start))
    if not comments and (len(calls) <= 1 or column + len(line) <= MAX_COLUMN):
        return line
    newline, indent = source.module.default_newline, source.indent_at(start)
    places: list[tuple[int, Converted | cst.Comment]] = [
        *((source.start(call.origin), call) for call in calls),
        *((source.start(comment), comment) for comment in comments),
    ]
    lines, follows_call = [head], False
    for at, item in sorted(places, key=lambda place: place[0]):
        if isinstance(item, cst.Comment) and follows_call and source.line_before(at).strip():
            lines[-1] += f"  {item.value}"
        else:
            follows_call = isinstance(item, Converted)
            lines.append(item.call if isinstance(item, Converted) else item.value)
    body = "".join(f"{newline}{indent}{INDENT}{line}" for line in lines)
    return f"({body}{newline}{indent})"


QCONFIG_DICT = DictForm(
    code="TQ105",
    module="torch.ao.quantization",
    class_name="QConfigMapping",
    parameter="qconfig_mapping",
    setters={
        "": (whole_value, "set_global"),
        "object_type": (of_tuples, "set_object_type", 2),
        "module_name_regex": (of_tuples, "set_module_name_regex", 2),
        "module_name": (of_tuples, "set_module_name", 2),
        "module_name_object_type_order": (of_tuples, "set_module_name_object_type_order", 4),
    },
)


MODULE = "torchq_compat.custom_config"


def class_pairs(source: ParsedSource, value: Expression, method: str) -> Iterator[Converted]:
    """Convert ``{"static": {Float: Observed}}``: one call per pair."""
    for mode, classes in _pairs(source, value):
        if string_key(mode) != "static":
            raise CannotRewriteError(f"{source.code(mode)} is not the static mode")
        for key, mapped in _pairs(source, classes):
            arguments = f"{source.full_code(key)}, {source.full_code(mapped)}"
            yield Converted(f".{method}({arguments})", key, (key, mapped))


def _pairs(source: ParsedSource, node: Expression) -> Iterator[tuple[Expression, Expression]]:
    if not isinstance(node, cst.Dict):
        raise CannotRewriteError(f"{source.code(node)} is not spelled out")
    for element in node.elements:
        if not isinstance(element, cst.DictElement):
            raise CannotRewriteError("the dict includes another dict with **")
        yield element.key, element.value


def standalone_modules(source: ParsedSource, value: Expression, method: str) -> Iterator[Converted]:
    """Convert a list of tuples ``(module, qconfig_dict, example_inputs,
    prepare_custom_config_dict, backend_config_dict)``."""
    for entry, (module, qconfigs, inputs, prepare, backend) in tuples_of(source, value, 5):
        if source.has_comment(entry):
            raise CannotRewriteError("a standalone module has comments in its entry")
        mapping, mapping_imports = _nested(source, qconfigs, QCONFIG_DICT)
        config, config_imports = _nested(source, prepare, PREPARE)
        if isinstance(backend, cst.Dict):
            raise CannotRewriteError("a backend config as a dict: build the BackendConfig object")
        parts = (source.full_code(module), mapping, source.full_code(inputs), config)
        arguments = ", ".join((*parts, source.full_code(backend)))
        yield Converted(f".{method}({arguments})", entry, (entry,), (*mapping_imports, *config_imports))


def _nested(source: ParsedSource, node: Expression, form: DictForm) -> tuple[str, tuple[ImportRequest, ...]]:
    """Convert an inner config: a dict becomes an object; None and the result of a call are kept."""
    if isinstance(node, cst.Dict):
        return form.convert(source, node)
    if isinstance(node, cst.Call) or (isinstance(node, cst.Name) and node.value == "None"):
        return source.full_code(node), ()
    raise CannotRewriteError(f"{source.code(node)} may be a dict or an object")


PREPARE = DictForm(
    code="TQ106",
    module=MODULE,
    class_name="PrepareCustomConfig",
    parameter="prepare_custom_config",
    setters={
        "standalone_module_name": (standalone_modules, "set_standalone_module_name"),
        "standalone_module_class": (standalone_modules, "set_standalone_module_class"),
        "float_to_observed_custom_module_class": (class_pairs, "set_float_to_observed_mapping"),
        "non_traceable_module_name": (whole_value, "set_non_traceable_module_names"),
        "non_traceable_module_class": (whole_value, "set_non_traceable_module_classes"),
        "input_quantized_idxs": (whole_value, "set_input_quantized_indexes"),
        "output_quantized_idxs": (whole_value, "set_output_quantized_indexes"),
        "preserved_attributes": (whole_value, "set_preserved_attributes"),
    },
)
CONVERT = DictForm(
    code="TQ106",
    module=MODULE,
    class_name="ConvertCustomConfig",
    parameter="convert_custom_config",
    setters={
        "observed_to_quantized_custom_module_class": (class_pairs, "set_observed_to_quantized_mapping"),
        "preserved_attributes": (whole_value, "set_preserved_attributes"),
    },
)
FUSE = DictForm(
    code="TQ106",
    module=MODULE,
    class_name="FuseCustomConfig",
    parameter="fuse_custom_config",
    setters={"preserved_attributes": (whole_value, "set_preserved_attributes")},
)


def find(source: ParsedSource) -> Iterator[Site]:
    for form in (PREPARE, CONVERT, FUSE):
        yield from form.find(source)


OF_QCONFIGS = Finder("TQ105", QCONFIG_DICT.find)
OF_CUSTOM_CONFIGS = Finder("TQ106", find)


def find_getters(source: ParsedSource) -> Iterator[Site]:
    for node, alias, full in source.names_from():
        if full in DICT_GETTERS:
            yield _getter_import(source, node, alias, DICT_GETTERS[full])
    for attribute in source.nodes(cst.Attribute):
        names = source.names(attribute)
        new_name = DICT_GETTERS.get(next(iter(names))) if len(names) == 1 else None
        if new_name is not None:
            refusal = _use_as_dict(source, attribute)
            edit = source.edit(attribute.attr, new_name)
            yield Site("TQ109", source.start(attribute), attribute.attr.value).settled(refusal, (edit,))


def _getter_import(source: ParsedSource, node: cst.ImportFrom, alias: cst.ImportAlias, new_name: str) -> Site:
    name = alias.evaluated_name
    uses = source.references(alias.evaluated_alias or name, node)
    start = source.start(alias)
    refusal = next(filter(None, (_use_as_dict(source, use) for use in uses)), "")
    if not refusal and alias.asname is None and source.binders(new_name):
        refusal = f"the name {new_name} is already bound in this file"
    if not refusal and name in source.taken_by_others:
        refusal = f"another file uses {name}"
    edits = [source.edit(alias.name, new_name)]
    if alias.asname is None:
        edits += [source.edit(use, new_name) for use in uses]
    return Site("TQ109", start, name).settled(refusal, edits)


def _use_as_dict(source: ParsedSource, function: cst.CSTNode) -> str:
    """Return the reason why the dict cannot become an object: code other than an FX call uses it; empty if
    none does."""
    call = source.parent(function)
    if not isinstance(call, cst.Call) or call.func is not function:
        return f"the function itself is used at line {source.line(source.start(function))}"
    arguments = {arg for fx in fx_calls(source) for arg in fx.node.args}
    parent = source.parent(call)
    if parent in arguments:
        return ""
    target = parent.targets[0].target if isinstance(parent, cst.Assign) else None
    if not isinstance(target, cst.Name) or only_value(source, target) is None:
        return f"the dict is used at line {source.line(source.start(call))}"
    for use in source.references(target.value, target):
        if source.parent(use) not in arguments:
            return f"the dict is used at line {source.line(source.start(use))}"
    return ""


GETTERS = Finder("TQ109", find_getters)
