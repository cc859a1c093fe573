"""Collects torch.export's assumptions about sizes, each with the line of the user's code that caused it.

With ``Dim.AUTO`` torch.export silently fixes a size, or takes one branch: ``range(x.size(0))``, ``if n > 6``.
Each assumption is a guard of the ShapeEnv, and a captured model does not check it by itself.
"""

from __future__ import annotations

import linecache
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from torchq_compat.support.upstream import FakeTensor, OpOverload, pytree

__all__ = ["Guard", "GuardLog"]

TORCH = Path(torch.__file__).parent
TENSOR = str(TORCH / "_tensor.py")
PACKAGE = Path(__file__).parents[2]
PYTHON = (Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib")))
CUSTOM_MODULES = PACKAGE / "custom_modules"
#: Code that evaluates conditions on sizes, and is not the reason for them.
EVALUATING = (
    str(TORCH / "fx" / "experimental"),
    str(TORCH / "utils" / "_sympy"),
    str(TORCH / "__init__.py"),
    str(Path(sympy.__file__).parent),
    __file__,
)
#: Ops whose number of results is a size: calling one fixes the size in Python.
COUNTING_OPS = ("aten.unbind.int", "aten.split.Tensor", "aten.chunk.default", "aten.tensor_split.sections")
#: Beginnings of the file names of generated code.
GENERATED = ("<frozen", "<eval_with_key", "<string>")
EXPORT = str(Path(__file__).parents[1] / "torch_export.py")


@dataclass(frozen=True)
class Guard:
    """One assumption about sizes.

    Attributes:
        condition: a boolean expression of the sizes' symbols.
        line: file, line and text of the user's code; None if it is unknown.
        by_python: whether the user's own Python code caused it, and not an operator that needs it.
        by_module: whether a custom module caused it, which accepts no call that breaks it.
    """

    condition: Any
    line: str | None
    by_python: bool
    by_module: bool = False


@dataclass
class GuardLog:
    """The guards of one capture."""

    _guards: list[Any] = field(default_factory=list)

    def watch(self, model: nn.Module) -> RemovableHandle:
        """Record where each guard comes from while ``model`` is captured; return the handle of the hook."""

        def start(_module: nn.Module, args: Any, kwargs: Any) -> None:
            for leaf in pytree.tree_leaves((args, kwargs)):
                shape_env = leaf.fake_mode.shape_env if isinstance(leaf, FakeTensor) else None
                if shape_env is not None and not isinstance(shape_env.guards, _LocatedGuards):
                    shape_env.guards = _LocatedGuards(shape_env.guards)
                    self._guards = shape_env.guards

        return model.register_forward_pre_hook(start, with_kwargs=True)

    def guards(self) -> tuple[Guard, ...]:
        """Return the recorded guards, in order."""
        places = getattr(self._guards, "places", {})
        found = []
        for guard in self._guards:
            found.append(Guard(guard.expr, *places.get(id(guard), (None, False, False))))
        return tuple(found)


class _LocatedGuards(list[Any]):
    """The list of a ShapeEnv's guards, which records the code that appends each."""

    def __init__(self, guards: Iterable[Any]) -> None:
        super().__init__(guards)
        self.places: dict[int, tuple[str | None, bool, bool]] = {}

    def append(self, guard: Any) -> None:
        self.places[id(guard)] = _place(sys._getframe(1))
        super().append(guard)


def _place(frame: FrameType | None) -> tuple[str | None, bool, bool]:
    """Return the user's line that led to ``frame``, whether the user's own Python code caused the guard, and
    whether a custom module did."""
    by_python: bool | None = None
    counts = by_module = False
    while frame is not None:
        path = frame.f_code.co_filename
        if path == EXPORT:
            break
        by_module = by_module or _is_inside(path, CUSTOM_MODULES)
        inside_library = _is_inside(path, TORCH) or _is_inside(path, PACKAGE) or _is_of_python(path)
        if by_python is None and not path.startswith(EVALUATING):
            by_python = not inside_library or path == TENSOR
        counts = counts or _counts(frame)
        if not inside_library and not path.startswith(GENERATED):
            return _line(path, frame.f_lineno), bool(by_python) or counts, by_module
        frame = frame.f_back
    return None, False, by_module


def _counts(frame: FrameType) -> bool:
    """Return whether ``frame`` calls one of ``COUNTING_OPS``, whose own code then evaluates the size."""
    if frame.f_code.co_name != "__call__":
        return False
    op = frame.f_locals.get("self")
    return isinstance(op, OpOverload) and str(op) in COUNTING_OPS


def _is_inside(path: str, root: Path) -> bool:
    return path.startswith(f"{root}/")


def _is_of_python(path: str) -> bool:
    """Return whether ``path`` is in Python's standard library, not in an installed package."""
    standard, packages = PYTHON
    return _is_inside(path, standard) and not _is_inside(path, packages)


def _line(path: str, number: int) -> str:
    return f"{Path(path).name}:{number} ({linecache.getline(path, number).strip()})"
