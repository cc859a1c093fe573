"""torch's random generator in a legacy script under ``run``: it goes on as behind FX's functions.

FX constructs modules for training and for the converted model, whose initial weights are drawn and thrown
away; the functions of this package leave the generator alone. In a script that seeds once and draws data
later, every later number would differ. So FX's own function runs beside ours, on a copy that shares the
parameters, only to leave the generator as it does. If FX cannot run the model, or this torch has no FX,
nothing is drawn.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from torchq_compat.migrate.legacy_api.legacy_names import CONVERTING, PREPARING
from torchq_compat.migrate.running.fx_switch import calling_fx, fx_is_called
from torchq_compat.support import metadata

__all__ = ["FxModel", "drawing_as_fx"]

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

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _nothing, ()


def _nothing() -> None:
    return None


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
        result = function(*args, **kwargs)
        draw = functools.partial(_drawn, original, before)
        if function.__name__ in PREPARING:
            prepared = draw(args, kwargs)
            if prepared is not None and isinstance(result, GraphModule):
                metadata.FX_MODEL.write(result, FxModel(prepared))
        elif function.__name__ in CONVERTING:
            source = args[0] if args else kwargs.get("graph_module")
            theirs = metadata.FX_MODEL.of(source) if isinstance(source, GraphModule) else None
            if theirs is not None:
                others = {name: value for name, value in kwargs.items() if name != "graph_module"}
                draw((theirs.model, *args[1:]), others)
        elif function.__name__ in EAGER:
            draw(args, kwargs)
        return result

    return drawing


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
    parameters = {id(each): each for module in modules for each in module.parameters()}
    return copy.deepcopy((args, kwargs), dict(parameters))


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    disabled = logging.root.manager.disable
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(disabled)
