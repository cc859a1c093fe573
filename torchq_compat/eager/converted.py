"""The class of a converted eager model: the user's own, whose calls follow the values on their grids."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from torchq_compat.capture.opaque_calls import OpaqueModule
from torchq_compat.eager.grid import FollowGrid, active, following
from torchq_compat.support.decisions import MODULE_DECISIONS, Decision
from torchq_compat.support.upstream import pytree
from torchq_compat.support.user_warnings import warn_user

TOLD = "_torchq_compat_told"


class ConvertedEager(nn.Module):
    """A mixin for the class of a user's model: a call follows its quantized values."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with following() as grid:
            result = super().__call__(*args, **kwargs)
        if not vars(self).get(TOLD):
            vars(self)[TOLD] = _tell(type(self).__name__, grid)
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuilt, (users_class(self), vars(self).copy())


def _tell(name: str, grid: FollowGrid) -> bool:
    """Warn about what the call did and eager mode would not have done; return whether there was any."""
    if grid.unquantized:
        warn_user(
            "TQ425",
            f"{name}: quantized modules are given floats that no QuantStub or quantized module rounded, at "
            f"{_first(grid.unquantized)}; eager mode fails there. They compute with these floats.",
        )
    if grid.left:
        warn_user(
            "TQ426",
            f"{name}: {_first(grid.left)} of quantized values computes floats; eager mode fails there. Use "
            "a FloatFunctional, or put a DeQuantStub in front.",
        )
    if grid.by_hand:
        warn_user(
            "TQ427",
            f"{name} calls {_first(grid.by_hand)} of torch.ops.quantized by hand, which runs on quantized "
            "tensors, and cannot be exported. Use the float module with a qconfig, or a FloatFunctional.",
        )
    return bool(grid.unquantized or grid.left or grid.by_hand)


def _first(names: Iterable[str]) -> str:
    return ", ".join(list(names)[:5])


@functools.cache
def _class_of(users: Any) -> type[nn.Module]:
    members = {"__module__": users.__module__, "__qualname__": users.__qualname__, "__doc__": users.__doc__}
    return type(users.__name__, (ConvertedEager, users), members)


def users_class(model: nn.Module) -> type[nn.Module]:
    """Return the class that the user wrote."""
    cls = type(model)
    return cls.__mro__[2] if isinstance(model, ConvertedEager) else cls


def mark_converted(model: nn.Module) -> None:
    """Make ``model`` a converted model, in place."""
    if not isinstance(model, ConvertedEager):
        model.__class__ = _class_of(type(model))  # type: ignore[arg-type]


def decide(model: nn.Module, decisions: Iterable[Decision]) -> None:
    """Keep the decisions about ``model`` for ``explain``."""
    vars(model)[MODULE_DECISIONS] = tuple(decisions)


def _rebuilt(users: type[nn.Module], state: dict[str, Any]) -> nn.Module:
    cls: Any = _class_of(users)  # type: ignore[arg-type]
    model: nn.Module = cls.__new__(cls)
    vars(model).update(state)
    return model


# Custom modules compute their own results, whose grids they know.


def keep_custom_results(converted: OpaqueModule) -> None:
    """Let ``converted`` hand its qparams on with its results."""
    converted.register_forward_pre_hook(_enter, prepend=True)
    converted.register_forward_hook(_leave, always_call=True)


def _enter(module: nn.Module, _inputs: Any) -> None:
    mode = active()
    if mode is not None:
        mode.is_paused = True


def _leave(module: Any, _inputs: Any, result: Any) -> None:
    mode = active()
    if mode is None:
        return
    mode.is_paused = False
    values = [value for value in pytree.tree_leaves(result) if isinstance(value, Tensor)]
    for value, qparams in zip(values, module.opaque_output_qparams(values), strict=False):
        if qparams is not None:
            mode.know(value, qparams)
