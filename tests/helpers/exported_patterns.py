"""The patterns that Quantizers and torchao's training look for, exported once and without Dynamo.

They export each of them anew at every call, with Dynamo: a third of a second each, two dozen in a call.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch.export import export
from torch.fx import GraphModule

__all__ = ["exporting_once"]


def exporting_once(exported: Callable[..., GraphModule]) -> Callable[..., GraphModule]:
    """Return ``exported``, torchao's ``_get_aten_graph_module_for_pattern``, with a memory."""
    patterns = dict[Any, GraphModule]()

    def exported_once(pattern: Any, inputs: Any, is_cuda: bool = False, **kwargs: Any) -> GraphModule:
        closure = (cell.cell_contents for cell in pattern.fn.__closure__ or ())
        shapes = (value.shape for value in (*inputs, *kwargs.values()))
        key = pattern.fn.__code__, *closure, is_cuda, *shapes
        if key not in patterns:
            with mock.patch.object(torch.export, "export", lambda *args, strict: export(*args)):
                patterns[key] = exported(pattern, inputs, is_cuda, **kwargs)
        return copy.deepcopy(patterns[key])

    return exported_once
