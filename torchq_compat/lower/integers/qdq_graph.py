"""Read a q-dq graph: arguments by name, constants, integers behind a value, and what becomes of them."""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torchq_compat.ops import preserves_values
from torchq_compat.read.qdq import DEQUANTIZE, DEQUANTIZES, QUANTIZE
from torchq_compat.read.qparams import PerTensorQParams
from torchq_compat.support.dtypes import KERNEL_DTYPES
from torchq_compat.support.upstream import OpOverload

ATEN = torch.ops.aten
SCALARS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
#: Op -> the range to which it clamps, from its arguments; None is no bound.
CLAMPS: dict[Any, Callable[[dict[str, Any]], tuple[Any, Any]]] = {
    ATEN.relu.default: lambda _: (0.0, None),
    ATEN.relu6.default: lambda _: (0.0, 6.0),
    ATEN.hardtanh.default: lambda arguments: (arguments["min_val"], arguments["max_val"]),
    ATEN.clamp.default: lambda arguments: (arguments["min"], arguments["max"]),
    ATEN.clamp_min.default: lambda arguments: (arguments["min"], None),
}


@dataclass(frozen=True)
class Integers:
    """The 8-bit integers behind a float value of the graph."""

    node: Node
    qparams: PerTensorQParams

    @property
    def arguments(self) -> tuple[Node, float, int]:
        """The integers as the operators take them, with scale and zero point."""
        return self.node, self.qparams.scale, self.qparams.zero_point


class Counterpart(NamedTuple):
    """A value of the reference that a node of the lowered graph has.

    Attributes:
        qparams: of the integers that the lowered node has in place of floats; None: it has the same.
        is_judged: whether the two values have to agree.
        op: the op whose kernel computes the value; None: the node itself.
    """

    node: Node
    qparams: PerTensorQParams | None = None
    is_judged: bool = True
    op: Node | None = None

    @property
    def name(self) -> str:
        return (self.op or self.node).name


@dataclass(frozen=True)
class Result:
    """What a q-dq graph makes of the result of an op.

    Attributes:
        covered: the op, and a clamp after it that only its quantize reads.
        last: the node whose value a kernel gives: the quantize, or the op if its result stays float.
        qparams: of the quantize, with the clamp's range; None if the result stays float.
    """

    covered: tuple[Node, ...]
    last: Node
    qparams: PerTensorQParams | None


@dataclass(frozen=True)
class OpSite:
    """An op for which a rule answers, with what becomes of its result."""

    graph_module: GraphModule
    op: Node
    arguments: dict[str, Any]
    result: Result

    def constant(self, name: str) -> Tensor | None:
        """Return the tensor that argument ``name`` reads from the state; None if it is no constant."""
        return constant_of(self.graph_module, self.arguments[name])


def arguments_of(node: Node) -> dict[str, Any]:
    """Return the arguments of an operator call by name, defaults included."""
    assert isinstance(node.target, OpOverload)
    matches: dict[str, Any] = {}
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.name in node.kwargs:
            matches[argument.name] = node.kwargs[argument.name]
        elif not argument.kwarg_only and position < len(node.args):
            matches[argument.name] = node.args[position]
        elif argument.has_default_value():
            matches[argument.name] = argument.default_value
    return matches


def example_value(node: Node) -> Any:
    """Return the example value at ``node``, or of its input for q-dq nodes, which torchao gives none."""
    while "val" not in node.meta and node.target in (QUANTIZE, *DEQUANTIZES):
        source = node.args[0]
        assert isinstance(source, Node)
        node = source
    return node.meta.get("val")


def rank_of(node: Node) -> int | None:
    """Return the number of dimensions of the tensor at ``node``; None if torchao left no example value."""
    value = example_value(node)
    return value.dim() if isinstance(value, Tensor) else None


def constant_of(graph_module: GraphModule, node: Any) -> Tensor | None:
    """Return the tensor that a ``get_attr`` node reads; None for any other node."""
    if not isinstance(node, Node) or node.op != "get_attr":
        return None
    value = operator.attrgetter(str(node.target))(graph_module)
    return value.detach() if isinstance(value, Tensor) else None


def integers_at(node: Any) -> Integers | None:
    """Return the integers of which ``node`` is the per-tensor dequantize; None for any other value."""
    if not isinstance(node, Node) or node.target is not DEQUANTIZE or node.kwargs:
        return None
    source, qparams = node.args[0], PerTensorQParams.of_node(node)
    assert isinstance(source, Node)
    return Integers(source, qparams) if qparams.dtype in KERNEL_DTYPES else None


