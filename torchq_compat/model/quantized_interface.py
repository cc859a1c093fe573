"""The quantized interface of a graph, and the integers that its ops read."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Graph, GraphModule, Node, Proxy
from torch.fx.graph import CodeGen

from torchq_compat.errors import ConfigError, InputError
from torchq_compat.model.quantized_boundary import qparams_of_integers
from torchq_compat.read import qdq
from torchq_compat.read.qparams import PerTensorQParams, QParams
from torchq_compat.support.decisions import QuantizedValue
from torchq_compat.support.graph_nodes import attribute_of, behind
from torchq_compat.support.quantized_tensors import as_float, is_quantized
from torchq_compat.support.upstream import PyTreeCodeGen, is_activation_post_process, pytree
from torchq_compat.support.user_warnings import warn_user

# The quantized interface of a graph: the inputs it accepts and the outputs it returns as integers.
#
# Legacy: ``PrepareCustomConfig.set_input_quantized_indexes`` and ``set_output_quantized_indexes``. FX's
# graph then accepts and returns torch.ao's quantized tensors, which have qparams. Integers have none: the
# qparams of an input come from calibration, and the converted model returns those of both from
# ``input_qparams`` and ``output_qparams``.


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
    if not (interface.inputs or interface.outputs):
        return
    for placeholder in interface.input_nodes(converted):
        _take_integers(placeholder)
    returned = _returned(converted)
    for index in interface.outputs:
        node = returned[index]
        if isinstance(node, Node) and node.target in qdq.DEQUANTIZES:
            returned[index] = node.args[0]
    converted.graph.output_node().args = (tuple(returned),)
    converted.graph.eliminate_dead_code()
    converted.recompile()


def input_qparams(converted: GraphModule, interface: QuantizedInterface) -> tuple[QParams | None, ...]:
    """Return, for each flat input, the qparams of its integers; None if the input is not quantized."""
    placeholders = converted.graph.find_nodes(op="placeholder")
    return tuple(
        next(filter(None, (PerTensorQParams.of_call(user, qdq.DEQUANTIZE) for user in node.users)), None)
        if index in interface.inputs
        else None
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
    count, matches = len(sizes), set[int]()
    for index in indexes:
        if isinstance(index, int) and not 0 <= index < count:
            # FX ignores such an index too, without a warning.
            warn_user("TQ309", setting=setting, index=index, count=count)
            continue
        if not isinstance(index, int):
            raise ConfigError.of(
                "TQ910.no_such_index", setting=setting, index=index, count=count, last=count - 1
            )
        first = sum(sizes[:index])
        matches.update(range(first, first + sizes[index]))
    return frozenset(matches)


def _returned(graph_module: GraphModule) -> list[Any]:
    return pytree.tree_leaves(graph_module.graph.output_node().args[0])


def _take_integers(placeholder: Node) -> None:
    """Let ``placeholder`` hold the result of the quantize that reads it.

    A dequantize is put after the placeholder. Nodes that read the integers keep their quantize, which after a
    dequantize with the same qparams changes nothing.
    """
    quantize = next((user for user in placeholder.users if user.target is qdq.QUANTIZE), None)
    if quantize is None:
        return
    graph, qparams = placeholder.graph, quantize.args[1:]
    with graph.inserting_after(placeholder):
        dequantize = graph.call_function(qdq.DEQUANTIZE, (placeholder, *qparams))
    dequantize.meta = dict(placeholder.meta)
    placeholder.replace_all_uses_with(dequantize, delete_user_cb=lambda user: user is not dequantize)
    for user in list(quantize.users):
        if user.target is qdq.DEQUANTIZE:
            user.replace_all_uses_with(dequantize)
    value, dtype = placeholder.meta["val"], qparams[-1]
    with value.fake_mode:
        placeholder.meta["val"] = value.to(dtype)


def _integers(index: int, value: Any, qparams: QParams) -> Tensor:
    if is_quantized(value):
        return qparams.quantize(as_float(value))
    if isinstance(value, Tensor) and value.dtype is qparams.dtype:
        return value
    result = str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
    raise InputError.of("TQ901.integer_input", index=index, dtype=qparams.dtype, result=result)


# The values that an op of a prepared or converted graph reads as integers: its weights and inputs.


def result_details(node: Node | None) -> dict[str, Any]:
    """Return dtype, scale and zero point of the value of ``node``; empty if it is not quantized."""
    for user in node.users if node else ():
        if user.target is qdq.QUANTIZE:
            _, scale, zero_point, _, _, dtype = user.args
            return {"dtype": dtype, "scale": scale, "zero_point": zero_point}
    return {}


def quantized_values(
    model: GraphModule, node: Node, path: str, others: Collection[Node], quantized: Collection[Node]
) -> tuple[QuantizedValue, ...]:
    """Return the weights and inputs that the op ending in ``node`` reads as integers.

    Args:
        model: a prepared or converted graph.
        node: the last node of the op; the nodes before it, up to those of ``others``, belong to the op.
        path: the module path of the op.
        others: the last nodes of the other ops.
        quantized: the nodes whose result is quantized; an input with the qparams of that result is left out.
    """
    matches: list[QuantizedValue] = []
    for edge in _edges_into(model, node, others):
        value = _of_edge(model, edge, path, quantized)
        if value is not None and value not in matches:
            matches.append(value)
    inputs = [value for value in matches if value.role == "input"]
    return tuple(
        value if value.role == "weight" or len(inputs) == 1 else value.numbered(inputs.index(value))
        for value in matches
    )


def _edges_into(model: GraphModule, last: Node, others: Collection[Node]) -> Iterator[Node]:
    """Yield the q-dq nodes and observers of the values that the op reads, in the order of its arguments."""
    for argument in last.all_input_nodes:
        if argument in others or argument.op in ("placeholder", "get_attr"):
            continue
        if _is_edge(model, argument):
            yield argument
        elif argument.op == "call_function":
            yield from _edges_into(model, argument, others)


def _is_edge(model: GraphModule, node: Node) -> bool:
    if node.op == "call_module":
        return bool(is_activation_post_process(model.get_submodule(str(node.target))))
    quantizes = (qdq.QUANTIZE, qdq.QUANTIZE_PER_CHANNEL)
    return node.target in (*qdq.DEQUANTIZES, *quantizes, qdq.DEQUANTIZE_DYNAMIC)


def _of_edge(model: GraphModule, edge: Node, path: str, quantized: Collection[Node]) -> QuantizedValue | None:
    source, read = edge, edge
    while source.op != "placeholder" and _is_edge(model, source):
        read, source = source, source.all_input_nodes[0]
    if read.target in qdq.DEQUANTIZES and source.op == "call_function":
        return None  # An opaque call returns these integers.
    # A weight, or computed of weights alone, as a fused weight is in QAT.
    is_weight = all(
        node.op == "get_attr" or (node.op == "call_function" and node.all_input_nodes)
        for node in behind([source])
    )
    if not is_weight and source in quantized:
        first = next((user for user in source.users if _is_edge(model, user)), None)
        if first in (read, edge):
            return None  # This is the result of the op before.
    qparams = _qparams(model, edge, source)
    if is_weight:
        name = "bias" if source.op == "get_attr" and str(source.target).endswith("bias") else "weight"
        return QuantizedValue(f"{path}.{name}", "weight", **qparams)
    return QuantizedValue(f"{path}.input", "input", **qparams)


def _qparams(model: GraphModule, edge: Node, source: Node) -> dict[str, Any]:
    if edge.op == "call_module":
        return _of_observer(model.get_submodule(str(edge.target)), source)
    if edge.target is qdq.DEQUANTIZE_DYNAMIC:
        return {"dtype": edge.args[-1], "dynamic": True, "spread": _spread(edge)}
    if edge.target in (qdq.DEQUANTIZE_PER_CHANNEL, qdq.QUANTIZE_PER_CHANNEL):
        scales = edge.args[1]
        value = attribute_of(model, scales) if isinstance(scales, Node) else None
        channels = value.numel() if isinstance(value, Tensor) else None
        return {"dtype": edge.args[6], "channels": channels, "axis": edge.args[3]}
    _, scale, zero_point, _, _, dtype = edge.args
    return {"dtype": dtype, "scale": scale, "zero_point": zero_point}


def _spread(edge: Node) -> tuple[int, int] | None:
    """Return the least and largest integer that the qparams of a dynamic dequantize are chosen for."""
    scale = edge.args[1]
    chosen = scale.args[0] if isinstance(scale, Node) else None
    if not isinstance(chosen, Node) or chosen.target is not qdq.CHOOSE_QPARAMS:
        return None
    return chosen.args[1], chosen.args[2]  # type: ignore[return-value]


def _of_observer(observer: Any, source: Node) -> dict[str, Any]:
    settings: dict[str, Any] = {"dtype": getattr(observer, "dtype", None)}
    if getattr(observer, "is_dynamic", False):
        settings["dynamic"] = True
    # A derived observer has None as ch_axis.
    axis, value = getattr(observer, "ch_axis", None), source.meta.get("val")
    if axis is not None and axis >= 0 and "channel" in str(getattr(observer, "qscheme", "")):
        scale = getattr(observer, "scale", None)
        known = scale.numel() if isinstance(scale, Tensor) and scale.numel() > 1 else None
        settings |= {"channels": int(value.shape[axis]) if isinstance(value, Tensor) else known, "axis": axis}
    return settings


# The structure of results in the graph itself, as FX's graphs have it: code that copies nodes into a graph of
# its own, as ``split_module`` does, loses what only the codegen knows.


class StructuredCodeGen(PyTreeCodeGen):
    """Codegen of a graph whose output node holds the structure of the results."""

    def process_outputs(self, out: Any) -> Any:
        return super().process_outputs(pytree.tree_leaves(out))

    def generate_output(self, output_args: Any, **options: Any) -> str:
        spec = self.pytree_info.out_spec
        if spec is not None and _is_builtin(spec):
            return CodeGen.generate_output(self, output_args, **options)
        return super().generate_output(pytree.tree_leaves(output_args), **options)


def return_structure(graph: Graph) -> None:
    """Put the structure of the results into the output node."""
    info = getattr(graph._codegen, "pytree_info", None)
    if type(graph._codegen) is PyTreeCodeGen and info is not None:
        output = graph.output_node()
        leaves = pytree.tree_leaves(output.args[0])
        is_builtin = _is_builtin(info.out_spec)
        output.args = (
            pytree.tree_unflatten(leaves, info.out_spec)
            if is_builtin
            else _results_class(info.out_spec)(*leaves),
        )
        graph.set_codegen(StructuredCodeGen(info))


def _results_class(spec: pytree.TreeSpec) -> Any:
    """Return a class of named tuples, which nodes take as arguments: made of anything but nodes, as torch.fx
    makes it in a call, it is the structure ``spec``."""

    class Results(namedtuple("Results", [f"leaf_{index}" for index in range(spec.num_leaves)])):  # type: ignore[misc]
        __slots__ = ()

        def __new__(cls, *leaves: Any) -> Any:
            is_traced = any(isinstance(leaf, (Node, Proxy)) for leaf in leaves)
            return super().__new__(cls, *leaves) if is_traced else pytree.tree_unflatten(leaves, spec)

    return Results


def return_flat(graph: Graph) -> None:
    """Undo ``return_structure``."""
    if isinstance(graph._codegen, StructuredCodeGen):
        output = graph.output_node()
        output.args = (tuple(pytree.tree_leaves(output.args[0])),)
        graph.set_codegen(PyTreeCodeGen(graph._codegen.pytree_info))


def _is_builtin(spec: pytree.TreeSpec) -> bool:
    return spec.is_leaf() or (spec.type in (tuple, list, dict) and all(map(_is_builtin, spec.children())))
