"""Names that are found without an import above: what modules of a package declare, and where others live."""

import importlib
import pkgutil
from types import ModuleType
from typing import TypeVar

Declaration = TypeVar("Declaration")
#: Name -> the dotted name of the module to import it from when it is first needed; the top fills this in.
HOMES: dict[str, str] = {}


def declared(package: ModuleType, kind: type[Declaration]) -> tuple[Declaration, ...]:
    """Import the modules of ``package`` and collect their module-level values of ``kind``.

    Args:
        package: a package, which may still be in the middle of its import.
        kind: the class of the values to collect.

    Returns:
        The values, in the order of the module names; a module may declare none.
    """
    names = sorted(iter_module.name for iter_module in pkgutil.iter_modules(package.__path__))
    modules = [importlib.import_module(f"{package.__name__}.{name}") for name in names]
    return tuple(value for module in modules for value in vars(module).values() if isinstance(value, kind))
