"""All files of a tree, to find those that re-export legacy names under names of their own."""

import ast
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import NamedTuple

from torchq_compat.port.names import LEGACY_MODULES, LEGACY_NAMES

MAX_HOPS = 16


class ReExport(NamedTuple):
    """A name under which a file of the tree re-exports a legacy name, and the last part of that file's
    module."""

    name: str
    module: str


class Tree:
    """Dotted module names -> files, and the imported names that those files bind."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._files: dict[str, list[Path]] = {}
        for path in files:
            if path.suffix != ".ipynb":
                self._files.setdefault(module_name(path), []).append(path)
        self._bindings: dict[Path, Mapping[str, str]] = {}
        self._stars: dict[Path, tuple[str, ...]] = {}
        #: File -> the names of it that other files use, according to the calls of ``follow`` so far.
        self.taken: dict[Path, set[str]] = {}

    def add(self, path: Path, syntax: ast.Module) -> set[ReExport]:
        """Record the names that ``path`` binds; return the legacy names it re-exports under other names."""
        bindings = dict(_bindings(syntax))
        self._bindings[path] = bindings
        self._stars[path] = tuple(_star_modules(syntax))
        stem = module_name(path).rpartition(".")[2] if path.stem != "__init__" else ""
        return {ReExport(name, stem) for name, full in bindings.items() if self._is_news(path, name, full)}

    def follow(self, importer: Path, name: str) -> str:
        """Return the absolute name that ``name``, as written in ``importer``, means."""
        for _ in range(MAX_HOPS):
            target = self._one_hop(importer, name)
            if target is None:
                break
            importer, name = target
        return _absolute(importer, name)

    def add_taken(self, taken: Mapping[Path, set[str]]) -> None:
        """Add what a copy of this tree knows."""
        for path, names in list(taken.items()):
            self.taken.setdefault(path, set()).update(names)

    def _is_news(self, path: Path, name: str, full: str) -> bool:
        meaning = self.follow(path, full)
        return meaning.rpartition(".")[2] != name and (meaning in LEGACY_NAMES or meaning in LEGACY_MODULES)

    def _one_hop(self, importer: Path, name: str) -> tuple[Path, str] | None:
        """Return the module that binds the first unknown part of ``name``, and the name it binds that part
        to."""
        parts = _absolute(importer, name).split(".")
        for cut in range(len(parts) - 1, 0, -1):
            path = self._find(importer, ".".join(parts[:cut]))
            if path is None or path not in self._bindings:
                continue
            self.taken.setdefault(path, set()).add(parts[cut])
            bound = self._bound_to(path, parts[cut], MAX_HOPS)
            return (bound[0], ".".join((bound[1], *parts[cut + 1 :]))) if bound else None
        return None

    def _bound_to(self, path: Path, name: str, budget: int) -> tuple[Path, str] | None:
        """Return the file that binds ``name``, ``path`` or a file it imports with ``*``, and the meaning of
        ``name`` there."""
        if name in self._bindings.get(path, {}):
            return path, self._bindings[path][name]
        for star in self._stars.get(path, ()) if budget else ():
            if f"{star}.{name}" in LEGACY_NAMES:
                return path, f"{star}.{name}"
            behind = self._find(path, _absolute(path, star))
            bound = self._bound_to(behind, name, budget - 1) if behind is not None else None
            if bound is not None:
                return bound
        return None

    def _find(self, importer: Path, module: str) -> Path | None:
        """Return the file of ``module``: the one beside ``importer``, or the only one of that name; None
        otherwise."""
        result = self._files.get(module, [])
        if beside := [path for path in result if path.parent == importer.parent]:
            return beside[0]
        return result[0] if len(result) == 1 else None


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that run when a module is imported, including those in its branches."""
    for statement in body:
        yield statement
        if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            for part in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(statement, part, ()))
            for handler in getattr(statement, "handlers", ()):
                yield from _statements(handler.body)


