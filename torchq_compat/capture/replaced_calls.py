"""Replaces calls of torch's functions by a model that is captured."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import TorchFunctionMode

from torchq_compat.support.graph_nodes import nodes_behind


class ReplacedCalls(TorchFunctionMode):
    """A mode for the functions that a model calls: torch.export hides these from a mode around it."""

    @contextmanager
    def during(self, model: nn.Module) -> Iterator[None]:
        """Be active while ``model`` runs, inside of torch.export's own modes."""
        entered, depth = ExitStack(), 0

        def enter(traced: nn.Module, args: Any, kwargs: Any) -> None:
            nonlocal depth
            depth += 1
            if depth == 1:  # Else the model calls itself.
                entered.enter_context(self.inside(traced, args, kwargs))

        def leave(_model: nn.Module, _args: Any, result: Any) -> Any:
            nonlocal depth
            depth -= 1
            if not depth:
                result = self.returned(result)
                entered.close()
            return result

        before = model.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
        with before, model.register_forward_hook(leave, always_call=True), entered:
            yield

    @contextmanager
    def inside(self, traced: nn.Module, args: Any, kwargs: Any) -> Iterator[None]:
        """Be active during the call of ``traced`` with ``args`` and ``kwargs``."""
        with self:
            yield

    def returned(self, result: Any) -> Any:
        """Return what torch.export sees of the model's ``result``."""
        return result


def called_without_out(function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Call ``function``, and copy its results into the ``out`` that it is given: torch has no derivatives of
    functions that write into it."""
    named = dict(kwargs)
    out = named.pop("out", None)
    # Dynamo, which runs the body of a scan, cannot trace what asks for the mode.
    mode = None if out is None else get_proxy_mode()
    if mode is None:
        return function(*args, **kwargs)
    last = next(reversed(mode.tracer.graph.nodes))
    result = function(*args, **named)
    pairs = [(out, result)] if isinstance(out, Tensor) else [*zip(out, result, strict=True)]
    if any(into.shape != value.shape for into, value in pairs):
        return function(*args, **kwargs)  # It resizes what it is given.
    for into, value in pairs:
        into.copy_(value)
    for node in nodes_behind(last):  # They have no name in a configuration.
        node.meta.pop("torch_fn", None)
    return out if isinstance(out, Tensor) else type(result)(out)
