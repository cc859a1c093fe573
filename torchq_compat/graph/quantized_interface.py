"""The quantized interface of a graph: the inputs it accepts and the outputs it returns as integers.

Legacy: ``PrepareCustomConfig.set_input_quantized_indexes`` and ``set_output_quantized_indexes``. FX's graph
then accepts and returns torch.ao's quantized tensors, which have qparams. Integers have none: the qparams of
an input come from calibration, and the converted model returns those of both from ``input_qparams`` and
``output_qparams``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from torchq_compat.errors import ConfigError, InputError
from torchq_compat.opaque_calls.quantized_boundary import qparams_of_integers
from torchq_compat.qspecs.qdq import DEQUANTIZE, DEQUANTIZES, QUANTIZE
from torchq_compat.qspecs.qparams import PerTensorQParams, QParams
from torchq_compat.support.quantized_tensors import as_float, is_quantized
from torchq_compat.support.upstream import pytree
from torchq_compat.support.user_warnings import warn_user

__all__ = [
    "QuantizedInterface",
    "expose_integers",
    "input_qparams",
    "output_qparams",
    "quantize_inputs",
    "take_integers",
]


@dataclass(frozen=True)
class QuantizedInterface:
    """The flat positions of the inputs and outputs that are integers."""

    inputs: frozenset[int] = frozenset()
    outputs: frozenset[int] = frozenset()

    @classmethod
    def read(
        cls,
        input_indexes: Iterable[int],
        output_indexes: Iterable[int],
        example_inputs: tuple[Any, ...],
        graph_module: GraphModule,
        *,
        whole_result: bool,
    ) -> QuantizedInterface:
        """Make the interface from the indexes of arguments and results of the float model.

        Indexes that the model does not have are ignored with a warning.

        Args:
            example_inputs: the example arguments; a nested argument has one index.
            graph_module: the captured model, for the structure of the result.
            whole_result: whether the model returns the result of a custom module unchanged; for FX this is
                one output, with index 0, even if it is nested.

        Raises:
            ConfigError: an index is not an integer.
        """
        arguments = [len(pytree.tree_leaves(argument)) for argument in example_inputs]
        spec = graph_module._out_spec
        assert isinstance(spec, pytree.TreeSpec)
        output_indexes = tuple(output_indexes)
        single = spec.type not in (tuple, list) or (whole_result and set(output_indexes) <= {0})
        results = [spec.num_leaves] if single else [child.num_leaves for child in spec.children()]
        return cls(
            _flat("input_quantized_indexes", input_indexes, arguments),
            _flat("output_quantized_indexes", output_indexes, results),
        )

    def input_nodes(self, graph_module: GraphModule) -> list[Node]:
        placeholders = graph_module.graph.find_nodes(op="placeholder")
        return [placeholders[index] for index in sorted(self.inputs)]

    def output_edges(self, graph_module: GraphModule) -> list[tuple[Node, Node]]:
        """Return (returned node, output node) for every output that is integers."""
        output = graph_module.graph.output_node()
        returned = _returned(graph_module)
        nodes = [returned[index] for index in sorted(self.outputs)]
        return [(node, output) for node in nodes if isinstance(node, Node)]


def expose_integers(converted: GraphModule, interface: QuantizedInterface) -> None:
    """Let a converted graph accept and return the integers inside its first and last q-dq pairs."""
    for placeholder in interface.input_nodes(converted):
        _take_integers(placeholder)
    returned = _returned(converted)
    for index in interface.outputs:
        node = returned[index]
        if isinstance(node, Node) and node.target in DEQUANTIZES:
            returned[index] = node.args[0]
    converted.graph.output_node().args = (tuple(returned),)
    converted.graph.eliminate_dead_code()
    converted.recompile()


def input_qparams(converted: GraphModule, interface: QuantizedInterface) -> tuple[QParams | None, ...]:
    """Return, for each flat input, the qparams of its integers; None if the input is not quantized."""
    placeholders = converted.graph.find_nodes(op="placeholder")
    return tuple(
        _qparams_behind(node) if index in interface.inputs else None
        for index, node in enumerate(placeholders)
    )


def output_qparams(converted: GraphModule, interface: QuantizedInterface) -> tuple[QParams | None, ...]:
    """Return, for each flat output, the qparams of its integers; None if the output is not quantized."""
    return tuple(
        qparams_of_integers(node) if index in interface.outputs and isinstance(node, Node) else None
        for index, node in enumerate(_returned(converted))
    )


def take_integers(args: tuple[Any, ...], all_qparams: tuple[QParams | None, ...]) -> tuple[Any, ...]:
    """Return ``args`` with torch.ao's quantized tensors replaced by the integers that the graph accepts.

    Raises:
        InputError: a value is neither a quantized tensor nor a tensor of the integer dtype.
    """
    leaves, spec = pytree.tree_flatten(args)
    taken = [
        leaf if qparams is None else _integers(index, leaf, qparams)
        for index, (leaf, qparams) in enumerate(zip(leaves, all_qparams, strict=True))
    ]
    result: tuple[Any, ...] = pytree.tree_unflatten(taken, spec)
    return result


def quantize_inputs(args: tuple[Any, ...], all_qparams: tuple[QParams | None, ...]) -> tuple[Any, ...]:
    """Return ``args`` with the float tensors of quantized inputs replaced by the integers of the graph."""
    leaves, spec = pytree.tree_flatten(args)
    taken = [leaf if g is None else g.quantize(leaf) for leaf, g in zip(leaves, all_qparams, strict=True)]
    result: tuple[Any, ...] = pytree.tree_unflatten(taken, spec)
    return result


def _flat(setting: str, indexes: Iterable[int], sizes: list[int]) -> frozenset[int]:
    found: set[int] = set()
    for index in indexes:
        if isinstance(index, int) and not 0 <= index < len(sizes):
            # FX ignores such an index too, without a warning.
            warn_user(f"{setting} has {index}, and the model has {len(sizes)}: it is not used.")
            continue
        if not isinstance(index, int):
            raise _no_such_index(setting, index, len(sizes))
        first = sum(sizes[:index])
        found.update(range(first, first + sizes[index]))
    return frozenset(found)


def _returned(graph_module: GraphModule) -> list[Any]:
    returned = graph_module.graph.output_node().args[0]
    assert isinstance(returned, (tuple, list))
    return list(returned)


def _take_integers(placeholder: Node) -> None:
    """Let ``placeholder`` hold the result of the quantize that reads it.

    A dequantize is put after the placeholder. Nodes that read the integers keep their quantize, which after a
    dequantize with the same qparams changes nothing.
    """
    quantize = next((user for user in placeholder.users if user.target is QUANTIZE), None)
    if quantize is None:
        return
    graph, qparams = placeholder.graph, quantize.args[1:]
    with graph.inserting_after(placeholder):
        dequantize = graph.call_function(DEQUANTIZE, (placeholder, *qparams))
    dequantize.meta = dict(placeholder.meta)
    placeholder.replace_all_uses_with(dequantize, delete_user_cb=lambda user: user is not dequantize)
    for user in list(quantize.users):
        if user.target is DEQUANTIZE:
            user.replace_all_uses_with(dequantize)
    value, dtype = placeholder.meta["val"], qparams[-1]
    with value.fake_mode:
        placeholder.meta["val"] = value.to(dtype)


def _qparams_behind(placeholder: Node) -> QParams | None:
    for user in placeholder.users:
        if user.target is DEQUANTIZE:
            return PerTensorQParams.of_node(user)
    return None


def _integers(index: int, value: Any, qparams: QParams) -> Tensor:
    if is_quantized(value):
        return qparams.quantize(as_float(value))
    if isinstance(value, Tensor) and value.dtype is qparams.dtype:
        return value
    found = str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
    raise InputError(
        f"input {index} is one of input_quantized_indexes: it is taken as {qparams.dtype!s}, got {found}.",
        hint=f"pass a quantized tensor, or converted.input_qparams()[{index}].quantize(x).",
    )


def _no_such_index(setting: str, index: object, count: int) -> ConfigError:
    return ConfigError(
        f"{setting} has {index!r}, and the model has {count}.",
        hint=f"indexes are integers from 0 to {count - 1}.",
    )
