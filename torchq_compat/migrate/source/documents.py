"""Python files and notebooks in one form: a text to search, and bytes to write."""

from __future__ import annotations

import ast
import warnings
from dataclasses import dataclass
from pathlib import Path

from torchq_compat.migrate.source.notebooks import cell_of_line, join_cells, notebook_bytes
from torchq_compat.migrate.source.source_files import SourceFile, UnreadableError, read_file

__all__ = ["Document", "Place", "read_document"]

NOTEBOOK = ".ipynb"
#: A notebook may use ``await`` outside functions.
FLAGS = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT


@dataclass(frozen=True)
class Place:
    """A line and column of a Python file, or of a numbered cell of a notebook; all count from 1."""

    line: int
    cell: int | None = None
    column: int = 1

    def __str__(self) -> str:
        line = f"{self.line}:{self.column}"
        return line if self.cell is None else f"cell {self.cell}:{line}"


@dataclass(frozen=True)
class Document:
    """A file as Python text.

    Attributes:
        source: the file.
        text: its Python code; for a notebook, the code of all cells.
        syntax: the syntax tree of ``text``.
        problems: parts that could not be read.
    """

    source: SourceFile
    text: str
    syntax: ast.Module
    problems: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        return self.source.path

    def place(self, line: int, column: int = 1) -> Place:
        if self.path.suffix != NOTEBOOK:
            return Place(line, column=column)
        cell, line_of_cell = cell_of_line(self.text, line)
        return Place(line_of_cell, cell, column)

    def bytes_with(self, text: str) -> bytes:
        """Return the bytes of the file with ``text`` in place of its own.

        Raises:
            UnreadableError: the file could not be written without changing more than that.
        """
        if self.path.suffix == NOTEBOOK:
            return notebook_bytes(self.source, text)
        try:
            return self.source.encode(text)
        except UnicodeEncodeError as error:
            raise UnreadableError(f"cannot be encoded again: {error}") from error


def read_document(path: Path) -> Document:
    """Read the file at ``path``.

    Raises:
        UnreadableError: the file cannot be read, or is neither Python nor a notebook.
    """
    source = read_file(path)
    if path.suffix == NOTEBOOK:
        notebook = join_cells(source.text)
        return Document(source, notebook.text, parse(notebook.text), notebook.problems)
    if source.encode(source.text) != source.raw:
        raise UnreadableError(f"does not survive decoding as {source.encoding}")
    return Document(source, source.text, parse(source.raw))


def parse(code: str | bytes) -> ast.Module:
    """Return the syntax tree of ``code`` by Python's ``ast``: without formatting, but far faster than LibCST.

    Raises:
        UnreadableError: ``code`` is not valid Python.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = compile(code, "file", "exec", FLAGS, dont_inherit=True)
    except SyntaxError as error:
        raise UnreadableError(f"line {error.lineno}: {error.msg}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise UnreadableError(f"cannot be parsed: {error}") from error
    assert isinstance(tree, ast.Module)
    return tree
