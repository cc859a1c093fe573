"""Check that a model computes the same in pieces as for the whole sequence, by running both.

Every value of the graph is compared: a value with steps has to be the concatenation of its pieces; a value
without steps, say a last state, has to be the same after the last piece as after the whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from torchq_compat.capture.checked.same_results import sqnr
from torchq_compat.custom_modules.recurrent.modules.streams import Streams
from torchq_compat.errors import StreamingError
from torchq_compat.lower.streams.recurrent_calls import RecurrentCall
from torchq_compat.lower.streams.trial_calls import TrialCalls
from torchq_compat.sizes.input_sizes import Place
from torchq_compat.support.graph_nodes import module_path_of, user_line_of
from torchq_compat.support.upstream import pytree

__all__ = ["check_causality"]

#: The numbers of steps in the pieces of a trial: different lengths, the last a single step.
PIECES = (2, 3, 1)
BATCH = 5
#: SQNRs in dB that count as equal: q-dq may round differently where a float sum has another order, and
#: dynamic ranges are computed for each piece.
EQUAL, EQUAL_DYNAMIC = 30.0, 12.0


def check_causality(trial: TrialCalls, calls: Sequence[RecurrentCall], *, is_dynamic: bool) -> None:
    """Run a q-dq graph on random sequences and on their pieces, and compare all values.

    Raises:
        StreamingError: a value differs in pieces; the error names the op.
    """
    steps = calls[0].steps
    if any(call.steps != steps for call in calls):
        raise _refused("its recurrent modules run over different numbers of steps", calls[-1].node)
    sizes = {call.batch: BATCH for call in calls if call.batch is not None}
    whole = trial.inputs({**sizes, steps: sum(PIECES)})
    # A state that the caller gives also continues from piece to piece.
    kept = frozenset(call.key for call in calls)
    expected = trial.values(whole, Streams(kept))
    streams, pieces, start = Streams(kept), [], 0
    placeholders = trial.graph_module.graph.find_nodes(op="placeholder")
    for count in PIECES:
        piece = [
            _piece(value, trial.places(node), steps, start, count)
            for node, value in zip(placeholders, whole, strict=True)
        ]
        pieces.append(trial.values(piece, streams))
        start += count
    least = EQUAL_DYNAMIC if is_dynamic else EQUAL
    for node, value in expected.items():
        found = [each[node] for each in pieces]
        if not _agrees(value, found, least):
            raise _refused("it is computed from several steps, or from the number of steps", node)


def _piece(value: Any, places: Sequence[Place | None], steps: Place, start: int, count: int) -> Any:
    """Return ``count`` steps of ``value`` from step ``start`` on; an input without steps is unchanged."""
    for dimension, place in enumerate(places):
        if place == steps:
            value = value.narrow(dimension, start, count)
    return value


def _agrees(whole: Any, pieces: list[Any], least: float) -> bool:
    expected, found = pytree.tree_leaves(whole), [pytree.tree_leaves(piece) for piece in pieces]
    if any(len(each) != len(expected) for each in found):
        return False
    return all(
        not isinstance(value, Tensor) or _tensor_agrees(value, list(parts), least)
        for value, *parts in zip(expected, *found, strict=True)
    )


def _tensor_agrees(whole: Tensor, pieces: list[Tensor], least: float) -> bool:
    if any(piece.dim() != whole.dim() for piece in pieces):
        return False
    if all(piece.shape == whole.shape for piece in pieces):
        return _equal(whole, pieces[-1], least)
    axis = next(
        (d for d in range(whole.dim()) if any(piece.shape[d] != whole.shape[d] for piece in pieces)), 0
    )
    lengths = [piece.shape[axis] for piece in pieces]
    if lengths == list(PIECES) and whole.shape[axis] == sum(PIECES):
        joined = _join(pieces, axis)
        return joined is not None and _equal(whole, joined, least)
    rows, rest = divmod(lengths[-1], PIECES[-1])
    if rest or [rows * count for count in PIECES] != lengths or whole.shape[axis] != rows * sum(PIECES):
        return False
    # Steps and batch are flattened into one dimension, in either order.
    for by_step in (False, True):
        parts = (-1, rows) if by_step else (rows, -1)
        split = [
            each.reshape(*each.shape[:axis], *parts, *each.shape[axis + 1 :]) for each in (whole, *pieces)
        ]
        joined = _join(split[1:], axis if by_step else axis + 1)
        if joined is not None and _equal(split[0], joined, least):
            return True
    return False


def _join(pieces: list[Tensor], axis: int) -> Tensor | None:
    others = {math.prod(piece.shape) // max(1, piece.shape[axis]) for piece in pieces}
    if len(others) > 1:
        return None
    return torch.cat(pieces, axis)


def _equal(whole: Tensor, found: Tensor, least: float) -> bool:
    if whole.shape != found.shape:
        return False
    a, b = whole.double(), found.double()
    return torch.equal(a, b) or sqnr(a, b) >= least


def _refused(reason: str, node: Node) -> StreamingError:
    path, line = str(node.target) if node.op == "call_module" else module_path_of(node), user_line_of(node)
    where = f" in {path!r}" if path else ""
    at = f" at {line}" if line else ""
    name = path if node.op == "call_module" else str(node.target)
    return StreamingError(
        f"streaming: {name}{where}{at} gives something else in pieces than for the whole sequence: {reason}.",
        hint="a conv, pooling, attention, mean or position over time needs all steps; stream the part of the "
        "model in which every step is computed from those before it.",
    )
