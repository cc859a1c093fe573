"""Read the deprecated dict forms, all by the same rule.

torch.ao's ``from_dict`` ignores unknown keys, so a typing mistake in a key silently quantizes nothing. Here
the keys are checked first; the reading itself is torch.ao's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, TypeVar

from torchq_compat.errors import ConfigError

T_co = TypeVar("T_co", covariant=True)


class FromDict(Protocol[T_co]):
    """A torch.ao config class that can read its own dict form."""

    def from_dict(self, config: dict[str, Any], /) -> T_co: ...


def read_dict_form(
    setting: str, value: dict[str, Any], known_keys: Iterable[str], config_class: FromDict[T_co]
) -> T_co:
    """Return ``value`` as an object of ``config_class``.

    Raises:
        ConfigError: a key that is not in ``known_keys``, or an entry ``from_dict`` cannot read.
    """
    check_keys(setting, value, known_keys)
    try:
        return config_class.from_dict(value)
    except Exception as cause:
        raise ConfigError(
            f"{setting} could not be read: {type(cause).__name__}: {cause}",
            hint=f"compare it with the dict form that the torch.ao documentation of {setting} shows.",
        ) from cause


def check_keys(setting: str, value: dict[str, Any], known_keys: Iterable[str]) -> None:
    """Refuse unknown keys of ``value``, which nothing would read.

    Raises:
        ConfigError: names the first unknown key.
    """
    known = tuple(known_keys)
    for key in value:
        if key not in known:
            raise ConfigError(
                f"{setting} has the unknown key {key!r}.",
                hint="the keys FX knows are: " + ", ".join(repr(k) for k in known) + ".",
            )
