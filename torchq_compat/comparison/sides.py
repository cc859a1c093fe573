"""The places of a model where both sides can be read, and taps that read them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.fx import GraphModule, Node

from torchq_compat.read.qparams import QParams
from torchq_compat.support.upstream import pytree

# The facts of both sides about a model: the places where values can be read, and their qparams.


class OpKey(NamedTuple):
    """Call number ``call`` of the module at ``path`` (``function`` is empty) or of a function in its code."""

    path: str
    function: str
    call: int


class ResultKey(NamedTuple):
    """Flat result ``position`` of the first call of the custom module at ``path``."""

    path: str
    position: int


class PartKey(NamedTuple):
    """A part of the cell at ``cell``."""

    cell: str
    part: str


Key = OpKey | ResultKey | PartKey


@dataclass(frozen=True)
class Reading:
    """The value at a place in one run, dequantized, and its qparams, None if it is float."""

    value: Tensor
    qparams: QParams | None


Run = Callable[[tuple[Any, ...]], tuple[Any, Mapping[Key, Reading]]]


@dataclass(frozen=True)
class QuantizedModel:
    """One side, ready to run.

    Attributes:
        run: calls the model and returns its result, and the readings at every place.
        output_qparams: returns the qparams of each tensor of a result; None for a float tensor.
        deployed: the model that the script would ship, for size and latency; None if it could not be made.
    """

    run: Run
    output_qparams: Callable[[Any], tuple[QParams | None, ...]]
    deployed: nn.Module | None
    deployed_error: str = ""


# Taps, which keep the values that pass a node of a graph, or that a module returns.


class Tap(nn.Module):
    """Returns its input and keeps a copy if it is a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[Tensor] = []

    def forward(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            # A later op may write in place.
            self.values.append(value.detach().clone())
        return value

    def take(self) -> list[Tensor]:
        """Return the tensors since the last call of ``take``, one for each pass."""
        values, self.values = self.values, []
        return values


def tap_nodes(graph_module: GraphModule, nodes: Iterable[Node]) -> Mapping[Node, Tap]:
    """Insert a tap after each of ``nodes`` of ``graph_module``, and return the taps. This changes
    ``graph_module``: pass a copy."""
    taps: dict[Node, Tap] = {}
    for node in dict.fromkeys(nodes):
        taps[node] = Tap()
        name = f"torchq_compat_tap_of_{node.name}"
        if hasattr(graph_module, name):
            name += "_too"
        graph_module.add_submodule(name, taps[node])
        with graph_module.graph.inserting_after(node):
            graph_module.graph.call_module(name, (node,))
    graph_module.recompile()
    return taps


def tap_module(module: nn.Module, position: int | None = None) -> Tap:
    """Return a tap that keeps the results of ``module``, or the flat result at ``position``."""
    tap = Tap()

    def keep(_: nn.Module, args: Any, result: Any) -> None:
        for leaf in [result] if position is None else pytree.tree_leaves(result)[position : position + 1]:
            tap(leaf)

    module.register_forward_hook(keep)
    return tap
