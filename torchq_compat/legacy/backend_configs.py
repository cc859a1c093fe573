"""BackendConfig, object or dict -> ``BackendTable``: pattern -> how it is observed and which dtypes it takes.

The patterns are torch.ao's own objects; nothing is typed again here. A fused pattern is written in the order
the ops run: ``(nn.Linear, nn.ReLU)``.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

# BackendConfig reads a sub-module of its package that the package does not import by itself.
import torch.ao.quantization.backend_config.utils  # noqa: F401
from torch.ao.quantization.backend_config import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    ObservationType,
    get_native_backend_config,
)
from torch.ao.quantization.utils import MatchAllNode

from torchq_compat.errors import ConfigError
from torchq_compat.legacy.dict_forms import read_dict_form
from torchq_compat.legacy.qconfig_mappings import ObjectType

__all__ = ["BackendTable", "Join", "PatternEntry", "read_backend_config"]


@dataclass(frozen=True)
class Join:
    """An op of a fused pattern with a second input from outside, like the add of conv + add.

    Attributes:
        side: which argument of the op is the one from inside the pattern.
    """

    object_type: ObjectType
    side: int


PatternPart = ObjectType | Join
Pattern = PatternPart | tuple[PatternPart, ...]


@dataclass(frozen=True)
class PatternEntry:
    """One row of a BackendConfig.

    Attributes:
        input_type_to_index: where a function has its "weight" and its "bias"; one that is not named here is
            an activation.
        is_fused_module: FX replaces the modules of the pattern by one before it looks at QConfigs.
    """

    pattern: Pattern
    observation_type: ObservationType
    observation_type_by_tensor_count: Mapping[int, ObservationType]
    dtype_configs: tuple[DTypeConfig, ...]
    input_type_to_index: Mapping[str, int]
    is_fused_module: bool

    def observation_for(self, tensor_count: int) -> ObservationType:
        """``x + 1`` shares the observer of ``x`` where ``x + y`` gets its own.

        Args:
            tensor_count: how many positional arguments of the op are tensors, repeated ones included.
        """
        return self.observation_type_by_tensor_count.get(tensor_count, self.observation_type)


@dataclass(frozen=True)
class BackendTable:
    """The patterns of a BackendConfig by the object types they name."""

    name: str
    entries: Mapping[Pattern, PatternEntry]

    def find(self, *chain: tuple[PatternPart, ...]) -> PatternEntry | None:
        """The entry of one op (one argument) or of a fused chain, each op given by all its object types."""
        patterns = chain[0] if len(chain) == 1 else itertools.product(*chain)
        return next((self.entries[pattern] for pattern in patterns if pattern in self.entries), None)


def read_backend_config(value: BackendConfig | dict[str, Any] | None) -> BackendTable:
    """Read the config once; None is FX's default, the native backend.

    Raises:
        ConfigError: wrong type, unknown dict key.
    """
    if value is None:
        value = get_native_backend_config()
    if isinstance(value, dict):
        value = read_dict_form("backend_config", value, ("name", "configs"), BackendConfig)
    if not isinstance(value, BackendConfig):
        raise ConfigError.wrong_type("backend_config", "a BackendConfig", value)
    entries: dict[Any, PatternEntry] = {}
    for config in value.configs:
        pattern = config.pattern if config.pattern is not None else _in_order(config._pattern_complex_format)
        entries[pattern] = _entry(pattern, config)
    return BackendTable(name=value.name, entries=MappingProxyType(entries))


def _in_order(nested: Any) -> Any:
    """A pattern in the complex format, ``(last op, its arguments)``, in the order the ops run.

    Raises:
        ConfigError: two ops with inputs of the pattern; FX's own configs have none.
    """
    if not isinstance(nested, tuple):
        return nested
    op, *arguments = nested
    inside = [i for i, argument in enumerate(arguments) if argument is not MatchAllNode]
    if len(inside) != 1:
        raise ConfigError.not_supported(
            f"backend_config: pattern {nested}",
            "an exported graph is matched for chains of ops, each with one input from the one before",
            "split the pattern into chains.",
        )
    before = _in_order(arguments[inside[0]])
    last = op if len(arguments) == 1 else Join(op, inside[0])
    return (*before, last) if isinstance(before, tuple) else (before, last)


def _entry(pattern: Any, config: BackendPatternConfig) -> PatternEntry:
    return PatternEntry(
        pattern=pattern,
        observation_type=config.observation_type,
        observation_type_by_tensor_count=MappingProxyType(dict(config._num_tensor_args_to_observation_type)),
        dtype_configs=tuple(config.dtype_configs),
        input_type_to_index=MappingProxyType(dict(config._input_type_to_index)),
        is_fused_module=config.fuser_method is not None,
    )
