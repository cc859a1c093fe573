"""Remove nested structures from an FX graph: values that are packed and indexed again are used directly.

Legacy: ``_reroute_tuple_getitem_pattern`` of ``torch.ao.quantization.fx.utils`` searches from each tuple
downwards without backtracking: a tuple indexed twice raised, or silently gave another element. Here every
``getitem``, from first node to last, looks up the structure it indexes, so no search is needed.
"""

import operator
from collections.abc import Callable
from typing import Any, cast

from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from torchq_compat.support.argument_checks import checked_arguments, instance_of

BUILDERS = (tuple, list, dict)
MUTATING_FUNCTIONS = frozenset(
    {
        operator.setitem,
        operator.delitem,
        operator.iadd,
        operator.imul,
        operator.ior,
        operator.iconcat,
    }
)
#: Methods that do not change a list or dict.
READING_METHODS = frozenset({"copy", "count", "get", "index", "items", "keys", "values"})


@checked_arguments(graph=instance_of(Graph, what="a torch.fx.Graph"))
def reroute_tuples(graph: Graph) -> int:
    """Let every consumer of an element of a known structure use the element itself; erase unused builders.

    Known structures are tuples, lists, dicts and named tuples written in a node's arguments or built by a
    call of their class, and static slices of them. An index is an int of either sign, a slice with int
    bounds, a constant dict key, or the name of a field. An access is not changed if its index is computed or
    missing in the structure (the graph raises the same error as before), or if some node changes the list or
    dict. The graph computes the same values; calling the function again has no effect.

    Args:
        graph: the graph, changed in place. Recompile the GraphModule that owns it.

    Returns:
        The number of accesses and builders erased.

    Example:
        >>> import operator
        >>> import torch
        >>> from torchq_compat import reroute_tuples
        >>> graph = torch.fx.Graph()
        >>> x = graph.placeholder("x")
        >>> pair = graph.call_function(tuple, ([x, x],))
        >>> second = graph.call_function(operator.getitem, (pair, 1))
        >>> _ = graph.output(second)
        >>> reroute_tuples(graph)
        2
    """
    erased = 0
    for node in list(graph.nodes):
        if (
            node.op == "call_function"
            and node.target in (operator.getitem, getattr)
            and len(node.args) == 2
            and not node.kwargs
        ):
            result, element = _element(node)
            if result:
                _replace(node, element)
                graph.erase_node(node)
                erased += 1
    for node in reversed(list(graph.nodes)):
        if not node.users and node.op == "call_function" and _structure(node) is not None:
            graph.erase_node(node)
            erased += 1
    return erased


def _element(access: Node) -> tuple[bool, Any]:
    """Return whether the element is known, and the element: a node, a constant, or a structure of them."""
    container, index = access.args
    structure = _structure(container)
    if structure is None or _holds_node(index):
        return False, None
    if access.target is getattr:
        is_field = index in getattr(structure, "_fields", ())
        return is_field, getattr(structure, str(index)) if is_field else None
    try:
        return True, structure[index]
    except (IndexError, KeyError, TypeError):
        return False, None


def _structure(value: Any) -> Any:
    """Return the tuple, list or dict that ``value`` is or builds, with nodes as elements; None if it is not
    known."""
    if not isinstance(value, Node):
        return value if isinstance(value, BUILDERS) else None
    builds = value.target in BUILDERS or _is_named_tuple(value.target)
    if value.op != "call_function" or _is_changed(value) or not builds:
        return None
    args = [_structure(arg) if isinstance(arg, Node) else arg for arg in value.args]
    if value.target in BUILDERS and any(arg is None for arg in args):
        return None
    if _is_named_tuple(value.target):
        args = list(value.args)
    try:
        return cast(Callable[..., Any], value.target)(*args, **value.kwargs)
    except (TypeError, ValueError):
        return None


def _is_named_tuple(target: Any) -> bool:
    return isinstance(target, type) and issubclass(target, tuple) and hasattr(target, "_fields")


def _is_changed(builder: Node) -> bool:
    """Return whether a node changes the list or dict that ``builder`` makes."""
    if builder.target not in (list, dict):
        return False
    return any(
        (user.target in MUTATING_FUNCTIONS and user.args[0] is builder)
        or (user.op == "call_method" and user.args[0] is builder and user.target not in READING_METHODS)
        for user in builder.users
    )


def _holds_node(value: Any) -> bool:
    if isinstance(value, slice):
        return any(_holds_node(bound) for bound in (value.start, value.stop, value.step))
    if isinstance(value, (tuple, list)):
        return any(_holds_node(item) for item in value)
    return isinstance(value, Node)


def _replace(access: Node, element: Any) -> None:
    """Replace uses of ``access`` by ``element``; a structure is written into the arguments of the users."""
    if isinstance(element, Node):
        access.replace_all_uses_with(element)
        return

    def replaced(value: Any) -> Any:
        return element if value is access else value

    for user in list(access.users):
        user.args = map_aggregate(user.args, replaced)
        user.kwargs = map_aggregate(user.kwargs, replaced)


#: The name of the function in ``torch.ao.quantization.fx.utils``.
_reroute_tuple_getitem_pattern = reroute_tuples
