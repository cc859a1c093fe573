"""The Numeric Suite, given one of our models or its state: it finds nothing there, and says nothing.

It looks for torch.ao's modules, or for their names in a state_dict. So the models, and the states they give
out, look at who asks, as ``other_engines`` does.
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
#: children() asks named_children(), modules() named_modules(), and our own of a class that of its parent.
#: Where torch.compile was in use, torch._dynamo stands around ``Tracer.trace``.
BETWEEN = ("torch.nn.modules.module", "torchq_compat.", "torch._dynamo.")


class StateOfCaptured(OrderedDict[str, Any]):
    """The state_dict of a captured model. It is pickled as the plain one it stands for."""

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
    """Raise if ``frame``, which asks a model for its modules or a state for its keys, is the suite's.

    Raises:
        FxError: it is.
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
    """The error of a function of the suite that was given a model of ours."""
    return FxError(
        f"{function} of the Numeric Suite finds nothing in a model of torchq_compat: its graph has no "
        "modules of torch.ao.",
        hint="torchq_compat.compare measures every place against the float model, and torchq_compat.suggest "
        "returns the mapping that leaves the worst places float.",
    )
