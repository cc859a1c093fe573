"""The deprecated forms of the configuration: dicts, and the keywords before torch 1.13."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

from torchq_compat.errors import ArgumentError, ConfigError
from torchq_compat.support import argument_checks
from torchq_compat.support.user_warnings import warn_user

# Read the deprecated dict forms, all by the same rule.
#
# torch.ao's ``from_dict`` ignores unknown keys, so a typing mistake in a key silently quantizes nothing.
# Here the keys are checked first; the reading itself is torch.ao's.


Config = TypeVar("Config")


def read_config(
    setting: str,
    value: Any,
    known_keys: Iterable[str],
    config_class: type[Config],
    entries: Mapping[str, argument_checks.Expected],
) -> Config:
    """Return ``value``, an object of ``config_class`` or its dict form; an empty one for None.

    Args:
        entries: what is accepted as attributes that torch.ao's setters do not check.

    Raises:
        ConfigError: another type, a key that is not in ``known_keys``, or an entry that cannot be read.
    """
    if isinstance(value, dict):
        check_keys(setting, value, known_keys)
        try:
            value = config_class.from_dict(value)  # type: ignore[attr-defined]
        except Exception as cause:
            raise ConfigError.of("TQ910.unreadable", setting=setting, cause=cause) from cause
    value = config_class() if value is None else value
    if not isinstance(value, config_class):
        raise ConfigError.wrong_type(setting, f"a {config_class.__name__}", value)
    argument_checks.check_settings(setting, entries, vars(value))
    return value


def check_keys(setting: str, value: dict[str, Any], known_keys: Iterable[str]) -> None:
    """Refuse unknown keys of ``value``, which nothing would read.

    Raises:
        ConfigError: names the first unknown key.
    """
    known = tuple(known_keys)
    for key in value:
        if key not in known:
            raise ConfigError.of(
                "TQ910.unknown_key", setting=setting, key=key, known=", ".join(repr(k) for k in known)
            )


# Accept keywords and flags of the FX functions before torch 1.13 with a warning that names the new form.


P = ParamSpec("P")
R = TypeVar("R")

#: Old name -> the name since torch 1.13.
KEYWORDS: Mapping[str, str] = {
    "qconfig_dict": "qconfig_mapping",
    "prepare_custom_config_dict": "prepare_custom_config",
    "convert_custom_config_dict": "convert_custom_config",
    "fuse_custom_config_dict": "fuse_custom_config",
    "backend_config_dict": "backend_config",
    "equalization_qconfig_dict": "_equalization_config",
}
IS_REFERENCE = "is_reference"
#: Default of a required argument, so that its absence raises an error of ours.
MISSING: Any = object()
EXAMPLES = "example_inputs"


def takes_old_keywords(
    reference: Callable[[], Callable[..., Any]] | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make the decorated function accept the keywords it had before torch 1.13; ``example_inputs`` are
    ``MISSING`` if the caller gives none.

    Args:
        reference: for ``convert_fx``, which had ``is_reference`` (then its second parameter): returns the
            function that is called instead if the flag is True.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters
        positions = list(parameters)

        @functools.wraps(function)
        def renamed(*args: Any, **kwargs: Any) -> R:
            kwargs = _renamed(function.__name__, parameters, kwargs)
            if EXAMPLES in positions and len(args) <= positions.index(EXAMPLES):
                kwargs.setdefault(EXAMPLES, MISSING)
            flag = None if reference is None else kwargs.pop(IS_REFERENCE, None)
            if reference is not None and flag is None and len(args) > 1 and isinstance(args[1], bool):
                flag, args = args[1], (args[0], *args[2:])
            if reference is None or flag is None:
                return function(*args, **kwargs)
            what = "write convert_to_reference_fx" if flag else "leave it out"
            warn_user("TQ302", argument=IS_REFERENCE, flag=flag, what=what)
            return (reference() if flag else function)(*args, **kwargs)

        return renamed

    return decorate


def _renamed(function: str, parameters: Mapping[str, Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    matches: dict[str, Any] = {}
    for name, value in kwargs.items():
        new = KEYWORDS.get(name, name) if name not in parameters else name
        if new not in parameters:
            new = name
        if new != name:
            warn_user("TQ301", function=function, old=name, new=new)
        if new in matches or (new != name and new in kwargs):
            raise ArgumentError.of("TQ903.given_twice", function=function, new=new, name=name)
        matches[new] = value
    return matches