def _bindings(syntax: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield (name, full name) for imports and plain assignments, in order; the last one of a name counts."""
    known: dict[str, str] = {}
    for statement in _statements(syntax.body):
        for name, full in _bound_by(statement, known):
            known[name] = full
            yield name, full


def _bound_by(statement: ast.stmt, known: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    if isinstance(statement, ast.Import):
        for alias in statement.names:
            top = alias.name.partition(".")[0]
            yield (alias.asname, alias.name) if alias.asname else (top, top)
    elif isinstance(statement, ast.ImportFrom):
        prefix = "." * statement.level + (f"{statement.module}." if statement.module else "")
        yield from ((a.asname or a.name, prefix + a.name) for a in statement.names if a.name != "*")
    elif isinstance(statement, ast.Assign) and isinstance(statement.value, (ast.Name, ast.Attribute)):
        target, (base, _, remaining) = statement.targets[0], ast.unparse(statement.value).partition(".")
        if len(statement.targets) == 1 and isinstance(target, ast.Name) and base in known:
            yield target.id, f"{known[base]}.{remaining}" if remaining else known[base]


def _star_modules(syntax: ast.Module) -> Iterator[str]:
    for statement in _statements(syntax.body):
        if isinstance(statement, ast.ImportFrom) and any(alias.name == "*" for alias in statement.names):
            yield "." * statement.level + (statement.module or "")


# What the installed packages have, read from their files: importing torch would take seconds.


def installed_lacks(module: str, name: str = "") -> str:
    """Return why ``from module import name``, or ``import module``, fails here; empty if it does not."""
    root = module.partition(".")[0]
    if root == "torchq_compat":
        return ""  # Its tests see to that.
    if find_spec(root) is None:
        return f"{root} is not installed here"
    if _source_of(module) is None:
        return f"{root} {_version(root)} has no module {module}"
    if name and not _has(module, name, MAX_HOPS):
        return f"{module} of {root} {_version(root)} has no {name}"
    return ""


def imports_of(syntax: ast.Module) -> set[tuple[str, str]]:
    """Return (module, name) for the absolute imports of a file; the name is empty for ``import module``."""
    result = set()
    for node in ast.walk(syntax):
        if isinstance(node, ast.Import):
            result |= {(alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            result |= {(node.module, alias.name if alias.name != "*" else "") for alias in node.names}
    return result


def _version(root: str) -> str:
    try:
        return version(root.replace("_", "-"))
    except PackageNotFoundError:
        return "as installed"


@cache
def _source_of(module: str) -> Path | None:
    """Return the file of an installed module; None if it is not there."""
    root, *parts = module.split(".")
    spec = find_spec(root)
    for base in map(Path, spec.submodule_search_locations or () if spec is not None else ()):
        path = base.joinpath(*parts)
        for file in (path / "__init__.py", path.with_name(f"{path.name}.py")):
            if file.is_file():
                return file
        if path.is_dir():
            return path
        if parts and any(path.parent.glob(f"{path.name}.*.so")):
            return path.parent
    return None


@cache
def _bound_in(file: Path) -> tuple[frozenset[str], tuple[str, ...]]:
    """Return the names that a module binds, and the modules it imports all names of."""
    if file.is_dir():
        return frozenset({"__getattr__"}), ()  # An extension module, or a package without code.
    syntax = ast.parse(file.read_bytes())
    names: set[str] = set()
    for statement in _statements(syntax.body):
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(statement.name)
        elif isinstance(statement, (ast.Import, ast.ImportFrom)):
            names.update(alias.asname or alias.name.partition(".")[0] for alias in statement.names)
        else:
            stored = (n for n in ast.walk(statement) if isinstance(n, ast.Name))
            names.update(n.id for n in stored if isinstance(n.ctx, ast.Store))
    return frozenset(names), tuple(_star_modules(syntax))


def _has(module: str, name: str, budget: int) -> bool:
    file = _source_of(module)
    if file is None or not budget:
        return False
    names, stars = _bound_in(file)
    if name in names or "__getattr__" in names or _source_of(f"{module}.{name}") is not None:
        return True
    package = module if file.stem == "__init__" else module.rpartition(".")[0]
    return any(_has(resolve_name(star, package), name, budget - 1) for star in stars)


@cache
def module_name(path: Path) -> str:
    """Return the dotted module name ``pkg.sub.mod`` of a file, from its outermost package on."""
    parts = [path.stem] if path.stem != "__init__" else []
    folder = path.absolute().parent
    while (folder / "__init__.py").exists() and folder.name:
        parts.insert(0, folder.name)
        folder = folder.parent
    return ".".join(parts)


def _absolute(importer: Path, name: str) -> str:
    """Return ``name`` with the dots of a relative import resolved."""
    package = module_name(importer)
    if importer.stem != "__init__":
        package = package.rpartition(".")[0]
    try:
        return resolve_name(name, package)
    except ImportError:  # The importer is in no package, or in none that far up.
        return name.lstrip(".")
