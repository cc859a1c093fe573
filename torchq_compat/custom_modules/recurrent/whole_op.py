"""Writes a float recurrent module as the operator torch.export captures for it, such as ``aten.lstm.input``.

torch.export fixes the sequence length when it captures this operator. So the module is captured as an opaque
call, and the operator, which accepts any length, is written afterwards.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from torchq_compat.capture.source_functions import SOURCE_FUNCTIONS
from torchq_compat.custom_modules.recurrent.modules.contract import (
    RecurrentStructure,
    bound_arguments,
)
from torchq_compat.custom_modules.registry import WriteOps

__all__ = ["operator_of", "whole_op_writer"]

ATEN = torch.ops.aten


def operator_of(module: nn.RNNBase) -> Any:
    """Return the aten operator that ``module`` calls."""
    return getattr(ATEN, module.mode.lower()).input


def whole_op_writer(module: nn.Module, float_class: type[nn.Module]) -> WriteOps | None:
    """Return a function that writes the operator of ``module``, a ``float_class``; None if ``module`` does
    more than call the operator with its parameters."""
    if not isinstance(module, nn.RNNBase) or type(module).forward is not float_class.forward:
        return None
    if "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks:
        return None
    owned = dict(module.named_parameters(recurse=False))
    if any(name not in owned for name in module._flat_weights_names):
        return None  # A parametrization computes a parameter.
    recurrent = module

    def write(
        graph_module: GraphModule, call: Node, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Node] | None:
        x, state = bound_arguments(path, args, kwargs)
        if not isinstance(x, Node) or "val" not in x.meta:
            return None  # A PackedSequence.
        return _Writer(graph_module, call, path, recurrent, float_class).write(x, state)

    return write


class _Writer:
    """Writes the nodes of one call of ``module``, whose path is ``path``, before the node ``call``."""

    def __init__(
        self,
        graph_module: GraphModule,
        call: Node,
        path: str,
        module: nn.RNNBase,
        float_class: type[nn.Module],
    ) -> None:
        self.graph = graph_module.graph
        self.call_node = call
        self.path = path
        self.module = module
        self.float_class = float_class
        self.structure = RecurrentStructure.of(module)

    def write(self, x: Node, state: Any) -> list[Node]:
        """Return nodes for the output and the last states, as the module returns them."""
        structure, module = self.structure, self.module
        results = list(self.call_node.meta["val"])
        is_batched, batch = x.meta["val"].dim() == 3, self._batch_axis()
        given = [] if state is None else list(state) if isinstance(state, (tuple, list)) else [state]
        if not is_batched:
            # torch.nn computes one sequence as a batch of one.
            x = self._op(ATEN.unsqueeze.default, x, batch)
            given = [self._op(ATEN.unsqueeze.default, each, 1) for each in given]
            results = [results[0].unsqueeze(batch), *(value.unsqueeze(1) for value in results[1:])]
        states = given or self._zeros(x)
        parameters = [self._parameter(name) for name in module._flat_weights_names]
        called = self._write(
            operator_of(module),
            (
                x,
                states if len(structure.state_widths) > 1 else states[0],
                parameters,
                module.bias,
                module.num_layers,
                float(module.dropout),
                module.training,
                module.bidirectional,
                module.batch_first,
            ),
            tuple(results),
        )
        nodes = []
        for index, value in enumerate(results):
            node = self._getitem(called, index, value)
            if not is_batched:
                node = self._op(ATEN.squeeze.dim, node, batch if index == 0 else 1)
            nodes.append(node)
        return nodes

    def _zeros(self, x: Node) -> list[Node]:
        """Return zeros for the states of a call that passes none, in the dtype and on the device of ``x``."""
        axis = self._batch_axis()
        batch = self._write(ATEN.sym_size.int, (x, axis), x.meta["val"].shape[axis])
        rows = self.structure.state_rows
        return [
            self._op(ATEN.new_zeros.default, x, [rows, batch, width]) for width in self.structure.state_widths
        ]

    def _batch_axis(self) -> int:
        return 0 if self.structure.batch_first else 1

    def _parameter(self, name: str) -> Node:
        with self.graph.inserting_before(self.call_node):
            node = self.graph.get_attr(f"{self.path}.{name}")
        value = getattr(self.module, name)
        node.meta["val"] = self._fake_mode().from_tensor(value.detach(), static_shapes=True)
        return node

    def _getitem(self, source: Node, index: int, value: Any) -> Node:
        return self._write(operator.getitem, (source, index), value)

    def _op(self, target: Any, *args: Any) -> Node:
        with self._fake_mode(), torch.no_grad():
            value = target(*torch.fx.node.map_arg(args, lambda node: node.meta["val"]))
        return self._write(target, args, value)

    def _write(self, target: Any, args: tuple[Any, ...], value: Any) -> Node:
        with self.graph.inserting_before(self.call_node):
            node = self.graph.call_function(target, args)
        node.meta = {**self.call_node.meta, "val": value}
        name = self.module.mode.lower()
        node.meta["torch_fn"] = (f"{name}_1", f"builtin_function_or_method.{name}")
        node.meta[SOURCE_FUNCTIONS] = [(self.call_node.name, self.float_class)]
        return node

    def _fake_mode(self) -> Any:
        return self.call_node.meta["val"][0].fake_mode
