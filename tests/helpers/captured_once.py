"""A model that is prepared with many configurations is captured once: all of them start from copies.

What is captured depends on the model and its example inputs alone. A folder whose tests prepare equal models
again and again imports the fixture ``captured_once`` in its ``conftest.py``. Models with custom modules are
captured anew, as is what no other process could be sent: a lambda, a class inside a function.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.once import SHARED
from torchq_compat.capture.checked.attempts import Attempt, CaptureCase
from torchq_compat.pipeline import capture_model

__all__ = ["captured_once"]

LIBRARY = "torchq_compat"
ATTEMPTS: dict[bytes, Attempt] = {}


@pytest.fixture(autouse=True)
def captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    if SHARED:
        capture = capture_model.capture_checked
        monkeypatch.setattr(capture_model, "capture_checked", lambda case: _copy_of(case, capture))


def _copy_of(case: CaptureCase, capture: Callable[[CaptureCase], Attempt]) -> Attempt:
    key = _key(case)
    if key is None:
        return capture(case)
    if key not in ATTEMPTS:
        ATTEMPTS[key] = capture(case)
    found = ATTEMPTS[key]
    graph_module, trials = copy.deepcopy(found.graph_module), list(found.trials)
    return replace(found, graph_module=graph_module, trials=trials, unknown=dict(found.unknown))


def _key(case: CaptureCase) -> bytes | None:
    """Return all that the capture of ``case`` depends on, or None if that cannot be written down."""
    if case.runs.modules:
        return None
    written = io.BytesIO()
    hooks = [hook for hook in case.model._forward_hooks.values() if not hook.__module__.startswith(LIBRARY)]
    model = (type(case.model), {**vars(case.model), "_forward_hooks": hooks})
    given = (model, case.runs.model, case.args, case.dynamic_shapes, case.ones)
    try:
        _Writer(written).dump((*given, torch.get_default_dtype(), torch.is_grad_enabled()))
    except (pickle.PicklingError, AttributeError, RuntimeError, TypeError):
        return None
    return written.getvalue()


class _Writer(pickle.Pickler):
    """Writes tensors by their values: pickle would name their storages by address."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            kind = (type(value).__name__, str(value.dtype), str(value.device), value.requires_grad)
            numbers = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            return tuple, ((*kind, *value.shape, *value.stride(), numbers),)
        return NotImplemented
