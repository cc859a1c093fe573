"""What FX leaves behind in a legacy script under ``run``: random draws, and checkpoints."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from torchq_compat.checkpoints import load_fx_state
from torchq_compat.errors import CheckpointError, QuantizationWarning
from torchq_compat.model.graph_module import QuantizationGraphModule, Stage
from torchq_compat.model.state import accept_fx_states
from torchq_compat.port.names import CONVERTING, PREPARING
from torchq_compat.port.running.redirections import calling_fx, fx_is_called
from torchq_compat.quantize.first_call import WaitingModel
from torchq_compat.support import metadata

# torch's random generator in a legacy script under ``run``: it goes on as behind FX's functions.
#
# FX constructs modules for training and for the converted model, whose initial weights are drawn and thrown
# away; the functions of this package leave the generator alone. In a script that seeds once and draws data
# later, every later number would differ. So FX's own function runs beside ours, on a copy that shares the
# parameters, only to leave the generator as it does. If FX cannot run the model, or this torch has no FX,
# nothing is drawn.


EAGER = ("quantize_dynamic",)
OURS = "torchq_compat."

Function = Callable[..., Any]


class FxModel:
    """What FX prepared beside a model of ours, for FX to convert; copies of our model share it, and files do
    not have it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __deepcopy__(self, memo: dict[int, Any]) -> FxModel:
        return self

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def drawing_as_fx(function: Function, original: Function) -> Function:
    """Return ``function``, which replaces ``original``, so that it leaves torch's generator as FX does; while
    FX runs, it is ``original``."""
    if original is function or original.__module__.startswith(OURS):
        return function

    @functools.wraps(function)
    def drawing(*args: Any, **kwargs: Any) -> Any:
        if fx_is_called():
            return original(*args, **kwargs)
        before = torch.get_rng_state()
        unchanged = _copied(args, kwargs) if _observes_custom_modules(function, args) else None
        result = function(*args, **kwargs)
        draw = functools.partial(_drawn, original, before)
        if function.__name__ in PREPARING:
            prepared = draw(args, kwargs)
            if prepared is not None and isinstance(result, (GraphModule, WaitingModel)):
                metadata.FX_MODEL.write(cast("GraphModule", result), FxModel(prepared))
        elif function.__name__ in CONVERTING:
            source = args[0] if args else kwargs.get("graph_module")
            has_meta = isinstance(source, (GraphModule, WaitingModel))
            theirs = metadata.FX_MODEL.of(cast("GraphModule", source)) if has_meta else None
            if theirs is not None:
                draw((theirs.model, *args[1:]), _without(kwargs, "graph_module"))
        elif function.__name__ in EAGER:
            draw(args, kwargs)
        elif unchanged is not None:
            draw(*unchanged)
        return result

    return drawing


def _observes_custom_modules(function: Function, args: tuple[Any, ...]) -> bool:
    """Return whether eager mode makes observed modules of modules in ``args``: those draw weights."""
    if function.__name__ not in ("prepare", "prepare_qat") or not args or not isinstance(args[0], nn.Module):
        return False
    return any(isinstance(module, (nn.LSTM, nn.MultiheadAttention)) for module in args[0].modules())


def _drawn(
    original: Function, before: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> nn.Module | None:
    """Call FX's function on copies, in silence, from the state ``before`` of the generator on, and leave the
    generator as it does; return its result.

    If it raises, the generator stays as it is, and the result is None.
    """
    otherwise = torch.get_rng_state()
    try:
        with _silence():
            args, kwargs = _copied(args, kwargs)
            torch.set_rng_state(before)  # Copying may have drawn.
            with calling_fx():
                result: nn.Module = original(*args, **kwargs)
            return result
    except (Exception, SystemExit):
        torch.set_rng_state(otherwise)
        return None


def _copied(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return copies that share the parameters of the modules, which FX does not write."""
    modules = [value for value in (*args, *kwargs.values()) if isinstance(value, nn.Module)]
    parameters = {id(parameter): parameter for module in modules for parameter in module.parameters()}
    return copy.deepcopy((args, kwargs), dict(parameters))


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    disabled = logging.root.manager.disable
    with (
        warnings.catch_warnings(action="ignore"),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(disabled)


# FX's checkpoints in a legacy script under ``run``: ``model.load_state_dict(torch.load(path))`` works.
#
# A prepared model loads the state as ``load_fx_state`` does. A converted model is converted again from the
# prepared model it came from, with the state loaded into that; so each converted model keeps a copy of its
# prepared model.


def accept_checkpoints() -> None:
    """Let ``load_state_dict`` of our models accept states of FX in this process."""
    accept_fx_states(_load)


def remembering_prepared(function: Function) -> Function:
    """Return ``function``; if it converts, its results keep a copy of the prepared model."""
    if function.__name__ not in CONVERTING:
        return function

    @functools.wraps(function)
    def remembering(*args: Any, **kwargs: Any) -> Any:
        converted = function(*args, **kwargs)
        prepared = args[0] if args else kwargs.get("graph_module")
        if isinstance(prepared, QuantizationGraphModule):
            source = copy.deepcopy(prepared)
            metadata.CONVERTED_FROM.write(
                converted.reference, lambda: function(source, *args[1:], **_without(kwargs, "graph_module"))
            )
            metadata.PREPARED.write(converted.reference, source)
        return converted

    return remembering


def _load(model: QuantizationGraphModule, state: Mapping[str, Any]) -> Any:
    if model.record.stage is Stage.PREPARED:
        load_fx_state(model, state)
        # This is the result of load_state_dict if all keys match.
        return nn.Module().load_state_dict({})
    prepared, convert = metadata.PREPARED.of(model.reference), metadata.CONVERTED_FROM.of(model.reference)
    if prepared is None or convert is None:
        raise CheckpointError.of("TQ960.copy")
    load_fx_state(prepared, state)
    # These warnings were given when the script converted.
    with warnings.catch_warnings(action="ignore", category=QuantizationWarning):
        return model.load_state_dict(convert().state_dict())


def _without(kwargs: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in kwargs.items() if key != name}
