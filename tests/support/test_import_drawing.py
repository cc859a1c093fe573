"""A drawing of the package's imports: no cycles, and few folders at the top."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.helpers.package_trees import PACKAGE as ROOT
from tests.helpers.package_trees import package_nodes
from torchq_compat.support.metadata import KEYS

PACKAGE = ROOT.name


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def statements(nodes: Iterable[ast.AST]) -> Iterator[ast.Import | ast.ImportFrom]:
    """Return all imports of a module, those in functions and those for type checkers too."""
    for node in nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node


@functools.cache
def drawing() -> dict[str, set[str]]:
    """Return module -> the modules of the package that it imports."""
    files = {module_name(path): nodes for path, nodes in package_nodes().items()}
    drawn: dict[str, set[str]] = {}
    for name, nodes in files.items():
        found: set[str] = set()
        for statement in statements(nodes):
            if isinstance(statement, ast.Import):
                found.update(alias.name for alias in statement.names)
            else:
                assert statement.level == 0, f"{name}: imports are absolute"
                base = statement.module or ""
                inside = {f"{base}.{alias.name}" for alias in statement.names}
                found.update(inside & files.keys())
                if not inside <= files.keys():
                    found.add(base)
        drawn[name] = {other for other in found if other in files and other != name}
    return drawn


def test_no_circles() -> None:
    TopologicalSorter(drawing()).prepare()


def test_no_circles_between_rooms() -> None:
    rooms: dict[str, set[str]] = {}
    for name, others in drawing().items():
        room = rooms.setdefault(".".join(name.split(".")[:2]), set())
        room.update(".".join(other.split(".")[:2]) for other in others if other != PACKAGE)
    for room, others in rooms.items():
        others.discard(room)
    TopologicalSorter(rooms).prepare()


def test_no_circles_inside_rooms() -> None:
    """The folders and modules inside each folder, each taken as a whole, import each other without cycles."""
    drawn = drawing()
    folders = {name.rpartition(".")[0] for name in drawn} - {"", PACKAGE}
    assert len(folders) > 20
    for folder in folders:
        depth = folder.count(".") + 2
        inside: dict[str, set[str]] = {}
        for name, others in drawn.items():
            if name.startswith(f"{folder}."):
                node = inside.setdefault(".".join(name.split(".")[:depth]), set())
                node.update(
                    ".".join(other.split(".")[:depth]) for other in others if other.startswith(f"{folder}.")
                )
        for node_name, others in inside.items():
            others.discard(node_name)
        TopologicalSorter(inside).prepare()


def test_circles_are_found() -> None:
    drawn = {**drawing(), "torchq_compat.errors": {"torchq_compat.quantize.prepare"}}
    with pytest.raises(CycleError):
        TopologicalSorter(drawn).prepare()


def test_rooms_at_the_top() -> None:
    rooms = [path for path in ROOT.iterdir() if path.is_dir() and path.name != "__pycache__"]
    assert len(rooms) <= 14, sorted(rooms)
    files = [path.name for path in package_nodes()]
    assert 190 <= len(files) <= 268
    assert len({name for name in files if files.count(name) > 1} - {"__init__.py"}) <= 8


def test_support_names_nothing_above_it() -> None:
    rooms = {path.name for path in ROOT.iterdir() if path.is_dir()} - {"support", "__pycache__"}
    for path, nodes in package_nodes().items():
        if path.parent.name == "support":
            texts = [node.value for node in nodes if isinstance(node, ast.Constant)]
            paths = [text for text in texts if isinstance(text, str) and text.startswith(f"{PACKAGE}.")]
            assert not [text for text in paths if text.split(".")[1] in rooms], path


def test_handlers_do_not_know_the_stages() -> None:
    below = ("annotate", "capture", "model", "modules", "read", "recurrent")
    climbing = {
        (name, other)
        for name, others in drawing().items()
        for other in others
        if name.startswith(tuple(f"{PACKAGE}.{room}." for room in below))
        and other.startswith(f"{PACKAGE}.quantize.")
    }
    assert not climbing


def test_metadata_keys_are_in_one_table() -> None:
    names = [key.name for key in KEYS]
    assert len(set(names)) == len(names) > 15
    assert {key.on for key in KEYS} == {"node", "graph"}
    for path in ROOT.rglob("*.py"):
        if path.name != "metadata.py":
            quoted = {name for name in names if f'"{name}"' in path.read_text() and name != PACKAGE}
            assert not quoted, f"{path}: {quoted}"
    for key in KEYS:
        assert (ROOT / key.written_by.replace(".", "/")).with_suffix(".py").is_file(), key.written_by


@pytest.mark.parametrize(
    ("text", "home"),
    [
        ("ops.quantized_decomposed", "read/qdq.py"),
        ('removeprefix("torch.")', "support/dtypes.py"),
    ],
)
def test_one_module_names_them(text: str, home: str) -> None:
    """q-dq operators, and dtypes by name; ``decisions`` shows values of every kind."""
    files = {path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py") if text in path.read_text()}
    assert files - {"support/decisions.py"} == {home}
