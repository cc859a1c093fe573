"""The texts of the errors, read from the code that raises them: they are written once, where the check is."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchq_compat import errors
from torchq_compat.support.codes import FILE

#: A place longer than this is shown as dots.
LONGEST = 40


def texts_of_errors() -> dict[str, dict[str, str]]:
    """Return code -> text with its places in braces -> the class that is raised with it."""
    texts: dict[str, dict[str, str]] = {}
    for path in sorted(FILE.parent.rglob("*.py")):
        tree = ast.parse(path.read_text())
        for raised, call in _calls(tree):
            code = next(filter(None, map(_code, call.keywords)), raised.code)
            text = _shown(call.args[0]) if call.args else ""
            if any(letter.isalpha() for letter in text.replace("{...}", "")):
                texts.setdefault(code, {}).setdefault(text, raised.__name__)
    return texts


def _calls(tree: ast.Module) -> Iterator[tuple[type[errors.TorchQCompatError], ast.Call]]:
    """Yield each call of a class of errors.py, or of ``cls`` in it, with the class."""
    owners = {
        id(node): top.name for top in tree.body if isinstance(top, ast.ClassDef) for node in ast.walk(top)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).removeprefix("errors.")
            raised = getattr(errors, owners.get(id(node), "") if name == "cls" else name, None)
            if isinstance(raised, type) and issubclass(raised, errors.TorchQCompatError):
                yield raised, node


def _code(keyword: ast.keyword) -> str:
    is_code = keyword.arg == "code" and isinstance(keyword.value, ast.Constant)
    return str(ast.literal_eval(keyword.value)) if is_code else ""


def _shown(text: ast.expr) -> str:
    """Return a literal as it is, an f-string with its places in braces, and dots for what is computed."""
    match text:
        case ast.Constant(value=str(written)):
            return written
        case ast.JoinedStr(values=parts):
            return "".join(map(_shown, parts))
        case ast.BinOp(left=left, right=right):
            return _shown(left) + _shown(right)
        case ast.FormattedValue(value=place):
            name = ast.unparse(place)
            return f"{{{name}}}" if len(name) <= LONGEST else "{...}"
    return "{...}"
