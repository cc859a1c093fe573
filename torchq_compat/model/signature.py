"""The arguments that a captured model accepts, and their sizes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchq_compat.capture.sizes.input_sizes import InputSizes, is_same_value
from torchq_compat.errors import InputError
from torchq_compat.read.example_inputs import has_default
from torchq_compat.support.process_state import is_compiling
from torchq_compat.support.upstream import pytree

#: The most forms of calls that are remembered.
MOST_ACCEPTED = 512


@dataclass(frozen=True)
class CallSignature:
    """The arguments that a captured model accepts.

    Attributes:
        names: the names of the arguments, in order; None if the float model takes ``*args``.
        defaults: the arguments that the example left out; and those that have defaults, with these, except
            None in place of what the example gave.
        sizes: the conditions on the sizes of the inputs.
        positional: names of the arguments before ``*args``, and of ``*args`` itself.
    """

    names: tuple[str, ...] | None
    defaults: Mapping[str, Any]
    sizes: InputSizes = field(default_factory=InputSizes)
    positional: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: nn.Module, args: tuple[Any, ...]) -> CallSignature:
        parameters = list(inspect.signature(model.forward).parameters.values())
        if any(p.kind is p.VAR_POSITIONAL for p in parameters):
            kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
            return cls(None, {}, positional=tuple(p.name for p in parameters if p.kind not in kinds))
        given = {p.name: arg for p, arg in zip(parameters, args, strict=False)}
        defaults = {
            p.name: p.default
            for p in parameters
            if p.kind is not p.VAR_KEYWORD
            and (p.name not in given or (has_default(p) and (p.default is not None or given[p.name] is None)))
        }
        return cls(tuple(given), defaults)

    def with_sizes(self, sizes: InputSizes) -> CallSignature:
        return replace(self, sizes=sizes.prepared_for_calls())

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Return ``args`` and ``kwargs`` as the positional arguments of the captured model.

        Raises:
            InputError: missing or unexpected arguments, or sizes that the captured model does not accept.
        """
        bound = self.by_position(args, kwargs)
        self.check(bound)
        return bound

    def check(self, bound: tuple[Any, ...]) -> None:
        """Raise if the captured model does not accept the sizes of ``bound``, positional arguments.

        Raises:
            InputError: it does not.
        """
        # Under torch.jit.trace sizes are tensors, on which conditions cannot be checked.
        if is_compiling() or not torch._C._is_tracing():
            self.sizes.check(self.labelled(bound))

    def at_other_rank(self, bound: tuple[Any, ...]) -> Callable[[Callable[..., Any]], Any] | None:
        """Return what calls a model for ``bound``, a call of another rank than the example's, as one of its
        rank; None if it is no such call."""
        if not self.sizes.other_ranks:
            return None
        inputs = self.labelled(bound)
        if (other := self.sizes.other_rank(inputs)) is None:
            return None
        return partial(other[0].call, args=bound, labels=inputs, sizes=other[1])

    def call(
        self, computed: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call ``computed``, which takes the positional arguments of the captured model as its graph does.

        Raises:
            InputError: as ``bind``.
        """
        bound = self.by_position(args, kwargs or {})
        if (at_other_rank := self.at_other_rank(bound)) is not None:
            return at_other_rank(lambda *others: self.call(computed, others))
        self.check(bound)
        return computed(*bound)

    def knows(self, args: tuple[Any, ...]) -> bool:
        """Return whether a call with the same shapes and dtypes was accepted before: no check is needed.
        Do not call this while tracing."""
        if self.names is not None and len(args) != len(self.names):
            return False
        forms = _forms(args)
        return forms is not None and forms in self.sizes.accepted

    def accept(self, bound: tuple[Any, ...]) -> None:
        """Remember that a call with the shapes and dtypes of ``bound``, which ``bind`` returned, is valid."""
        if (forms := _forms(bound)) is not None:
            if len(self.sizes.accepted) >= MOST_ACCEPTED:
                self.sizes.accepted.clear()
            self.sizes.accepted.add(forms)

    def by_position(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return ``args`` and ``kwargs`` as positional arguments, of whatever sizes.

        Raises:
            InputError: missing or unexpected arguments.
        """
        if self.names is None:
            if kwargs:
                unexpected = f"unexpected argument {next(iter(kwargs))!r}"
                raise _call_does_not_match(unexpected, self.positional)
            return args
        if len(args) == len(self.names) and not kwargs:
            return args
        order = tuple(dict.fromkeys((*self.names, *self.defaults)))
        if len(args) > len(order):
            raise _call_does_not_match(f"{len(args)} arguments were given", self.names)
        given = dict(zip(order, args, strict=False))
        for name, value in kwargs.items():
            if name in given or name not in order:
                raise _call_does_not_match(f"unexpected or repeated argument {name!r}", self.names)
            given[name] = value
        for name, default in self.defaults.items():
            if name in given and name not in self.names and not _is_default(given[name], default):
                raise _call_does_not_match(
                    f"{name!r} was not in example_inputs, so it is fixed to {default!r}", self.names
                )
        given = {**self.defaults, **given}
        if missing := [name for name in self.names if name not in given]:
            raise _call_does_not_match(f"missing argument {missing[0]!r}", self.names)
        return tuple(given[name] for name in self.names)

    def labelled(self, args: tuple[Any, ...]) -> dict[str, Any]:
        """Return the leaves of ``args`` by label, in the graph's order: ``x``, ``state[0]``,
        ``batch['mask']``."""
        labels = self._labels(len(args))
        if all(isinstance(arg, Tensor) for arg in args):
            return dict(zip(labels, args, strict=True))
        matches: dict[str, Any] = {}
        for label, arg in zip(labels, args, strict=True):
            for path, leaf in pytree.tree_flatten_with_path(arg)[0]:
                matches[f"{label}{pytree.keystr(path)}"] = leaf
        return matches

    def _labels(self, count: int) -> tuple[str, ...]:
        if self.names is not None:
            more = (f"argument {index}" for index in range(len(self.names), count))
            return (*self.names[:count], *more)
        *before, remaining = self.positional
        rests = (f"{remaining}[{index}]" for index in range(count - len(before)))
        return (*before[:count], *rests)


def _forms(args: Any) -> tuple[Any, ...] | None:
    """Return the shapes and dtypes of plain tensors in tuples and lists; None if there is anything else."""
    matches: list[Any] = []
    for arg in args:
        if type(arg) is Tensor and not arg.is_nested:
            matches.append((arg.shape, arg.dtype))
        elif type(arg) in (tuple, list):
            inside = _forms(arg)
            if inside is None:
                return None
            matches.append(("inside", inside))
        else:
            return None
    return tuple(matches)


def _is_default(value: Any, default: Any) -> bool:
    return value is default or (not isinstance(value, Tensor) and is_same_value(value, default))


def _call_does_not_match(reason: str, names: tuple[str, ...]) -> InputError:
    return InputError.of("TQ901.call_does_not_match", reason=reason, names=", ".join(names))
