"""Convert Jupyter notebooks to one Python text and back, so that names of one cell are known in the next.

Cells are joined with a marker comment before each. A line that only IPython understands becomes a ``pass``
with the line in its comment. Both are undone when the text is split again: only edited parts change.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from dataclasses import dataclass
from typing import Any

from torchq_compat.migrate.source.source_files import SourceFile, UnreadableError

__all__ = ["Notebook", "join_cells", "notebook_bytes"]

CELL = "# <torchq-compat cell {}>"
CELL_LINE = re.compile(r"^# <torchq-compat cell (\d+)>$", re.MULTILINE)
MASK = "pass  # <torchq-compat> "
MAGIC_LINE = re.compile(
    r"^(?P<indent>[ \t]*)(?P<code>[%!?].*|[\w., ]+ *= *[%!].*|[\w.]+\?\??)$", re.MULTILINE
)
#: Cell magics whose body is Python; the bodies of other magics are not.
PYTHON_CELL_MAGICS = ("%%capture", "%%prun", "%%time", "%%timeit")
PYTHON_LANGUAGES = ("", "ipython", "python")
INDENTS = (1, 2, 4, "\t", None, 0, 3)


@dataclass(frozen=True)
class Notebook:
    """A notebook as text.

    Attributes:
        text: the code cells that could be read, joined.
        problems: why a cell could not be read.
    """

    text: str
    problems: tuple[str, ...]


def join_cells(raw_text: str) -> Notebook:
    """Return the code cells of the notebook ``raw_text``.

    Raises:
        UnreadableError: the text is not a notebook.
    """
    parts, problems = [], []
    for number, cell in enumerate(_cells(_load(raw_text)), start=1):
        code = _source(cell)
        if cell.get("cell_type") != "code" or _is_foreign(code):
            continue
        try:
            parts.append(f"{CELL.format(number)}\n{_as_python(code)}\n")
        except SyntaxError as error:
            problems.append(f"cell {number}, line {error.lineno}: {error.msg}")
        except (ValueError, RecursionError, MemoryError) as error:
            problems.append(f"cell {number}: {error or type(error).__name__}")
    return Notebook("".join(parts), tuple(problems))


def _as_python(code: str) -> str:
    """Return ``code``, with the lines of IPython in comments if it is not valid Python otherwise."""
    try:
        _parse(code)
    except SyntaxError:
        code = MAGIC_LINE.sub(lambda match: f"{match['indent']}{MASK}{match['code']}", code)
        _parse(code)
    return code


def _parse(code: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compile(code, "cell", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def notebook_bytes(source: SourceFile, new_text: str) -> bytes:
    """Return the notebook file with the cells of ``new_text`` in place of its own.

    Raises:
        UnreadableError: the layout of its JSON could not be kept.
    """
    content = _load(source.text)
    layout = _layout(source.text, content)
    cells = _cells(content)
    pieces = CELL_LINE.split(new_text)[1:]
    for number, piece in zip(pieces[::2], pieces[1::2], strict=True):
        cell = cells[int(number) - 1]
        code = piece.removeprefix("\n").removesuffix("\n").replace(MASK, "")
        if code != _source(cell):
            cell["source"] = code.splitlines(keepends=True) if isinstance(cell["source"], list) else code
    return source.encode(_dump(content, layout))


def cell_of_line(text: str, line: int) -> tuple[int, int]:
    """Return the number of the cell, and the line in it, for a line of the joined text; all count from 1."""
    lines = text.split("\n")[:line]
    for back, candidate in enumerate(reversed(lines)):
        match = CELL_LINE.match(candidate)
        if match:
            return int(match[1]), back
    raise ValueError(f"line {line} lies in no cell")


def _load(text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise UnreadableError(f"is not a notebook: {error}") from error
    except (RecursionError, MemoryError) as error:
        raise UnreadableError("is not a notebook: it is nested too deeply") from error
    if not isinstance(content, dict) or not isinstance(content.get("cells"), list):
        raise UnreadableError("is not a notebook of format 4: it has no cells")
    if not all(map(_is_cell, content["cells"])):
        raise UnreadableError("is not a notebook of format 4: one of its cells is none")
    language = _inside(_inside(content, "metadata"), "kernelspec").get("language", "")
    if not isinstance(language, str):
        raise UnreadableError("is not a notebook of format 4: its language is no text")
    if language.lower() not in PYTHON_LANGUAGES:
        raise UnreadableError(f"is a notebook of {language}, not of Python")
    return content


def _is_cell(cell: Any) -> bool:
    source = cell.get("source", "") if isinstance(cell, dict) else None
    return isinstance(source, str) or (
        isinstance(source, list) and all(isinstance(line, str) for line in source)
    )


def _inside(content: dict[str, Any], key: str) -> dict[str, Any]:
    value = content.get(key, {})
    return value if isinstance(value, dict) else {}


def _cells(content: dict[str, Any]) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = content["cells"]
    return cells


def _source(cell: dict[str, Any]) -> str:
    source = cell.get("source", "")
    return "".join(source) if isinstance(source, list) else str(source)


def _is_foreign(code: str) -> bool:
    first = code.lstrip().split(maxsplit=1)[:1]
    return bool(first) and first[0].startswith("%%") and first[0] not in PYTHON_CELL_MAGICS


Layout = tuple[str, dict[str, Any]]


def _layout(text: str, content: dict[str, Any]) -> Layout:
    for indent in INDENTS:
        for ascii_only in (False, True):
            for separators in ((",", ": "), (", ", ": "), (",", ":")):
                options = {"indent": indent, "ensure_ascii": ascii_only, "separators": separators}
                for end in ("\n", ""):
                    if _dump(content, (end, options)) == text:
                        return end, options
    raise UnreadableError("is laid out in a way that rewriting would not keep; save it with Jupyter first")


def _dump(content: dict[str, Any], layout: Layout) -> str:
    end, options = layout
    return json.dumps(content, **options) + end
