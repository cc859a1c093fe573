"""TorchScript files of converted models -> ``torch.export`` files.

``torch.jit.save(torch.jit.script(model), path)`` becomes ``torch.export.save(torch.export.export(model,
inputs, dynamic_shapes=...), path)`` with every size left free that the model leaves free, as in TorchScript.
The example inputs are those of ``torch.jit.trace``, else those the model was prepared with. Loading follows
where the same file loads the same path.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst

from torchq_compat.migrate.legacy_api.construct import Construct
from torchq_compat.migrate.legacy_api.fx_calls import FxCall, fx_call, fx_calls, last_value, only_value
from torchq_compat.migrate.rewrites.declaration import Rewrite
from torchq_compat.migrate.source.imports import is_free
from torchq_compat.migrate.source.parsed_source import ParsedSource
from torchq_compat.migrate.source.sites import ImportRequest, Site
from torchq_compat.migrate.source.text_edits import Edit

__all__ = ["REWRITE"]

SCRIPTING = {"torch.jit.script": "script", "torch.jit.trace": "trace"}
CONVERTING = ("convert_fx", "convert_to_reference_fx")
PREPARING = ("prepare_fx", "prepare_qat_fx")
MAX_STEPS = 8
#: Of every example input, a tensor, every size is free.
EVERY_SIZE_FREE = (
    "dynamic_shapes=tuple(dict.fromkeys(range(x.dim()), torch.export.Dim.AUTO) for x in {inputs})"
)
INDENT = "    "


class _Refused(Exception):  # noqa: N818 - says why, is no error
    pass


@dataclass(frozen=True)
class _Saving:
    edits: tuple[Edit, ...]
    path: str


def find(source: ParsedSource) -> Iterator[Site]:
    if not any(call.function in CONVERTING for call in fx_calls(source)):
        return
    saved: set[str] = set()
    for call in source.nodes(cst.Call):
        kind = _called(source, call, SCRIPTING)
        if not kind or not call.args or not _may_be_converted(source, call.args[0].value, call):
            continue
        start, what = source.start(call), f"torch.jit.{kind}"
        try:
            saving = _saving(source, call, kind)
        except _Refused as reason:
            yield Site("TQ110", start, what, refusal=str(reason))
            continue
        saved.add(saving.path)
        imports = (ImportRequest("torch", offset=start),)
        yield Site("TQ110", start, what, saving.edits, imports)
    yield from _loads(source, saved)


def _called(source: ParsedSource, call: cst.Call, functions: dict[str, str]) -> str:
    names = source.names(call.func)
    return functions.get(next(iter(names)), "") if len(names) == 1 else ""


def _conversion(source: ParsedSource, model: cst.BaseExpression, at: cst.CSTNode) -> FxCall | None:
    """Return the convert_fx call that made ``model``, through variables, copies and ``.eval()``."""
    for _ in range(MAX_STEPS):
        if isinstance(model, cst.Name):
            value = last_value(source, model, at)
            if value is None:
                return None
            model, at = value, value
            continue
        call = fx_call(source, model)
        if call is not None:
            return call if call.function in CONVERTING else None
        if not isinstance(model, cst.Call) or not isinstance(model.func, cst.Attribute):
            return None
        if model.func.attr.value not in ("eval", "cpu"):
            return None
        model = model.func.value
    return None


def _may_be_converted(source: ParsedSource, model: cst.BaseExpression, at: cst.CSTNode) -> bool:
    """Return whether ``model`` is a converted model, or a variable that holds one on some way through the
    code."""
    if _conversion(source, model, at) is not None:
        return True
    if not isinstance(model, cst.Name) or last_value(source, model, at) is not None:
        return False
    scope = source.scope(model)
    values = [source.assigned_value(a) for a in (scope[model.value] if scope is not None else ())]
    return any(value is not None and _conversion(source, value, value) is not None for value in values)


def _saving(source: ParsedSource, call: cst.Call, kind: str) -> _Saving:
    """Return the edits for scripting, or tracing, and the one saving that follows.

    Raises:
        _Refused: something else is done with the scripted model, or its example inputs are unknown.
    """
    model = call.args[0].value
    if _conversion(source, model, call) is None:
        raise _Refused("it depends on the way through the code whether this is a converted model")
    if not isinstance(model, (cst.Name, cst.Attribute)):
        raise _Refused("the converted model has no name of its own")
    if source.has_comment(_statement(source, call)):
        raise _Refused("the statement has comments in it")
    if not is_free(source, ImportRequest("torch")):
        raise _Refused("the name torch means something else in this file")
    inputs = _example_inputs(source, call, kind)
    arguments = [source.code(model), inputs, EVERY_SIZE_FREE.format(inputs=inputs)]
    holder = source.parent(call)
    if isinstance(holder, cst.Assign) and isinstance(holder.targets[0].target, cst.Name):
        target = holder.targets[0].target
        uses = source.references(target.value, target)
        if only_value(source, target) is None or len(uses) != 1:
            raise _Refused(f"{target.value} is used for more than saving it")
        save, path = _save_call(source, uses[0])
        export = _call(source, call, "torch.export.export", arguments)
        text = f"torch.export.save({target.value}, {path})"
        return _Saving((_replace(source, call, export), _replace(source, save, text)), path)
    save, path = _save_call(source, call)
    export = _call(source, save, "torch.export.export", arguments, depth=1)
    text = _call(source, save, "torch.export.save", [export, path])
    return _Saving((_replace(source, save, text),), path)


def _statement(source: ParsedSource, node: cst.CSTNode) -> cst.CSTNode:
    """Return the small statement that ``node`` is part of, or the head of a compound one."""
    return next((a for a in source.ancestors(node) if isinstance(a, cst.BaseSmallStatement)), node)


def _call(
    source: ParsedSource, node: cst.CSTNode, function: str, arguments: list[str], depth: int = 0
) -> str:
    """Return a call with one argument a line, to stand in place of ``node``, ``depth`` calls deep."""
    newline = source.newline()
    outer = source.indent_at(source.start(node)) + depth * INDENT
    lines = "".join(f"{newline}{outer}{INDENT}{argument}," for argument in arguments)
    return f"{function}({lines}{newline}{outer})"


def _replace(source: ParsedSource, node: cst.CSTNode, text: str) -> Edit:
    return Edit(source.start(node), source.end(node), text)


def _save_call(source: ParsedSource, scripted: cst.CSTNode) -> tuple[cst.Call, str]:
    """Return the call that saves ``scripted``, and its path: ``torch.jit.save(x, path)`` or
    ``x.save(path)``."""
    parent = source.parent(scripted)
    call = source.parent(parent)
    if isinstance(call, cst.Call) and all(arg.keyword is None and not arg.star for arg in call.args):
        is_method = isinstance(parent, cst.Attribute) and parent.attr.value == "save"
        if is_method and call.func is parent and len(call.args) == 1:
            return call, source.full_code(call.args[0].value)
        is_function = _called(source, call, {"torch.jit.save": "save"}) and call.args[0] is parent
        if is_function and len(call.args) == 2:
            return call, source.full_code(call.args[1].value)
    raise _Refused("the scripted model is used for more than saving it")


def _example_inputs(source: ParsedSource, call: cst.Call, kind: str) -> str:
    if kind == "trace" and len(call.args) > 1 and call.args[1].keyword is None:
        traced = call.args[1].value
        if _are_names(traced):
            return source.full_code(traced)
        value = last_value(source, traced, call) if isinstance(traced, cst.Name) else None
        if isinstance(value, cst.Tuple):
            return source.code(traced)
        if isinstance(value, cst.Call):
            return f"({source.code(traced)},)"
        raise _Refused("the example inputs of torch.jit.trace are no variables")
    conversion = _conversion(source, call.args[0].value, call)
    inputs = _prepared_with(source, conversion) if conversion is not None else None
    if inputs is None or not _still_the_same(source, inputs, call):
        raise _Refused("the example inputs that the model was prepared with are not at hand")
    return source.full_code(inputs)


def _are_names(node: cst.BaseExpression) -> bool:
    return (
        isinstance(node, cst.Tuple)
        and bool(node.elements)
        and all(isinstance(e, cst.Element) and isinstance(e.value, cst.Name) for e in node.elements)
    )


def _prepared_with(source: ParsedSource, conversion: FxCall) -> cst.BaseExpression | None:
    """Return ``example_inputs`` of the prepare call behind a convert call: a variable or a tuple of such."""
    model: cst.BaseExpression | None = conversion.node.args[0].value
    at: cst.CSTNode = conversion.node
    for _ in range(MAX_STEPS):
        call = fx_call(source, model)
        if call is not None and call.function in PREPARING:
            arg = call.arg("example_inputs")
            value = arg.value if arg is not None else None
            return value if value is not None and (isinstance(value, cst.Name) or _are_names(value)) else None
        if isinstance(model, cst.Call) and isinstance(model.func, cst.Attribute):
            model = model.func.value
        elif isinstance(model, cst.Name):
            model = last_value(source, model, at)
            at = model if model is not None else at
        else:
            return None
    return None


def _still_the_same(source: ParsedSource, inputs: cst.BaseExpression, at: cst.CSTNode) -> bool:
    """Return whether the variables of ``inputs`` hold at ``at`` what they held where the model was
    prepared."""
    names = [inputs] if isinstance(inputs, cst.Name) else [e.value for e in _elements(inputs)]
    for name in names:
        assert isinstance(name, cst.Name)
        scope = source.scope(name)
        here = source.scope(at)
        assigned = scope[name.value] if scope is not None and name.value in scope else ()
        if scope is not here or len(assigned) != 1:
            return False
    return True


def _elements(node: cst.BaseExpression) -> list[cst.BaseElement]:
    assert isinstance(node, cst.Tuple)
    return list(node.elements)


def _loads(source: ParsedSource, saved: set[str]) -> Iterator[Site]:
    """Yield ``torch.jit.load(path)`` of a path that is saved by ``torch.export`` from now on."""
    for call in source.nodes(cst.Call):
        if not _called(source, call, {"torch.jit.load": "load"}) or not call.args:
            continue
        start, path = source.start(call), source.full_code(call.args[0].value)
        if path not in saved:
            refusal = "what it loads is not saved in this file"
        elif len(call.args) > 1:
            refusal = "torch.export.load takes no such arguments"
        elif isinstance(source.parent(call), cst.Attribute):
            refusal = "the loaded model is asked for an attribute at once"
        else:
            edit = Edit(start, source.end(call), f"torch.export.load({path}).module()")
            yield Site("TQ110", start, "torch.jit.load", (edit,), (ImportRequest("torch", offset=start),))
            continue
        yield Site("TQ110", start, "torch.jit.load", refusal=refusal)


CONSTRUCT = Construct(
    code="TQ110",
    title="TorchScript",
    becomes="torch.export.export, save and load",
    guide="""\
A converted model is an exported graph: `torch.jit.script` cannot compile it.
`torch.jit.save(torch.jit.script(model), path)` becomes `torch.export.save(torch.export.export(model,
example_inputs, dynamic_shapes=...), path)`, with every size free, and `torch.jit.load(path)` in the same
file `torch.export.load(path).module()`. What was size 1 in the example inputs is fixed by torch.export: use
an example with a batch of two or more. torch.export warns about file names that do not end in `.pt2`. Left:
a scripted model that is used for more than saving, example inputs that are no plain variables, a file that
is loaded elsewhere.
""",
)

REWRITE = Rewrite(
    name="torchscript",
    construct=CONSTRUCT,
    summary="TorchScript files of converted models become torch.export files",
    find=find,
    order=70,
)
