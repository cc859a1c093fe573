"""The recurrent calls of a converted graph, and which of them keep their state in a stream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from torchq_compat.custom_modules.recurrent.modules.contracts import SequenceContract
from torchq_compat.custom_modules.recurrent.modules.dynamic import DynamicRecurrent
from torchq_compat.custom_modules.recurrent.modules.recurrent_module import RecurrentModule
from torchq_compat.custom_modules.recurrent.modules.streams import CallKey
from torchq_compat.errors import StreamingError
from torchq_compat.lower.streams.trial_calls import TrialCalls
from torchq_compat.opaque_calls.insert_calls import opaque_call_nodes
from torchq_compat.sizes.input_sizes import Place
from torchq_compat.support.upstream import pytree

__all__ = ["RecurrentCall", "recurrent_calls"]

ATEN = torch.ops.aten
#: Ops that read only the sizes, dtype and device of their first argument.
OF_SHAPES = (
    ATEN.sym_size.int,
    ATEN.new_zeros.default,
    ATEN.new_ones.default,
    ATEN.new_full.default,
    ATEN.new_empty.default,
    ATEN.zeros_like.default,
    ATEN.ones_like.default,
    ATEN.full_like.default,
)


@dataclass(frozen=True)
class RecurrentCall:
    """One call of a recurrent module.

    Attributes:
        key: the name of the call in streams.
        steps: the place of its number of steps among the sizes of the inputs.
        batch: the place of its batch size; None if it is fixed, or the input is not batched.
        keeps_state: whether the model gives it no state, or the same state in every call.
    """

    node: Node
    module: RecurrentModule
    key: CallKey
    steps: Place
    batch: Place | None
    keeps_state: bool

    @property
    def is_dynamic(self) -> bool:
        return isinstance(self.module, DynamicRecurrent)


def recurrent_calls(trial: TrialCalls) -> list[RecurrentCall]:
    """Return the calls of recurrent modules in a q-dq graph.

    Raises:
        StreamingError: a call cannot run in pieces, named by its path; or no call keeps its state.
    """
    graph_module, found = trial.graph_module, []
    for node in opaque_call_nodes(graph_module):
        module, path = graph_module.get_submodule(str(node.target)), str(node.target)
        if isinstance(module, RecurrentModule):
            found.append(_read(trial, node, module, path))
    if not any(call.keeps_state for call in found):
        raise _nothing_to_keep()
    return found


def _read(trial: TrialCalls, node: Node, module: RecurrentModule, path: str) -> RecurrentCall:
    contract = module.contract
    if not isinstance(contract, SequenceContract):
        raise _refused(path, "it is a cell: the loop around it is Python's and has a fixed number of steps")
    if contract.structure.bidirectional:
        raise _refused(path, "it is bidirectional: its backward direction begins at the end of the sequence")
    index = node.kwargs["opaque_layout"]
    assert isinstance(index, int)
    layout = module.opaque_layouts[index]
    if any(layout.inputs.holds_indices()):
        raise _refused(path, "it is given a PackedSequence")
    count = layout.inputs.count()
    args, kwargs = layout.inputs.put_together(node.args[:count], node.args[count:])
    _, hidden = contract.arguments_of(path, args, kwargs)
    shape = node.meta["val"][0].shape
    is_batched = len(shape) == 3
    axis = 1 if is_batched and contract.structure.batch_first else 0
    steps = trial.place_of(node, axis)
    if steps is None:
        raise _refused(path, f"the model fixes its sequences to {shape[axis]} steps")
    batch = trial.place_of(node, 0 if contract.structure.batch_first else 1) if is_batched else None
    return RecurrentCall(
        node,
        module,
        (path, index),
        steps,
        batch,
        keeps_state=hidden is None or _is_kept(trial, path, hidden, steps),
    )


def _is_kept(trial: TrialCalls, path: str, hidden: Any, steps: Place) -> bool:
    """Return whether an initial state in the graph is the same in every call; False if it is the caller's.

    Raises:
        StreamingError: the state is computed from the sequence.
    """
    given = set(_placeholders(pytree.tree_leaves(hidden)))
    if any(steps in trial.places(each) for each in given):
        raise _refused(path, "the state it begins with is computed from the sequence")
    return not given


def _placeholders(waiting: list[Any]) -> Iterator[Node]:
    """Yield the inputs that the values in ``waiting`` are computed from."""
    seen: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if not isinstance(node, Node) or node in seen:
            continue
        seen.add(node)
        if node.op == "placeholder":
            yield node
        elif node.target not in OF_SHAPES:
            waiting.extend(node.all_input_nodes)


def _refused(path: str, reason: str) -> StreamingError:
    return StreamingError(
        f"streaming: the recurrent module at {path!r} cannot run in pieces: {reason}.",
        hint="stream a model, or the part of one, in which every step is computed from those before it.",
    )


def _nothing_to_keep() -> StreamingError:
    return StreamingError(
        "streaming: no recurrent module of this model keeps a state: there is none, or each gets its state "
        "from the caller.",
        hint="a model that takes and returns its states needs no streaming(): call it with chunks.",
    )
