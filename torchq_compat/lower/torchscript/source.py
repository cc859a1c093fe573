"""A captured graph as the source of one TorchScript function of tensors and constants."""

import itertools
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torchq_compat.capture.sizes.numbers import OPERATIONS
from torchq_compat.errors import ExportError
from torchq_compat.read import qdq
from torchq_compat.support.graph_nodes import module_path_of
from torchq_compat.support.upstream import OpOverload, pytree

# TorchScript forms of the Python functions of a captured graph and of q-dq operators.
#
# ``quantized_decomposed`` is implemented in Python: a process that only loads TorchScript lacks it.


ATEN = torch.ops.aten

#: Function of the graph -> an expression of its arguments.
TEMPLATES: Mapping[Any, str] = {
    **{operation.function: operation.words for operation in OPERATIONS.values()},
    operator.and_: "({0} and {1})",
    operator.or_: "({0} or {1})",
    operator.getitem: "{0}[{1}]",
    torch.sym_int: "int({0})",
    torch.sym_not: "(not {0})",
    torch.sym_ite: "({1} if {0} else {2})",
    math.trunc: "int({0})",
    round: "round({0})",
    qdq.CONVERT_DTYPE: "{0}.to({1})",
    ATEN.sym_size.int: "{0}.size({1})",
    ATEN.sym_stride.int: "{0}.stride({1})",
    ATEN.sym_numel.default: "{0}.numel()",
    ATEN.sym_storage_offset.default: "{0}.storage_offset()",
}
#: Functions whose results, if they compute sizes, are already valid as a float argument.
INT_FLOAT = (operator.truediv, torch.sym_float)


def quantize_per_tensor(
    x: Tensor, scale: float, zero_point: int, quant_min: int, quant_max: int, dtype: int
) -> Tensor:
    return torch.clamp(torch.round(x * (1.0 / scale)) + zero_point, quant_min, quant_max).to(dtype)


def dequantize_per_tensor(
    q: Tensor, scale: float, zero_point: int, quant_min: int, quant_max: int, dtype: int
) -> Tensor:
    return (q.to(torch.float32) - zero_point) * scale


def quantize_per_channel(
    x: Tensor, scales: Tensor, zero_points: Tensor, axis: int, quant_min: int, quant_max: int, dtype: int
) -> Tensor:
    shape = [1] * x.dim()
    shape[axis] = -1
    scaled = torch.round(x * (1.0 / scales.view(shape)))
    return torch.clamp(scaled + zero_points.view(shape), quant_min, quant_max).to(dtype)


def dequantize_per_channel(
    q: Tensor, scales: Tensor, zero_points: Tensor, axis: int, quant_min: int, quant_max: int, dtype: int
) -> Tensor:
    shape = [1] * q.dim()
    shape[axis] = -1
    return ((q - zero_points.view(shape)) * scales.view(shape)).to(torch.float32)


def anew(tensors: list[Tensor], x: Tensor) -> list[Tensor]:
    """Return a list that torch.jit cannot take for a constant, since it depends on ``x``."""
    result: list[Tensor] = []
    for tensor in tensors:
        if x.numel() >= 0:
            result.append(tensor)
    return result


#: Operator -> the function above that computes its bits.
FUNCTIONS: Mapping[Any, Callable[..., Tensor]] = {
    qdq.QUANTIZE: quantize_per_tensor,
    qdq.DEQUANTIZE: dequantize_per_tensor,
    qdq.QUANTIZE_PER_CHANNEL: quantize_per_channel,
    qdq.DEQUANTIZE_PER_CHANNEL: dequantize_per_channel,
}
HELPERS: Mapping[str, Any] = {function.__name__: function for function in (*FUNCTIONS.values(), anew)}


# A captured graph as the source of one TorchScript function of tensors and constants.


INDENT = "    "
#: Ops without a result, and without a meaning where sizes are numbers.
ASSERTIONS = (
    "_assert_scalar",
    "sym_constrain_range",
    "sym_constrain_range_for_size",
    "_assert_tensor_metadata",
)


