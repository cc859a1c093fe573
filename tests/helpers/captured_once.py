"""One capture of a model for all the mappings that tests prepare it with: half of what preparing costs."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from tests.helpers.once import SHARED
from torchq_compat.quantize import prepare
from torchq_compat.quantize.capture_model import CapturedModel
from torchq_compat.quantize.passes import PREPARE, carries_out

__all__ = ["captured_once"]

#: What the pass ``capture`` gave, before other passes changed it.
_GIVEN: dict[Hashable, dict[str, Any]] = {}
_capture = prepare._capture


@contextmanager
def captured_once(key: Hashable) -> Iterator[None]:
    """Let the one model that is prepared inside be captured once for all equal ``key``.

    Everything that a capture depends on is in the key, as the model with its weights, the example inputs and
    whether it is trained. A model with custom modules is captured anew: which these are, the mapping decides.
    """

    def give(state: prepare._Preparing) -> None:
        if state.swaps or not SHARED:
            _capture(state)
            return
        if key not in _GIVEN:
            _capture(state)
            names = ("in_evaluation", "tried", "captured")
            _GIVEN[key] = {name: getattr(state, name) for name in names}
        else:
            vars(state).update(_GIVEN[key])
        state.captured = _copied(_GIVEN[key]["captured"])

    carries_out(PREPARE, "capture")(give)
    try:
        yield
    finally:
        carries_out(PREPARE, "capture")(_capture)


def _copied(captured: CapturedModel) -> CapturedModel:
    graph_module = captured.attempt.graph_module
    copied = copy.deepcopy(graph_module)
    copied._in_spec, copied._out_spec = graph_module._in_spec, graph_module._out_spec
    return replace(captured, attempt=replace(captured.attempt, graph_module=copied))
