"""Observers that a script replaced or removed between prepare and convert.

Scripts and toolkits set ``prepared.activation_post_process_0`` to another observer of torch.ao, or erase the
node. torchao's convert knows its own classes only, and would leave the value float without a word.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn
from torch.fx import GraphModule, Node

from torchq_compat.annotate.op_records import op_record
from torchq_compat.qspecs.observers import adapted, is_of_torch_ao
from torchq_compat.support.upstream import is_activation_post_process

__all__ = ["ObservedPlace", "adopt_observers", "observed_op", "observed_places"]


class ObservedPlace(NamedTuple):
    """A place that prepare observes.

    Attributes:
        target: the path of the observer.
        op: the path of the op in its decision; empty if the value belongs to none.
        is_weight: whether it observes a weight of the model.
    """

    target: str
    op: str
    is_weight: bool


def observed_op(observer_node: Node) -> str:
    """Return the label of the op whose result, else whose input or weight, ``observer_node`` observes."""
    for node in (observer_node.args[0], *observer_node.users):
        record = op_record(node) if isinstance(node, Node) else None
        if record is not None:
            return record.label
    return ""


def observed_places(prepared: GraphModule) -> Iterator[ObservedPlace]:
    """Yield the places that ``prepared`` observes, in graph order."""
    for node, module in _called(prepared):
        if is_activation_post_process(module):
            source = node.args[0]
            is_weight = isinstance(source, Node) and source.op == "get_attr"
            yield ObservedPlace(str(node.target), observed_op(node), is_weight)


def adopt_observers(prepared: GraphModule) -> tuple[str, ...]:
    """Adapt the observers of torch.ao in ``prepared``, which is changed, to torchao's convert; they keep what
    they have observed. Return their paths."""
    adopted: dict[int, nn.Module] = {}
    for node, module in _called(prepared):
        if is_of_torch_ao(module):
            # A shared observer is one module under several names.
            prepared.set_submodule(str(node.target), adopted.setdefault(id(module), adapted(module)))
    return tuple(
        dict.fromkeys(str(node.target) for node, module in _called(prepared) if module in adopted.values())
    )


def _called(prepared: GraphModule) -> list[tuple[Node, nn.Module]]:
    return [
        (node, prepared.get_submodule(str(node.target)))
        for node in prepared.graph.nodes
        if node.op == "call_module"
    ]