@dataclass
class FunctionSource:
    """A function: inputs, constants and lines.

    Attributes:
        inputs: (name, type) of the flat inputs.
        constants: name -> tensor, passed after the inputs.
        lines: the lines of its body.
        results: the expressions of the flat results.
        called: name -> compiled function that it calls.
        is_without_gradients: whether it computes on integers: TorchScript, deriving the floats around them,
            gives operators tensors without memory.
    """

    inputs: list[tuple[str, str]] = field(default_factory=list)
    constants: dict[str, Tensor] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    results: list[str] = field(default_factory=list)
    called: dict[str, Any] = field(default_factory=dict)
    is_without_gradients: bool = False

    def text(self, name: str) -> str:
        """Return the function as text, which returns a single result itself and several as a tuple."""
        typed = [f"{entry}: {kind}" for entry, kind in self.inputs]
        typed += [f"{item}: Tensor" for item in self.constants]
        body = self.lines
        if self.is_without_gradients and body:
            body = ["with torch.no_grad():", *(f"{INDENT}{line}" for line in body)]
        returned = self.results[0] if len(self.results) == 1 else f"({', '.join(self.results)})"
        body = [*body, f"return {returned}"]
        return f"def {name}({', '.join(typed)}):\n" + "".join(f"{INDENT}{line}\n" for line in body)

    def constant(self, value: Tensor) -> str:
        """Return the name of a constant, the same for the same value."""
        for name, known in self.constants.items():
            if known is value:
                return name
        name = f"constant_{len(self.constants)}"
        self.constants[name] = value
        return name


#: Write a ``call_module`` node: (node, function, expressions of its arguments) -> its expression.
ModuleCalls = Callable[[Node, FunctionSource, list[str]], str]


def write_function(
    graph_module: GraphModule, attribute: Callable[[str], Any], write_module_call: ModuleCalls
) -> FunctionSource:
    """Return the function of ``graph_module``, with constants that require no gradient.

    Args:
        attribute: maps a path to the value that ``get_attr`` reads there.
        write_module_call: writes the calls of modules.

    Raises:
        ExportError: a node that TorchScript cannot express.
    """
    function = FunctionSource()
    _Writer(function, attribute, write_module_call).write(graph_module)
    function.constants = {name: value.detach() for name, value in function.constants.items()}
    return function


