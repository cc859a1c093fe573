"""The arguments of public functions, checked on entry: one decorator, and what may stand where."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from torchq_compat.errors import ArgumentError, ConfigError

__all__ = [
    "ANYTHING",
    "FLAG",
    "INDEX",
    "PATH",
    "Expected",
    "check_arguments",
    "check_settings",
    "checked_arguments",
    "instance_of",
    "mapping_of",
    "names_of",
    "one_of",
    "optional",
    "sequence_of",
    "shown",
    "wrong_argument",
]

P = ParamSpec("P")
R = TypeVar("R")
SHOWN = 60


@dataclass(frozen=True)
class Expected:
    """A condition on an argument.

    Attributes:
        what: in words, with an article.
        accepts: whether a value is that.
        classes: of which one instance is needed; where the class itself is given, the hint says so.
    """

    what: str
    accepts: Callable[[Any], bool]
    classes: tuple[type, ...] = ()


def instance_of(*classes: type, what: str = "") -> Expected:
    """Return an instance of one of ``classes``."""
    named = what or " or ".join(_with_article(each.__name__) for each in classes)
    return Expected(named, lambda value: isinstance(value, classes), classes)


def optional(expected: Expected) -> Expected:
    """The same, or None."""
    return Expected(
        f"{expected.what} or None",
        lambda value: value is None or expected.accepts(value),
        expected.classes,
    )


def one_of(*values: object) -> Expected:
    """One of a few constants, of the very type: 1 is not True."""
    shown = ", ".join(map(repr, values))
    return Expected(
        f"one of {shown}",
        lambda value: any(type(value) is type(each) and value == each for each in values),
    )


def sequence_of(element: Expected) -> Expected:
    """Return a list or tuple of such elements."""
    return Expected(
        f"a list or tuple, each element {element.what}",
        lambda value: _is_sequence(value) and all(map(element.accepts, value)),
    )


def names_of(element: Expected) -> Expected:
    """Return a list, tuple or set of such elements."""
    return Expected(
        f"a list of which each element is {element.what}",
        lambda value: isinstance(value, (list, tuple, set, frozenset)) and all(map(element.accepts, value)),
    )


def mapping_of(key: Expected, value: Expected) -> Expected:
    """Return a dict or other mapping from such keys to such values."""
    return Expected(
        f"a mapping from {key.what} to {value.what}",
        lambda given: (
            isinstance(given, Mapping) and all(key.accepts(k) and value.accepts(v) for k, v in given.items())
        ),
    )


ANYTHING = Expected("anything", lambda value: True)
FLAG = one_of(True, False)
INDEX = Expected("an int", lambda value: isinstance(value, int) and not isinstance(value, bool))
PATH = Expected(
    "a path, as a str or os.PathLike",
    # "\0" is what no file system has; bytes are no path to pathlib.
    lambda value: isinstance(value, (str, os.PathLike)) and "\0" not in str(value) and bool(os.fspath(value)),
)


def checked_arguments(**expected: Expected) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Check the named arguments of every call of the decorated function, those it is given.

    Raises:
        ArgumentError: by the call; names the function, the parameter and what stands there.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        unknown = expected.keys() - signature.parameters.keys()
        assert not unknown, f"{function.__name__} has no {unknown}"

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                given = signature.bind(*args, **kwargs).arguments
            except TypeError as cause:
                raise ArgumentError(
                    f"{function.__name__} cannot be called like this: {cause!s}.",
                    hint=f"it takes {signature}.",
                ) from None
            check_arguments(function.__name__, expected, given)
            return function(*args, **kwargs)

        return checked

    return decorate


def check_arguments(function: str, expected: Mapping[str, Expected], given: Mapping[str, Any]) -> None:
    """Check the arguments ``given`` to ``function``, where no decorator can.

    Raises:
        ArgumentError: see ``checked_arguments``.
    """
    for name, value in given.items():
        if name in expected and not expected[name].accepts(value):
            raise wrong_argument(function, name, expected[name], value)


def check_settings(setting: str, expected: Mapping[str, Expected], values: Mapping[str, Any]) -> None:
    """Check what stands in a config object or its dict form.

    Raises:
        ConfigError: names the setting and the entry.
    """
    for name, value in values.items():
        if name in expected and not expected[name].accepts(value):
            raise ConfigError(
                f"{setting}: {name} must be {expected[name].what}, got {shown(value)}.",
                hint="set it with the methods of the torch.ao class, or see the documented dict form of "
                f"{setting}.",
            )


def wrong_argument(function: str, name: str, expected: Expected, value: object) -> ArgumentError:
    """Return the error about ``value``, which is not what is ``expected`` of the parameter ``name``."""
    hint = f"give {name}= {expected.what}; help({function}) says what it is for."
    if isinstance(value, type) and issubclass(value, expected.classes):
        hint = f"this is the class itself; give an instance of it, as in {value.__name__}(...)."
    return ArgumentError(
        f"{function}: {name} must be {expected.what}, got {shown(value)}.",
        hint=hint,
    )


def shown(value: object) -> str:
    """Return ``value`` and its type, short enough for a message."""
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a __repr__ of the user's own may do anything
        text = ""
    kind = type(value).__name__
    return f"{kind} {text}" if text and len(text) <= SHOWN else _with_article(kind)


def _is_sequence(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def _with_article(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOUaeio' or name.startswith('nn.') else 'a'} {name}"
