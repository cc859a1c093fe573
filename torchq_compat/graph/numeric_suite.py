"""Refuse torch.ao's Numeric Suite, which would silently find nothing in a model of this package.

The suite looks for torch.ao's modules, or for their names in a state_dict. So the models, and the states they
return, check the calling frame, as ``other_engines`` does.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torchq_compat.errors import FxError

__all__ = ["StateOfCaptured", "refuse_numeric_suite", "suite_error"]

SUITE = "torch.ao.ns."
#: Frames between the suite and our methods: children() calls named_children(), modules() calls
#: named_modules(), and our methods call those of the base class. After torch.compile was used, torch._dynamo
#: wraps ``Tracer.trace``.
BETWEEN = ("torch.nn.modules.module", "torchq_compat.", "torch._dynamo.")


class StateOfCaptured(OrderedDict[str, Any]):
    """The state_dict of a captured model; it is pickled as a plain OrderedDict."""

    def __iter__(self) -> Iterator[str]:
        refuse_numeric_suite(sys._getframe(1))
        return super().__iter__()

    def __copy__(self) -> StateOfCaptured:
        copied = StateOfCaptured(self.items())
        vars(copied).update(vars(self))
        return copied

    def __reduce__(self) -> Any:
        reduced: tuple[Any, ...] = tuple(super().__reduce__())
        return (OrderedDict, *reduced[1:])


def refuse_numeric_suite(frame: FrameType | None) -> None:
    """Raise if the Numeric Suite reads the modules of a model, or the keys of a state, from ``frame``.

    Raises:
        FxError: the suite is the caller.
    """
    while frame is not None and _module_of(frame).startswith(BETWEEN):
        frame = frame.f_back
    called = ""
    while frame is not None and _module_of(frame).startswith(SUITE):
        called, frame = frame.f_code.co_name, frame.f_back
    if called:
        raise suite_error(called)


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def suite_error(function: str) -> FxError:
    """Return the error for a ``function`` of the suite that was given a model of this package."""
    return FxError(
        f"{function} of the Numeric Suite finds nothing in a model of torchq_compat: its graph has no "
        "modules of torch.ao.",
        hint="torchq_compat.compare measures every place against the float model, and torchq_compat.suggest "
        "returns the mapping that leaves the worst places float.",
    )
