"""The ancestry of each class is short enough to read: at most five classes of this package."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import torchq_compat

MOST = 5


def our_classes() -> list[type]:
    """Return all classes that modules of the package define."""
    found: set[type] = set()
    for module in pkgutil.walk_packages(torchq_compat.__path__, "torchq_compat."):
        if module.name != "torchq_compat.__main__":
            members = vars(importlib.import_module(module.name)).values()
            found.update(member for member in members if inspect.isclass(member) and is_ours(member))
    return sorted(found, key=lambda each: (each.__module__, each.__qualname__))


def is_ours(cls: type) -> bool:
    return cls.__module__.split(".")[0] == "torchq_compat"


def test_a_class_inherits_from_few_of_ours() -> None:
    classes = our_classes()
    assert len(classes) > 200
    inherited = {cls.__name__: [base.__name__ for base in cls.__mro__ if is_ours(base)] for cls in classes}
    assert {name: ours for name, ours in inherited.items() if len(ours) > MOST} == {}
