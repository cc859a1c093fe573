"""Reads example inputs in any of the forms that FX accepted, without using them."""

import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader

from torchq_compat.errors import ArgumentError, InputError
from torchq_compat.read.custom_configs import PREPARE_KEYS
from torchq_compat.read.old_forms import MISSING
from torchq_compat.support import torch_ao
from torchq_compat.support.argument_checks import shown
from torchq_compat.support.upstream import pytree
from torchq_compat.support.user_warnings import warn_user

#: Keys of the custom config dict that was the third argument before torch 1.13, including those that later
#: releases dropped.
OLD_CONFIG_KEYS = {
    *PREPARE_KEYS,
    "additional_quant_pattern",
    "additional_fuser_method_mapping",
    "additional_qat_module_mapping",
}
_CUSTOM = (torch_ao.PrepareCustomConfig, torch_ao.ConvertCustomConfig, torch_ao.FuseCustomConfig)
CONFIGS = (*_CUSTOM, torch_ao.QConfigMapping)
#: Types that no model takes as its only argument, and that are given here by mistake.
NO_ARGUMENT = (str, bytes, int, float, complex, set, frozenset, Iterator, nn.Module, DataLoader)
BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def read_example_inputs(value: Any, model: nn.Module | None = None) -> tuple[Any, ...]:
    """Return ``value`` as a tuple of positional arguments.

    A list becomes a tuple, a dict whose keys are parameters of ``forward`` becomes the arguments of these
    names, and any other single value becomes the only argument; each with a warning that names the new form.

    Args:
        model: the model whose ``forward`` is called with the inputs; if None, names are not checked.

    Raises:
        InputError: ``value`` is missing, None or a custom config, or fits no model or not this one.
        InputError: ``value`` holds a PackedSequence.
    """
    if value is MISSING or value is None:
        # A missing argument is a TypeError, which scripts for several versions of torch catch.
        error, stands = (
            (ArgumentError, "") if value is MISSING else (InputError, ": None stands in its place")
        )
        raise error.of("TQ902.missing", stands=stands)
    if is_old_config(value):
        raise InputError.of("TQ902.custom_config_third", value=shown(value))
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        model = None  # It is refused later, with an error of its own.
    if isinstance(value, PackedSequence):
        value = (value,)  # A PackedSequence is itself a tuple.
    args = value if isinstance(value, tuple) else _as_tuple(value, model)
    if any(_is_packed(leaf) for leaf in pytree.tree_leaves(args, is_leaf=_is_packed)):
        raise InputError.of("TQ901.packed_example")
    _check_count(args, model)
    return args


def _is_packed(value: Any) -> bool:
    return isinstance(value, PackedSequence)


def is_old_config(value: Any) -> bool:
    if isinstance(value, dict):
        return not value or OLD_CONFIG_KEYS.issuperset(value)
    return isinstance(value, CONFIGS)


def _as_tuple(value: Any, model: nn.Module | None) -> tuple[Any, ...]:
    if isinstance(value, list):
        warn_user("TQ303", kind="a list", meaning="the tuple of all arguments", form="tuple(...)")
        return tuple(value)
    if isinstance(value, Mapping) and model is not None:
        named = _by_names(value, model)
        if named is not None:
            return named
    kind = type(value).__name__
    if isinstance(value, NO_ARGUMENT) or callable(value):
        raise InputError.of("TQ902.no_tuple", kind=kind)
    warn_user(
        "TQ303", kind=f"a single {kind}", meaning="the only argument", form="(x,) with a trailing comma"
    )
    return (value,)


def _by_names(value: Mapping[str, Any], model: nn.Module) -> tuple[Any, ...] | None:
    """Return keyword arguments as positional ones; None if ``value`` is itself an argument.

    Raises:
        InputError: only some of the keys are parameters of ``forward``, or one is missing.
    """
    parameters = by_position(inspect.signature(model.forward)).parameters
    taken = [name for name, parameter in parameters.items() if parameter.kind in BY_POSITION]
    given = [name for name in taken if name in value]
    if not given:
        return None
    unknown = [str(key) for key in value if key not in given]
    forward = f"{type(model).__name__}.forward"
    if unknown:
        raise InputError.of("TQ902.unknown_name", unknown=unknown, forward=forward, taken=", ".join(taken))
    used = taken[: taken.index(given[-1]) + 1]
    args = []
    for name in used:
        if name not in value and not has_default(parameters[name]):
            raise InputError.of("TQ902.missing_name", name=name, forward=forward, taken=", ".join(taken))
        args.append(value.get(name, parameters[name].default))
    form = f"a tuple of ({', '.join(used)}) in this order"
    warn_user("TQ303", kind="a dict", meaning="keyword arguments", form=form)
    return tuple(args)


def by_position(signature: inspect.Signature) -> inspect.Signature:
    """Return ``signature`` with its keyword-only arguments by position. The default of one that has to be
    given, and stands behind a default, is ``MISSING``."""
    parameters = list(signature.parameters.values())
    if any(item.kind is item.VAR_POSITIONAL for item in parameters):
        return signature
    placed: list[inspect.Parameter] = []
    for item in parameters:
        if item.kind is item.KEYWORD_ONLY:
            item = item.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)
            if item.default is item.empty and any(map(has_default, placed)):
                item = item.replace(default=MISSING)
        placed.append(item)
    return signature.replace(parameters=placed)


def has_default(parameter: inspect.Parameter) -> bool:
    return parameter.default is not parameter.empty and parameter.default is not MISSING


def take_by_position(model: nn.Module) -> None:
    """Let ``model``, a copy, take its keyword-only arguments by position: a graph has no others."""
    if isinstance(model, torch.jit.ScriptModule):
        return  # Its class has no forward of its own.
    original: Any = type(model).forward
    signature = inspect.signature(original)
    positional = by_position(signature)
    if positional == signature:
        return

    # With self; what follows by position are keywords.
    count = sum(item.kind in BY_POSITION for item in signature.parameters.values())
    names = [name for name, item in signature.parameters.items() if item.kind is item.KEYWORD_ONLY]

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        named = {
            name: value for name, value in zip(names, args[count:], strict=False) if value is not MISSING
        }
        return original(*args[:count], *args[count + len(names) :], **named, **kwargs)

    forward.__signature__ = positional  # type: ignore[attr-defined]
    model.__class__ = type(type(model).__name__, (type(model),), {"forward": forward})


def _check_count(args: tuple[Any, ...], model: nn.Module | None) -> None:
    """Raise if there are more ``args`` than ``forward`` takes, as in a batch of a loader, which has targets
    too. FX did not check this."""
    if model is None:
        return
    parameters = by_position(inspect.signature(model.forward)).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters):
        return
    count = sum(item.kind in BY_POSITION for item in parameters)
    if len(args) > count:
        no_tensors = all(isinstance(leaf, (int, float)) for leaf in pytree.tree_leaves(args))
        key = "TQ902.numbers" if no_tensors else "TQ902.count"
        raise InputError.of(key, model=model, count=count, given=len(args))


def is_one_value_a_channel(cause: BaseException | None) -> bool:
    """Return whether ``cause`` is the error of a batch norm in training with one value per channel."""
    return isinstance(cause, ValueError) and "more than 1 value per channel when training" in str(cause)


def with_two_samples(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return ``args`` with every tensor of one sample repeated, to make a batch of two."""

    def doubled(leaf: Any) -> Any:
        is_one = isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == 1
        return torch.cat([leaf, leaf]) if is_one else leaf

    two: tuple[Any, ...] = pytree.tree_map(doubled, args)
    return two
