"""Functions under ``torch.fx.wrap``, which FX keeps as one float call.

FX replaces such a function in the globals of its Python module while it traces. Here the function is traced
through, and its nodes are marked, so that nothing inside is quantized.
"""

from __future__ import annotations

import builtins
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch.fx import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from torchq_compat.support import metadata
from torchq_compat.support.metadata import CUSTOM
from torchq_compat.support.upstream import WRAPPED_FUNCTIONS

__all__ = ["WrappedCall", "marked_functions", "wrapped_call_of"]

#: (function name, number of the call in the capture)
WrappedCall = tuple[str, int]


def wrapped_call_of(node: Node) -> WrappedCall | None:
    """Return the call of a wrapped function that ``node`` was made in; None if there is none."""
    found = (node.meta.get(CUSTOM) or {}).get(metadata.WRAPPED_CALL.name)
    return found if isinstance(found, tuple) else None


@contextmanager
def marked_functions() -> Iterator[None]:
    """Mark the nodes that wrapped Python functions make while the context is active."""
    counter = itertools.count()
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for namespace, name in _registered():
            function = namespace[name]
            replaced.append((namespace, name, function))
            namespace[name] = _marking(name, function, counter)
        yield
    finally:
        for namespace, name, function in reversed(replaced):
            namespace[name] = function


def _registered() -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the globals and name of each Python function under ``torch.fx.wrap`` that is not torch's own."""
    for (_, name), namespace in list(WRAPPED_FUNCTIONS.items()):
        own = str(namespace.get("__name__", "")).split(".")[0] == "torch"
        function = namespace.get(name)
        if not own and callable(function) and function is not getattr(builtins, name, None):
            yield namespace, name


def _marking(name: str, function: Callable[..., Any], counter: Iterator[int]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        mode: Any = get_proxy_mode()
        if mode is None:
            return function(*args, **kwargs)
        graph = mode.tracer.graph
        before = set(graph.nodes)
        result = function(*args, **kwargs)
        marker = (name, next(counter))
        for node in graph.nodes:
            if node not in before:
                # The outermost call overwrites the marks of inner ones.
                node.meta[CUSTOM] = {**(node.meta.get(CUSTOM) or {}), metadata.WRAPPED_CALL.name: marker}
        return result

    return call
