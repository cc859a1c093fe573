"""The package's modules as syntax trees, parsed once for all tests that read them; no test changes them."""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping
from pathlib import Path

import torchq_compat

__all__ = ["PACKAGE", "package_trees"]

PACKAGE = Path(torchq_compat.__file__).parent


@functools.cache
def package_trees() -> Mapping[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