@dataclass
class _Writer:
    """Writes the lines of a graph; a loop body gets its own names, and its lines go into the loop."""

    function: FunctionSource
    attribute: Callable[[str], Any]
    write_module_call: ModuleCalls
    prefix: str = "v_"
    names: dict[Node, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def write(self, graph_module: GraphModule) -> None:
        for node in graph_module.graph.find_nodes(op="placeholder"):
            self.names[node] = f"{self.prefix}{node.name}"
            self.function.inputs.append((self.names[node], _input_type(node)))
        self.function.results = self.write_body(graph_module)
        self.function.lines = self.lines

    def write_body(self, graph_module: GraphModule) -> list[str]:
        """Write everything after the placeholders; return the expressions of the results."""
        for node in graph_module.graph.nodes:
            if node.op == "get_attr":
                value = self.attribute(str(node.target))
                if isinstance(value, Tensor):
                    self.names[node] = self.function.constant(value)
                elif not isinstance(value, GraphModule):  # the body of a loop
                    raise ExportError.of("TQ930.script_constant", value=value)
            elif node.op in ("call_module", "call_function"):
                self._write_call(node)
        results = flat_results(graph_module.graph.output_node())
        return [self.names[result] for result in results if isinstance(result, Node)]

    def _write_call(self, node: Node) -> None:
        name = getattr(node.target, "__name__", "").partition(".")[0]
        if not node.users and node.op == "call_function" and name in ASSERTIONS:
            return
        if node.target is torch.ops.higher_order.scan:
            expression = self._write_loop(node)
        elif node.op == "call_module":
            leaves = pytree.tree_leaves((node.args, node.kwargs))
            args = [self.names[leaf] for leaf in leaves if isinstance(leaf, Node)]
            expression = self.write_module_call(node, self.function, args)
        else:
            expression = _expression(node, self.names)
        self.names[node] = f"{self.prefix}{node.name}"
        self.lines.append(f"{self.names[node]} = {expression}")

    def _write_loop(self, node: Node) -> str:
        """Write a ``scan`` as a loop over the first dimension; return the expression of its results."""
        arguments: Any = node.args
        body = self.attribute(str(arguments[0].target))
        states, rows, *others = ([self.names[item] for item in part] for part in arguments[1:])
        prefix = f"{self.prefix}{node.name}_"
        carried = [f"{prefix}state{index}" for index in range(len(states))]
        self.lines += [f"{name} = {state}" for name, state in zip(carried, states, strict=True)]
        step = [f"{row}[{prefix}step]" for row in rows]
        placeholders = body.graph.find_nodes(op="placeholder")
        inner = _Writer(
            self.function,
            lambda path: operator.attrgetter(path)(body),
            self.write_module_call,
            prefix,
            dict(zip(placeholders, [*carried, *step, *itertools.chain(*others)], strict=True)),
        )
        results = inner.write_body(body)
        stacked = [f"{prefix}rows{index}" for index in range(len(results) - len(carried))]
        self.lines += [f"{name} = torch.jit.annotate(List[Tensor], [])" for name in stacked]
        self.lines.append(f"for {prefix}step in range({rows[0]}.size(0)):")
        inner.lines += [
            f"{name}.append({result})" for name, result in zip(stacked, results[len(carried) :], strict=True)
        ]
        if carried:
            inner.lines.append(f"{', '.join(carried)} = {', '.join(results[: len(carried)])}")
        self.lines += [f"{INDENT}{line}" for line in inner.lines]
        return f"({', '.join([*carried, *(f'torch.stack({name})' for name in stacked)])},)"


def flat_results(output: Node) -> list[Any]:
    """Return the flat results of a graph: nodes and constants."""
    return pytree.tree_leaves(output.args[0])


def _input_type(node: Node) -> str:
    value = node.meta.get("val")
    if value is None:
        return "Optional[Tensor]" if "val" in node.meta else "Tensor"
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind.__name__
    return "Tensor"


def _expression(node: Node, names: Mapping[Node, str]) -> str:
    target = node.target
    if target in TEMPLATES:
        return TEMPLATES[target].format(*(literal(entry, "", names) for entry in node.args))
    if not isinstance(target, OpOverload):
        raise ExportError.of(
            "TQ930.script_op",
            target=getattr(target, "__name__", target),
            path=module_path_of(node) or node.name,
        )
    schema = target._schema
    arguments = {argument.name: str(argument.type) for argument in schema.arguments}
    kinds = list(arguments.values())
    given = [literal(arg, kind, names) for arg, kind in zip(node.args, kinds, strict=False)]
    given += [f"{name}={literal(element, arguments[name], names)}" for name, element in node.kwargs.items()]
    if schema.name.startswith("torchq_compat_native::"):
        # The stable ABI moves tensors out of a list, also out of one that is a constant (torch 2.13).
        given = [
            f"anew({item}, {given[0]})" if kind == "List[Tensor]" else item
            for item, kind in zip(given, kinds, strict=False)
        ]
    called = f"torch.ops.{schema.name.replace('::', '.')}"
    if target in FUNCTIONS:
        called = FUNCTIONS[target].__name__
    return f"{called}({', '.join(given)})"


def literal(value: Any, kind: str, names: Mapping[Node, str]) -> str:
    """Return ``value`` as TorchScript, for an argument of type ``kind``."""
    kind = kind.removeprefix("Optional[").removesuffix("]") if kind.startswith("Optional[") else kind
    if isinstance(value, Node):
        return _as_float(value, names[value]) if kind == "float" else names[value]
    if isinstance(value, (list, tuple)):
        element = kind.removeprefix("List[").removesuffix("]") if kind.startswith("List[") else ""
        listed = f"[{', '.join(literal(item, element, names) for item in value)}]"
        return listed if element in ("", "number", "t") else f"torch.jit.annotate({kind}, {listed})"
    if isinstance(value, float) or (kind == "float" and isinstance(value, (int, bool))):
        return repr(float(value)) if math.isfinite(value) else f'float("{float(value)}")'
    if isinstance(value, torch.device):
        return f'torch.device("{value}")'
    if isinstance(value, int) and kind == "int":
        return repr(int(value))
    if value is None or isinstance(value, (bool, int, str)):
        return repr(value)
    return str(value)  # The text of a dtype, layout or memory format is its name.


def _as_float(node: Node, name: str) -> str:
    is_size = isinstance(node.meta.get("val"), (torch.SymInt, int)) and node.target not in INT_FLOAT
    is_size = is_size or node.target in (torch.ops.aten.sym_size.int, operator.floordiv)
    return f"float({name})" if is_size else name
