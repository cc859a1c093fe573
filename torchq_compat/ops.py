"""Facts about aten operators, from ``ops.toml``: where their weights and parameters stand, which of them only
move values, which are batch norms.
"""

import functools
import operator
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Node

from torchq_compat.support.graph_nodes import module_path_of, source_of
from torchq_compat.support.upstream import OpOverload

ATEN = torch.ops.aten
PRELU = ATEN.prelu.default


@dataclass(frozen=True)
class Facts:
    """A row of ``ops.toml``, which says what each column means."""

    tags: tuple[str, ...] = ()
    parameters: Mapping[str, int] = field(default_factory=dict)
    dimensions: int = 0
    index: tuple[int, ...] = ()
    training: int | None = None


_ROWS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
#: Operator -> its facts.
FACTS: dict[Any, Facts] = {operator.attrgetter(name)(ATEN): Facts(**row) for name, row in _ROWS.items()}


def facts(target: Any) -> Facts:
    """Return the facts about the target of a node; none of what is not in the table."""
    return FACTS.get(target, Facts())


@functools.cache
def those(*tags: str) -> dict[Any, None]:
    """Return the operators with one of ``tags``, as a set in the order of the table."""
    assert set(tags) <= {tag for row in FACTS.values() for tag in row.tags}, tags
    return {target: None for target, row in FACTS.items() if not set(tags).isdisjoint(row.tags)}


def written_by(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the arguments that ``target`` writes into, if it is called with ``args`` and ``kwargs``."""
    schema = getattr(target, "_schema", None)
    for index, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[index] if index < len(args) else kwargs.get(argument.name)


def weight_of(node: Node) -> Node | None:
    """Return the weight argument of ``node`` if a QConfig can quantize it, or None."""
    if node.target in those("normalization") or node.target is PRELU:
        return None
    return named_parameters_of(node).get("weight")


def parameters_of(node: Node) -> dict[str, tuple[Node, Node]]:
    """Map "weight" and "bias" to the edge into ``node``, for those that ``node`` is given."""
    named = named_parameters_of(node)
    return {name: (named[name], node) for name in named if name in ("weight", "bias")}


def parameter_nodes(node: Node) -> set[Node]:
    """Return all arguments of ``node`` that are parameters and not activations."""
    return set(named_parameters_of(node).values())


def named_parameters_of(node: Node) -> dict[str, Node]:
    """Map each role, such as "weight" or "running_mean", to the parameter that ``node`` is given for it."""
    named = {}
    for name, position in facts(node.target).parameters.items():
        argument = node.args[position] if position < len(node.args) else None
        if isinstance(argument, Node):
            named[name] = argument
    return named


def preserves_values(node: Node) -> bool:
    """Return whether all values of the results of ``node`` are values of its inputs, or zero."""
    if node.target is ATEN.dropout.default:
        return _argument(node, 2, "train", None) is False
    if node.target is ATEN.pad.default:
        # Quantized tensors have no kernels for other modes.
        mode, value = _argument(node, 2, "mode", "constant"), _argument(node, 3, "value", None)
        return mode == "reflect" or (mode == "constant" and not value)
    return node.target is operator.getitem or node.target in those("moves")


def draws(node: Node) -> bool:
    """Return whether ``node`` draws random numbers, at least in training: dropouts of probability 0 and
    attention without dropout never do, though torch's tag is on their operators."""
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in target.tags and target not in those("dropout"):
        return False
    for position, argument in enumerate(target._schema.arguments):
        if argument.name in ("p", "dropout", "dropout_p"):
            return _argument(node, position, argument.name, argument.default_value) != 0
    return True


def is_pure(node: Node) -> bool:
    """Return whether ``node`` is an operator that writes nothing and draws no random numbers."""
    return isinstance(node.target, OpOverload) and not node.target._schema.is_mutable and not draws(node)


def moved_by(node: Node) -> Node | None:
    """Return the float input whose values, or zero, are the values of all results of ``node``; None if
    ``node`` computes, or joins several inputs."""
    if not (preserves_values(node) or node.target in those("chooses")):
        return None
    given = [producer for producer in node.all_input_nodes if _holds_floats(producer.meta.get("val"))]
    return given[0] if len(given) == 1 else None


def _holds_floats(value: object) -> bool:
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    return isinstance(first, torch.Tensor) and first.dtype.is_floating_point


def _argument(node: Node, position: int, name: str, default: object) -> object:
    return node.args[position] if position < len(node.args) else node.kwargs.get(name, default)


# The batch norm nodes of a captured graph, and the positions of their arguments.


#: Positions of aten.batch_norm's arguments.
GAMMA, BETA, RUNNING_MEAN, RUNNING_VAR, TRAINING, MOMENTUM, EPS = range(1, 8)


def batch_norm_nodes(graph_module: GraphModule) -> Iterator[tuple[str, Node]]:
    """Yield (path of the running mean, node) for every batch norm with a running mean."""
    for node in graph_module.graph.nodes:
        if node.target is torch.ops.aten.batch_norm.default and isinstance(node.args[RUNNING_MEAN], Node):
            yield str(node.args[RUNNING_MEAN].target), node


def batch_norms_by_path(graph_module: GraphModule) -> dict[str, str]:
    """Return the path of every batch norm -> the path of the op before it, empty if that is no module."""
    nodes = [node for _, node in batch_norm_nodes(graph_module)]
    return {module_path_of(node): module_path_of(source_of(node)) for node in nodes}