def only_reader(node: Node) -> Node | None:
    """Return the one node that reads ``node``; None if there is another number of them."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def result_of(op: Node) -> Result:
    """Return what becomes of the result of ``op``."""
    reader = only_reader(op)
    clamp = reader if reader is not None and reader.target in CLAMPS else None
    quantize = reader if clamp is None else only_reader(clamp)
    if quantize is None or quantize.target is not QUANTIZE:
        return Result((op,), op, None)
    qparams = PerTensorQParams.of_node(quantize)
    if qparams.dtype not in KERNEL_DTYPES:
        return Result((op,), op, None)
    if clamp is None:
        return Result((op,), quantize, qparams)
    bounds = CLAMPS[clamp.target](arguments_of(clamp))
    if not all(bound is None or isinstance(bound, (int, float)) for bound in bounds):
        return Result((op,), op, None)
    return Result((op, clamp), quantize, within(qparams, *bounds))


def within(qparams: PerTensorQParams, low: float | None, high: float | None) -> PerTensorQParams:
    """Return ``qparams`` with the range of integers that floats between ``low`` and ``high`` are rounded to:
    rounding is monotonic, so clamping before and after it gives the same integers."""
    lowest, highest = qparams.quant_min, qparams.quant_max
    if low is not None:
        lowest = int(qparams.quantize(torch.tensor(float(low))))
    if high is not None:
        highest = int(qparams.quantize(torch.tensor(float(high))))
    return PerTensorQParams(qparams.scale, qparams.zero_point, lowest, highest, qparams.dtype)


def tensors_read(node: Node) -> list[Node]:
    """Return the inputs of an operator call that are tensors; the other inputs are sizes."""
    return [source for source in node.all_input_nodes if not isinstance(example_value(source), SCALARS)]


# Keep the integers that FX's quantized kernels keep: a dropout returns the tensor it is given, and a tensor
# times a number has the same integers and another scale.
#
# In the reference graph of FX, and in ours, such a result is quantized again: a dropout's has an observer
# of its own, a product's shares its input's. What follows, up to the next op that computes, is on the same
# steps.


DROPOUT = ATEN.dropout.default
BY_NUMBER = (ATEN.mul.Tensor, ATEN.mul.Scalar)


def hand_on_qparams(reference: GraphModule) -> None:
    """Give what quantizes the result of a dropout, or of a product with a number, the qparams with which it
    has the integers of its input; changed in place."""
    #: Each dequantize that was given other qparams -> those that it had.
    before: dict[Node, PerTensorQParams] = {}
    for quantize in reference.graph.nodes:
        if quantize.target is not QUANTIZE or any(user.target is not DEQUANTIZE for user in quantize.users):
            continue
        own = PerTensorQParams.of_node(quantize)
        if (qparams := _handed_on(quantize, own, before)) is not None:
            for node in (quantize, *quantize.users):
                node.args = (node.args[0], qparams.scale, qparams.zero_point, *node.args[3:])
            before.update(dict.fromkeys(quantize.users, own))
    if before:
        reference.recompile()


def _handed_on(
    quantize: Node, own: PerTensorQParams, before: dict[Node, PerTensorQParams]
) -> PerTensorQParams | None:
    """Return the qparams of the integers before what ``quantize`` reads, times the numbers between: through
    dropouts, products with a number, clamps behind one, and ops that move values; None: anything else.

    Args:
        own: the qparams of ``quantize``.
    """
    node, factors, has_dropout, clamps = quantize.args[0], list[float](), False, False
    while isinstance(node, Node) and node.target is not DEQUANTIZE:
        inputs = tensors_read(node)
        number: Any = arguments_of(node)["other"] if node.target in BY_NUMBER else None
        scales = type(number) in (int, float) and number != 0 and math.isfinite(number)
        if len(inputs) != 1 or not (preserves_values(node) or node.target in CLAMPS or scales):
            return None
        factors += [float(number)] if number is not None else []
        has_dropout, clamps = has_dropout or node.target is DROPOUT, clamps or node.target in CLAMPS
        (node,) = inputs
    if not isinstance(node, Node) or not (has_dropout or factors or node in before):
        return None
    given = PerTensorQParams.of_node(node)
    if (given.dtype, given.quant_min, given.quant_max) != (own.dtype, own.quant_min, own.quant_max):
        return None
    if (factors or clamps) and before.get(node, given) != own:
        return None  # It has an observer of its own.
    for factor in factors:
        # Of a negative number the integers are mirrored.
        zero_point = given.zero_point if factor > 0 else given.quant_min + given.quant_max - given.zero_point
        given = replace(given, scale=given.scale * abs(factor), zero_point=zero_point)
    return given if torch.finfo(torch.float32).tiny < given.scale < math.inf else None
