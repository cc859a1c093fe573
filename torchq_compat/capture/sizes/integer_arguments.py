"""Numbers computed from sizes that operators of torch take as plain integers: ``avg_pool2d(x, x.shape[2:])``.

torch has symbols for some arguments of operators only: for others it asks a symbol for its value.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.fx import Node

from torchq_compat.capture.sizes.numbers import is_followed, plain
from torchq_compat.support.upstream import OpOverload, pytree

#: Arguments that decide what an operator is, not how much it computes.
NO_COUNTS = ("dim", "start_dim", "end_dim", "axis", "group")


def write_integers(
    node: Node, args: Sequence[Any], kwargs: Mapping[str, Any], node_of: Callable[[Any], Any]
) -> Iterator[tuple[Any, Any]]:
    """Write the numbers among ``args`` and ``kwargs`` of a function of torch into the call ``node`` that it
    made, where this has their values, and yield the expressions and values of these numbers.

    Args:
        node_of: returns the node that computes an expression.
    """
    if not isinstance(node.target, OpOverload):
        return
    names = [argument.name for argument in node.target._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    for index, name in enumerate(names):
        numbers = pytree.tree_leaves(given.get(name))
        if name.startswith(NO_COUNTS) or not any(map(is_followed, numbers)):
            continue
        is_positional = index < len(node.args)
        value: Any = node.args[index] if is_positional else node.kwargs.get(name)
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        if len(numbers) == 1:
            numbers *= len(values)
        if [plain(number) for number in numbers] != values:
            continue
        written = [node_of(number.node.expression) if is_followed(number) else number for number in numbers]
        new = written if isinstance(value, (list, tuple)) else written[0]
        if is_positional:
            node.update_arg(index, new)
        else:
            node.update_kwarg(name, new)
        yield from ((number.node.expression, number.node.value) for number in filter(is_followed, numbers))


def first_call(slot: Callable[[Tensor], Node | None], result: Any) -> Node | None:
    """Return the call that made the first tensor of ``result``, whose node is its ``slot``."""
    tensor = next((leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)), None)
    node: Any = None if tensor is None else slot(tensor)
    while node is not None and node.target is operator.getitem:
        node = node.args[0]
    return node  # type: ignore[no-any-return]
