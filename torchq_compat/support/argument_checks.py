"""Check the arguments of public functions on entry: a decorator, and conditions on arguments."""

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from torchq_compat.errors import ArgumentError, ConfigError

P = ParamSpec("P")
R = TypeVar("R")
SHOWN = 60


@dataclass(frozen=True)
class Expected:
    """A condition on an argument.

    Attributes:
        what: a description of the accepted values, with an article.
        accepts: returns whether a value is accepted.
        classes: classes whose instances are accepted; if a class itself is given, the hint says so.
    """

    what: str
    accepts: Callable[[Any], bool]
    classes: tuple[type, ...] = ()


def instance_of(*classes: type, what: str = "") -> Expected:
    """Accept an instance of one of ``classes``; ``what`` describes it, by default the class names."""
    named = what or " or ".join(_with_article(item.__name__) for item in classes)
    return Expected(named, lambda value: isinstance(value, classes), classes)


def optional(expected: Expected) -> Expected:
    """Accept what ``expected`` accepts, or None."""
    return Expected(
        f"{expected.what} or None",
        lambda value: value is None or expected.accepts(value),
        expected.classes,
    )


def either(one: Expected, other: Expected) -> Expected:
    """Accept what ``one`` or ``other`` accepts."""
    return Expected(
        f"{one.what}; or {other.what}", lambda value: one.accepts(value) or other.accepts(value), one.classes
    )


def one_of(*values: object) -> Expected:
    """Accept one of ``values``, of exactly its type: 1 is not True."""
    shown = ", ".join(map(repr, values))
    return Expected(
        f"one of {shown}",
        lambda value: any(type(value) is type(item) and value == item for item in values),
    )


def sequence_of(element: Expected) -> Expected:
    """Accept a list or tuple whose elements ``element`` accepts."""
    return Expected(
        f"a list or tuple, each element {element.what}",
        lambda value: _is_sequence(value) and all(map(element.accepts, value)),
    )


def names_of(element: Expected) -> Expected:
    """Accept a list, tuple or set whose elements ``element`` accepts."""
    return Expected(
        f"a list of which each element is {element.what}",
        lambda value: isinstance(value, (list, tuple, set, frozenset)) and all(map(element.accepts, value)),
    )


def mapping_of(key: Expected, value: Expected) -> Expected:
    """Accept a mapping whose keys ``key`` accepts and whose values ``value`` accepts."""
    return Expected(
        f"a mapping from {key.what} to {value.what}",
        lambda given: (
            isinstance(given, Mapping) and all(key.accepts(k) and value.accepts(v) for k, v in given.items())
        ),
    )


ANYTHING = Expected("anything", lambda value: True)
FLAG = one_of(True, False)
FUNCTION = Expected("a function", lambda value: callable(value) and not isinstance(value, type))
INDEX = Expected("an int", lambda value: isinstance(value, int) and not isinstance(value, bool))
PATH = Expected(
    "a path, as a str or os.PathLike",
    # No file system allows "\0" in a path, and pathlib does not accept bytes.
    lambda value: isinstance(value, (str, os.PathLike)) and "\0" not in str(value) and bool(os.fspath(value)),
)


def checked_arguments(**expected: Expected) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Check the named arguments, if given, in every call of the decorated function.

    Raises:
        ArgumentError: by the call, for an argument that is not accepted; the message names the function, the
            parameter and the value.
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
                raise ArgumentError.of(
                    "TQ903.signature", function=function.__name__, cause=cause, signature=signature
                ) from None
            check_arguments(function.__name__, expected, given)
            return function(*args, **kwargs)

        return checked

    return decorate


def check_arguments(function: str, expected: Mapping[str, Expected], given: Mapping[str, Any]) -> None:
    """Check the arguments ``given`` to ``function``; for callables that cannot be decorated.

    Raises:
        ArgumentError: see ``checked_arguments``.
    """
    for name, value in given.items():
        if name not in expected or expected[name].accepts(value):
            continue
        is_class = isinstance(value, type) and issubclass(value, expected[name].classes)
        key, what = "TQ903.class_itself" if is_class else "TQ903.type", expected[name].what
        raise ArgumentError.of(key, function=function, name=name, expected=what, value=shown(value))


def check_settings(setting: str, expected: Mapping[str, Expected], values: Mapping[str, Any]) -> None:
    """Check the ``values`` of a config object or its dict form.

    Raises:
        ConfigError: a value is not accepted; the message names the setting and the entry.
    """
    for name, value in values.items():
        if name in expected and not expected[name].accepts(value):
            raise ConfigError.of(
                "TQ910.setting_type",
                setting=setting,
                name=name,
                expected=expected[name].what,
                value=shown(value),
            )


def shown(value: object) -> str:
    """Return ``value`` and its type, short enough for a message."""
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a user's __repr__ may raise anything
        text = ""
    kind = type(value).__name__
    return f"{kind} {text}" if text and len(text) <= SHOWN else _with_article(kind)


def listed(names: Sequence[str], most: int = 5) -> str:
    """Return the first ``most`` of ``names``, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _is_sequence(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def _with_article(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOUaeio' or name.startswith('nn.') else 'a'} {name}"
