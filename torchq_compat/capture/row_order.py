"""Checks that ops on the rows of a PackedSequence compute each row by itself.

A PackedSequence stores the rows of all sequences one behind the other. An op that mixes rows, such as a mean
over them, computes across steps and sequences, and has no meaning in a program of padded sequences. Such ops
are found by running each op on a part of the rows.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torchq_compat.capture.opaque_stub import OPAQUE_OP
from torchq_compat.capture.packed_sequences import PACK, PAD
from torchq_compat.capture.trial_runs import GraphRunner, Runs
from torchq_compat.errors import CaptureError
from torchq_compat.ops import draws
from torchq_compat.support.graph_nodes import module_path_of, user_line_of
from torchq_compat.support.upstream import OpOverload, pytree

#: Tolerances for results of fewer rows, whose sums may be computed in another order.
TOLERANCE = {"rtol": 1e-3, "atol": 1e-4}


def check_row_order(graph_module: GraphModule, runs: Runs, args: tuple[Any, ...]) -> None:
    """Run a captured graph on ``args``, and every op on packed rows once more on each half of them.

    Raises:
        CaptureError: the results of an op differ.
    """
    runs.of_graph(graph_module, args, runner=_RowOrderRunner)


class _RowOrderRunner(GraphRunner):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.extra_traceback = False
        self._counts = set(self._symbols()) - {None}

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if self._is_to_try(n):
            rows = [producer for producer in n.all_input_nodes if _leading(producer) in self._counts]
            if rows and not self._is_by_rows(n, rows[0], result):
                path, line = module_path_of(n), user_line_of(n)
                where = f" in {path!r}" if path else ""
                at = f" at {line}" if line else ""
                raise CaptureError.of("TQ920.mixes_rows", node=n, where=where, at=at)
        return result

    def _symbols(self) -> Iterator[Any]:
        """Yield the graph's symbol of the number of rows of every packed sequence."""
        for node in self.graph.nodes:
            if node.target is PACK:
                yield from (_leading(user) for user in node.users if user.args[1] == 0)
            elif self._takes_packed(node):
                indices = self._layout(node).inputs.holds_indices()
                yield _leading(node.args[0][indices.index(True) - 1])

    def _layout(self, node: Node) -> Any:
        _, _, handle, index = node.args
        return self.stubs.layouts(str(handle))[index]  # type: ignore[index]

    def _takes_packed(self, node: Node) -> bool:
        return node.target is OPAQUE_OP and any(self._layout(node).inputs.holds_indices())

    def _is_to_try(self, node: Node) -> bool:
        target = node.target
        if not isinstance(target, OpOverload) or target in (PACK, PAD, torch.ops.aten.sym_size.int):
            return False
        return not draws(node) and not self._takes_packed(node)

    def _is_by_rows(self, node: Node, rows: Node, result: Any) -> bool:
        count = self.env[rows].shape[0]
        half = count // 2
        for part in (slice(0, half), slice(half, count)) if count > 1 else ():
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), partial(self._part, rows, part))
            try:
                match = self.call_function(node.target, args, kwargs)
            except (RuntimeError, IndexError):
                return False
            if not _are_rows(result, match, part, count):
                return False
        return True

    def _part(self, rows: Node, part: slice, node: Node) -> Any:
        """Return the value of ``node`` restricted to the rows in ``part``."""
        value, symbol = self.env[node], _leading(rows)
        if isinstance(value, Tensor):
            return value[part] if _leading(node) == symbol else value
        size = node.meta.get("val")
        if isinstance(size, torch.SymInt) and symbol in size.node.expr.free_symbols:
            return int(size.node.expr.subs(symbol, part.stop - part.start))
        return value


def _leading(node: Any) -> Any:
    """Return the symbol of the first size of the value of ``node``; None if the size is no symbol."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    if not isinstance(value, Tensor) or value.dim() == 0 or not isinstance(value.shape[0], torch.SymInt):
        return None
    return value.shape[0].node.expr


def _are_rows(whole: Any, value: Any, part: slice, count: int) -> bool:
    """Return whether ``value`` equals the rows ``part`` of ``whole``, which has ``count`` rows."""
    pairs = list(zip(pytree.tree_leaves(whole), pytree.tree_leaves(value), strict=True))
    for item, other in pairs:
        if not isinstance(item, Tensor):
            continue
        if item.dim() == 0 or item.shape[0] != count or other.shape != item[part].shape:
            return False
        if not torch.allclose(item[part].double(), other.double(), **TOLERANCE, equal_nan=True):
            return False
    return True
