"""Calls of a q-dq graph on random inputs, at chosen sizes: what a stream needs to know is found by trying."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from torchq_compat.custom_modules.recurrent.modules.streams import Streams
from torchq_compat.errors import StreamingError
from torchq_compat.sizes.input_sizes import Dimension, InputSizes, Place
from torchq_compat.support.graph_nodes import attribute_at

__all__ = ["TrialCalls"]

EMBEDDINGS = (torch.ops.aten.embedding.default, torch.ops.aten.embedding_bag.padding_idx)


@dataclass(frozen=True)
class TrialCalls:
    """Calls of ``graph_module``, whose inputs have ``sizes``."""

    graph_module: GraphModule
    sizes: InputSizes

    @cached_property
    def _dimensions(self) -> dict[Node, list[Dimension]]:
        """The dimensions of each input that is a tensor with dimensions."""
        labels = dict.fromkeys(dimension.label for dimension in self.sizes.dimensions)
        placeholders = self.graph_module.graph.find_nodes(op="placeholder")
        tensors = [node for node in placeholders if _rank(node)]
        return {
            node: [dimension for dimension in self.sizes.dimensions if dimension.label == label]
            for node, label in zip(tensors, labels, strict=True)
        }

    def places(self, placeholder: Node) -> list[Place | None]:
        """Return, for each dimension of an input, the place of the size that it has; None if it is fixed."""
        found = self._dimensions.get(placeholder, [])
        return [None if each.is_fixed else each.root or each.place for each in found]

    def inputs(self, sizes: Mapping[Place, int]) -> list[Any]:
        """Return random inputs with ``sizes``, and the sizes of the example where it names none."""
        generator = torch.Generator().manual_seed(0)
        placeholders = self.graph_module.graph.find_nodes(op="placeholder")
        return [self._random(node, sizes, generator) for node in placeholders]

    def _random(self, node: Node, sizes: Mapping[Place, int], generator: torch.Generator) -> Any:
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            return value
        dimensions = self._dimensions.get(node, [])
        shape = [sizes.get(each.root or each.place, each.example) for each in dimensions]
        if value.dtype is torch.bool:
            return torch.rand(shape, generator=generator) < 0.5
        if not value.dtype.is_floating_point:
            return torch.randint(0, self._tokens, shape, generator=generator).to(value.dtype)
        return torch.randn(shape, generator=generator).to(value.dtype)

    @cached_property
    def _tokens(self) -> int:
        """The number of tokens that every embedding table of the graph has."""
        counts = [2]
        for node in self.graph_module.graph.nodes:
            if node.target in EMBEDDINGS:
                table = node.args[0]
                while isinstance(table, Node) and table.op == "call_function":
                    table = table.args[0]
                if isinstance(table, Node) and table.op == "get_attr":
                    counts.append(len(attribute_at(self.graph_module, str(table.target))))
        return max(2, min(counts[1:], default=2))

    def values(self, inputs: list[Any], streams: Streams | None = None) -> dict[Node, Any]:
        """Return the value of every node that is no input.

        Raises:
            StreamingError: the graph does not run on ``inputs``.
        """
        recorder = Interpreter(self.graph_module, garbage_collect_values=False)
        recorder.extra_traceback = False
        with torch.no_grad(), (Streams(frozenset()) if streams is None else streams).active():
            try:
                recorder.run(*inputs, enable_io_processing=False)
            except StreamingError:
                raise
            except Exception as cause:
                raise _does_not_run(cause) from cause
        return {node: v for node, v in recorder.env.items() if node.op not in ("placeholder", "get_attr")}

    @cached_property
    def shapes(self) -> dict[Place | None, dict[Node, Any]]:
        """Place of a free size -> the values of the graph with that size larger by one; None -> at the sizes
        of the example. A size that cannot change alone has no values."""
        found: dict[Place | None, dict[Node, Any]] = {None: self.values(self.inputs({}))}
        for each in self.sizes.free:
            try:
                found[each.place] = self.values(self.inputs({each.place: each.example + 1}))
            except StreamingError:
                continue
        return found

    def place_of(self, call: Node, dim: int) -> Place | None:
        """Return the place of the size that dimension ``dim`` of the first result of ``call`` has; None if it
        is fixed."""
        before = self.shapes[None][call][0].shape[dim]
        changed = (place for place, values in self.shapes.items() if values[call][0].shape[dim] == before + 1)
        return next(changed, None)


def _rank(node: Node) -> int:
    value = node.meta.get("val")
    return value.dim() if isinstance(value, Tensor) else 0


def _does_not_run(cause: Exception) -> StreamingError:
    first_line = (str(cause).strip().splitlines() or [""])[0]
    return StreamingError(
        f"streaming: the model does not run on pieces of a few steps: {type(cause).__name__}: {first_line}",
        hint="a conv or pooling over time needs more steps than one; stream the part of the model in which "
        "every step is computed from those before it.",
    )
