"""Puts the opaque op in the places of the ``call_module`` nodes while a user's Quantizer works on a graph.

Quantizers run passes of exported programs, which know operators only and trace the graph anew. So every call
is the opaque op for that long, of flat tensors and sizes; what a pass made of it is a call again afterwards.
The check of input shapes that torch.export puts into a module is left out and put back.
"""

import operator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from torchq_compat.capture.opaque_stub import OPAQUE_OP, standing_in

#: A lookup in the nested result of a call: ``getitem`` or ``getattr``, and the key.
Lookup = tuple[Any, Any]


@dataclass(frozen=True)
class _Call:
    """One hidden call.

    Attributes:
        args: the arguments, made of ``leaves``, which the operator has as tensors, then sizes.
        results: the example value of each result that is read, and the lookups that lead to it.
        value: the example value of the call itself, if it has one.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: tuple[Node, ...]
    results: tuple[tuple[Tensor, tuple[Lookup, ...]], ...]
    value: Any


class HiddenCalls:
    """The calls of modules in one graph, hidden from a Quantizer by hiding them in ``model``."""

    def __init__(self, model: GraphModule) -> None:
        self._calls: list[_Call] = []
        self._modules: dict[str, nn.Module] = {}
        self._checks: list[str] = []
        for node in list(model.graph.nodes):
            if node.op == "call_module":
                self._hide(model, node)
        if self._modules:
            model.recompile()

    def active(self) -> AbstractContextManager[None]:
        """Let the operators of the hidden calls run on fake tensors while the context is active."""
        return standing_in(self)

    def fake_results(self, tensors: list[Tensor], sizes: list[int], handle: str, layout: int) -> list[Tensor]:
        """Return empty tensors like the results of the hidden call ``layout`` in the example."""
        return [
            torch.empty(value.shape, dtype=value.dtype, device=value.device)
            for value, _ in self._calls[layout].results
        ]

    def show(self, model: GraphModule) -> None:
        """Put the calls back into ``model``, the graph that was given or what a pass made of it."""
        for node in list(model.graph.nodes):
            if node.target is OPAQUE_OP:
                self._show(model, node)
        if self._calls:
            model.graph.lint()
            model.recompile()

    def show_checks(self, prepared: GraphModule) -> None:
        """Put the checks of input shapes into ``prepared``, before all observers."""
        inputs = prepared.graph.find_nodes(op="placeholder")
        for path in self._checks:
            prepared.add_submodule(path, self._modules[path])
            with prepared.graph.inserting_after(inputs[-1]):
                prepared.graph.call_module(path, tuple(inputs))
            prepared.recompile()

    def _hide(self, model: GraphModule, call: Node) -> None:
        path = str(call.target)
        if not call.users and call.args == tuple(model.graph.find_nodes(op="placeholder")):
            self._checks.append(path)
            self._modules[path] = model.get_submodule(path)
            model.graph.erase_node(call)
            return
        ends = _ends(call)
        values = {leaf: leaf.meta.get("val") for leaf in call.all_input_nodes}
        tensors = [leaf for leaf, value in values.items() if isinstance(value, Tensor)]
        sizes = [leaf for leaf, value in values.items() if isinstance(value, (int, torch.SymInt))]
        if len(tensors) + len(sizes) < len(values) or ends is None:
            return  # A PackedSequence, or a result that is no tensor.
        self._modules[path] = model.get_submodule(path)
        results = tuple((end.meta["val"], lookups) for end, lookups in ends.items())
        value = call.meta.get("val")
        self._calls.append(_Call(call.args, dict(call.kwargs), (*tensors, *sizes), results, value))
        stand_in, layout = call, len(self._calls) - 1
        if results and not results[0][1]:
            with model.graph.inserting_before(call):
                stand_in = model.graph.call_function(OPAQUE_OP)
            stand_in.meta = dict(call.meta)
        _write(stand_in, "call_function", OPAQUE_OP, (tensors, sizes, path, layout), {})
        stand_in.meta["val"] = [value for value, _ in results]
        for index, end in enumerate(ends):
            before = end.args[0]
            _write(end, "call_function", operator.getitem, (stand_in, index), {})
            while isinstance(before, Node) and before is not call and not before.users:
                unused = before
                before = unused.args[0]
                model.graph.erase_node(unused)

    def _show(self, model: GraphModule, stand_in: Node) -> None:
        tensors, sizes, path, layout = stand_in.args
        assert isinstance(path, str)
        assert isinstance(layout, int)
        call = self._calls[layout]
        given = dict(zip(call.leaves, (*tensors, *sizes), strict=True))  # type: ignore[misc]
        args = map_arg(call.args, given.__getitem__)
        kwargs = map_arg(call.kwargs, given.__getitem__)
        if path not in dict(model.named_modules()):
            model.add_submodule(path, self._modules[path])
        ends = {int(user.args[1]): user for user in stand_in.users}  # type: ignore[arg-type]
        if ends and not call.results[0][1]:
            _write(ends[0], "call_module", path, args, kwargs)
            model.graph.erase_node(stand_in)
            return
        _write(stand_in, "call_module", path, args, kwargs)
        del stand_in.meta["val"]
        if call.value is not None:
            stand_in.meta["val"] = call.value
        for index, end in ends.items():
            source = stand_in
            *inner, (lookup, key) = call.results[index][1]
            with model.graph.inserting_before(end):
                for target, name in inner:
                    source = model.graph.call_function(target, (source, name))
            _write(end, "call_function", lookup, (source, key), {})


def _write(node: Node, op: str, target: Any, args: Any, kwargs: Any) -> None:
    """Make ``node`` another one, so that annotations that refer to it stay right."""
    node.op, node.target = op, target
    node.args, node.kwargs = args, kwargs


def _ends(node: Node, lookups: tuple[Lookup, ...] = ()) -> dict[Node, tuple[Lookup, ...]] | None:
    """Return the tensors in the result of ``node`` with the lookups to them; None if it has anything else."""
    if isinstance(node.meta.get("val"), Tensor):
        return {node: lookups}
    ends: dict[Node, tuple[Lookup, ...]] = {}
    for user in node.users:
        known = user.target in (operator.getitem, getattr)
        inner = _ends(user, (*lookups, (user.target, user.args[1]))) if known else None
        if inner is None:
            return None
        ends.update(inner)
    return ends
