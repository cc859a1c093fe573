"""The classes of prepared and converted eager models: the user's own; states are checked before they are
loaded, and calls of a converted model follow the values on their grids.
"""

import copyreg
import functools
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchq_compat.capture.opaque_calls import OpaqueModule, refuse_eager_engine
from torchq_compat.custom_modules import handler_of
from torchq_compat.eager.grid import FollowGrid, following
from torchq_compat.eager.qdq_modules import IntegerWeight, unpack
from torchq_compat.errors import CheckpointError, ExportError
from torchq_compat.fx_state.load import translated_state
from torchq_compat.model.other_tools import refuse_tools
from torchq_compat.model.state import CHECKED, check_state, is_fx_state, load_whole
from torchq_compat.support import later_stages
from torchq_compat.support.argument_checks import listed
from torchq_compat.support.decisions import MODULE_DECISIONS, Decision, warn_of_decisions
from torchq_compat.support.process_state import draws_kept
from torchq_compat.support.user_warnings import warn_user

WARNED = "_torchq_compat_told"
#: The attribute that has shapes and dtypes of the last call, also of the prepared model's.
CALLED_WITH = "_torchq_compat_called_with"


class EagerModel(nn.Module):
    """A mixin for the class of a user's model that is prepared: states are checked before they are loaded."""

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Iterate as every module; see ``refuse_eager_engine``: nothing is converted yet."""
        refuse_eager_engine(self, sys._getframe(1))
        return super().named_children()

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state, also of torch.ao's; if it does not fit, the model is unchanged.

        Raises:
            CheckpointError: as ``load_state_dict`` of what ``prepare_fx`` returns.
        """
        load = functools.partial(super().load_state_dict, assign=assign)
        return load_whole(self, check_state(state_dict, self, self._rename), load, strict=strict)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: Mapping[str, Any], *others: Any
    ) -> None:
        if CHECKED not in metadata:  # A module that has this one is loaded.
            inside = {name: state_dict.pop(name) for name in list(state_dict) if name.startswith(prefix)}
            own = {name.removeprefix(prefix): value for name, value in inside.items()}
            checked = check_state(own, self, self._rename)
            state_dict.update((f"{prefix}{name}", value) for name, value in checked.items())
        super()._load_from_state_dict(state_dict, prefix, metadata, *others)

    def _rename(self, state: dict[str, Any]) -> None:
        """Give what torch.ao saved the names that it has here."""
        for path, module in self.named_modules():
            if isinstance(module, IntegerWeight):
                unpack(state, f"{path}.")
            elif isinstance(module, OpaqueModule):
                self._rename_custom(module, path, state)

    def _rename_custom(self, module: OpaqueModule, path: str, state: dict[str, Any]) -> None:
        given = {name: value for name, value in state.items() if name.startswith(f"{path}.")}
        inside = {name.removeprefix(f"{path}."): value for name, value in given.items()}
        if inside.keys() <= module.state_dict().keys() or not is_fx_state(inside):
            return
        if isinstance(self, ConvertedEager):
            raise CheckpointError.of("TQ960.fx_names", names=listed(sorted(given), 3))
        translated = translated_state(module, inside, handler_of(module), path)
        for name in given:
            del state[name]
        state.update((f"{path}.{name}", value) for name, value in translated.items())

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(max(protocol, 2))
        _, (cls, *arguments), *others = reduced
        return _rebuilt, (*cls.__bases__, *arguments), *others


class ConvertedEager(EagerModel):
    """A mixin for the class of a user's converted model: a call follows its quantized values."""

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Call ``nn.Module.named_children``; refuse torch.ao's tools."""
        if not torch.compiler.is_dynamo_compiling():  # It cannot look at frames.
            refuse_tools(sys._getframe(1))
        return super().named_children()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with following() as grid:
            result = super().__call__(*args, **kwargs)
        note_call(self, args, kwargs)
        if not vars(self).get(WARNED) and not torch.compiler.is_exporting():
            vars(self)[WARNED] = _tell(type(self).__name__, grid)
        return result

    def __prepare_scriptable__(self) -> nn.Module:
        """Return the model lowered for inputs like those of its last call; torch.jit calls this."""
        called_with = vars(self).get(CALLED_WITH)
        if called_with is None or None in called_with:
            raise ExportError.of("TQ930.script_before_call", kind=type(self).__name__)
        with draws_kept():
            inputs = [torch.rand(shape).to(dtype) for shape, dtype in called_with]
            scripted: nn.Module = later_stages.stage("lower_to_script")(self, tuple(inputs))
            return scripted


def note_call(model: nn.Module, args: Any, kwargs: Any) -> None:
    """Forward pre-hook of the prepared model: scripts compile what they convert before they call it."""
    vars(model)[CALLED_WITH] = None if kwargs else tuple(map(_kind_of, args))


def _kind_of(value: Any) -> tuple[torch.Size, torch.dtype] | None:
    is_known = isinstance(value, Tensor) and not torch.compiler.is_compiling()
    return (value.shape, value.dtype) if is_known else None


def _tell(name: str, grid: FollowGrid) -> bool:
    """Warn about what the call did and eager mode would not have done; return whether there was any."""
    done = {"TQ425": grid.unquantized, "TQ426": grid.left, "TQ427": grid.by_hand}
    for code, places in done.items():
        if places:
            warn_user(code, model=name, place=", ".join(list(places)[:5]))
    return any(done.values())


@functools.cache
def _class_of(mixin: type[nn.Module], users: Any) -> type[nn.Module]:
    members = {"__module__": users.__module__, "__qualname__": users.__qualname__, "__doc__": users.__doc__}
    return type(users.__name__, (mixin, users), members)


def mark(model: nn.Module, mixin: type[EagerModel]) -> None:
    """Mix ``mixin`` into the class of ``model``, which is the user's own, in place."""
    if not isinstance(model, mixin):
        users = type(model).__bases__[1] if isinstance(model, EagerModel) else type(model)
        model.__class__ = _class_of(mixin, users)  # type: ignore[arg-type]


def _rebuilt(mixin: type[nn.Module], users: type[nn.Module], *arguments: Any) -> Any:
    return copyreg.__newobj__(_class_of(mixin, users), *arguments)  # type: ignore[attr-defined, arg-type]


def decide(model: nn.Module, decisions: Iterable[Decision]) -> None:
    """Keep the decisions about ``model`` for ``explain``, and warn of those that could mislead."""
    vars(model)[MODULE_DECISIONS] = tuple(decisions)
    warn_of_decisions(vars(model)[MODULE_DECISIONS])
