"""Read a BackendConfig, object or dict, into a ``BackendTable``: pattern -> its observation and dtypes.

The patterns are torch.ao's own objects; none is declared again here. A fused pattern lists its ops in the
order they run: ``(nn.Linear, nn.ReLU)``.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from types import MappingProxyType
from typing import Any

from torch import nn

from torchq_compat.read.old_forms import check_keys, read_config
from torchq_compat.read.qconfig_mappings import ObjectType
from torchq_compat.support import argument_checks as checks
from torchq_compat.support import torch_ao
from torchq_compat.support.torch_ao import backend_config as torch_ao_backend_config
from torchq_compat.support.user_warnings import warn_user

#: The keys that torch.ao's own dict form of a pattern uses.
PATTERN_KEYS = tuple(
    value for name, value in vars(torch_ao_backend_config).items() if name.endswith("_DICT_KEY")
)

#: The expected types of attributes that torch.ao's setters do not check.
ENTRIES = {
    "name": checks.instance_of(str),
    "_pattern_complex_format_to_config": checks.mapping_of(
        checks.ANYTHING, checks.instance_of(torch_ao.BackendPatternConfig)
    ),
}
DICT_ENTRIES = {"configs": checks.names_of(checks.ANYTHING)}
PATTERN_ENTRIES = {
    "observation_type": checks.instance_of(torch_ao.ObservationType),
    "dtype_configs": checks.names_of(checks.instance_of(torch_ao.DTypeConfig)),
    "_num_tensor_args_to_observation_type": checks.mapping_of(
        checks.INDEX, checks.instance_of(torch_ao.ObservationType)
    ),
    "_input_type_to_index": checks.mapping_of(checks.instance_of(str), checks.INDEX),
}
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True)
class Join:
    """An op of a fused pattern with a second input from outside the pattern, such as the add of conv + add.

    Attributes:
        side: the index of the argument that comes from inside the pattern.
    """

    object_type: ObjectType
    side: int


PatternPart = ObjectType | Join
Pattern = PatternPart | tuple[PatternPart, ...]


@dataclass(frozen=True)
class PatternEntry:
    """One row of a BackendConfig.

    Attributes:
        input_type_to_index: the positions of the "weight" and "bias" arguments of a function; every other
            argument is an activation.
        is_fused_module: whether FX replaces the modules of the pattern by one module before it reads
            QConfigs.
        fuser_method: returns that module, called with whether it trains and the modules in the order they
            run. None if there is none, or if it accepts the modules in torch.ao's complex format.
    """

    pattern: Pattern
    observation_type: torch_ao.ObservationType
    observation_type_by_tensor_count: Mapping[int, torch_ao.ObservationType]
    dtype_configs: tuple[torch_ao.DTypeConfig, ...]
    input_type_to_index: Mapping[str, int]
    is_fused_module: bool
    fuser_method: Callable[..., nn.Module] | None = field(default=None, compare=False)

    def observation_for(self, tensor_count: int) -> torch_ao.ObservationType:
        """Return how the op is observed: ``x + 1`` may share the observer of ``x``, ``x + y`` have its own.

        Args:
            tensor_count: the number of positional arguments that are tensors, counting repeated ones.
        """
        return self.observation_type_by_tensor_count.get(tensor_count, self.observation_type)


@dataclass(frozen=True)
class BackendTable:
    """The patterns of a BackendConfig, by the object types that they consist of."""

    name: str
    entries: Mapping[Pattern, PatternEntry]

    @cached_property
    def beginnings(self) -> frozenset[Pattern]:
        """The first two or more ops of every fused pattern, including the whole pattern."""
        chains = [pattern for pattern in self.entries if isinstance(pattern, tuple)]
        return frozenset(chain[:end] for chain in chains for end in range(2, len(chain) + 1))

    def may_start(self, *chain: tuple[PatternPart, ...]) -> bool:
        """Return whether a fused pattern starts with ``chain``; each op is given by all its object types."""
        return any(pattern in self.beginnings for pattern in itertools.product(*chain))

    def find(self, *chain: tuple[PatternPart, ...]) -> PatternEntry | None:
        """Return the entry of one op (one argument) or of a fused pattern; each op is given by all its object
        types."""
        patterns = chain[0] if len(chain) == 1 else itertools.product(*chain)
        return next((self.entries[pattern] for pattern in patterns if pattern in self.entries), None)


def read_backend_config(value: torch_ao.BackendConfig | dict[str, Any] | None) -> BackendTable:
    """Read the config once; None means FX's default, the native backend.

    Raises:
        ConfigError: wrong type, unknown dict key.
    """
    if value is None:
        return _native_table()
    if isinstance(value, dict):
        configs = value.get("configs", ())
        checks.check_settings("backend_config", DICT_ENTRIES, {"configs": configs})
        for position, config in enumerate(configs):
            if isinstance(config, dict):
                check_keys(f"backend_config: configs[{position}]", config, PATTERN_KEYS)
    value = read_config("backend_config", value, ("name", "configs"), torch_ao.BackendConfig, ENTRIES)
    by_pattern: dict[Any, torch_ao.BackendPatternConfig] = {}
    for config in value.configs:
        nested = config._pattern_complex_format
        pattern = _in_order(nested) if config.pattern is None else config.pattern
        if pattern is None:
            warn_user("TQ306", backend=value.name, pattern=_in_words(nested))
        else:
            by_pattern[pattern] = config
    entries = {pattern: _entry(pattern, config, by_pattern) for pattern, config in by_pattern.items()}
    return BackendTable(name=value.name, entries=MappingProxyType(entries))


@cache
def _native_table() -> BackendTable:
    return read_backend_config(torch_ao.get_native_backend_config())


def _in_order(nested: Any) -> Any:
    """Convert a pattern in the complex format, ``(last op, its arguments)``, to the order the ops run; return
    None if two ops of the pattern feed one op."""
    if not isinstance(nested, tuple):
        return nested
    op, *arguments = nested
    inside = [i for i, argument in enumerate(arguments) if argument is not torch_ao.MatchAllNode]
    if not inside:
        return op
    before = _in_order(arguments[inside[0]]) if len(inside) == 1 else None
    if before is None:
        return None
    last = op if len(arguments) == 1 else Join(op, inside[0])
    return (*before, last) if isinstance(before, tuple) else (before, last)


def _in_words(nested: Any) -> str:
    """Return the pattern as text: ``ReLU(add(Linear, MatchAllNode))``."""
    if not isinstance(nested, tuple):
        return getattr(nested, "__name__", str(nested))
    op, *arguments = nested
    return f"{_in_words(op)}({', '.join(map(_in_words, arguments))})"


def _entry(
    pattern: Any, config: torch_ao.BackendPatternConfig, configs: Mapping[Any, torch_ao.BackendPatternConfig]
) -> PatternEntry:
    checks.check_settings(f"backend_config: the pattern {pattern}", PATTERN_ENTRIES, vars(config))
    is_fused_module = config.fuser_method is not None
    observed_as = _after_fusing(pattern, config, configs) if is_fused_module else config
    return PatternEntry(
        pattern=pattern,
        observation_type=observed_as.observation_type,
        observation_type_by_tensor_count=MappingProxyType(
            dict(observed_as._num_tensor_args_to_observation_type)
        ),
        dtype_configs=tuple(observed_as.dtype_configs),
        input_type_to_index=MappingProxyType(dict(config._input_type_to_index)),
        is_fused_module=is_fused_module,
        fuser_method=config.fuser_method if config.pattern is not None else None,
    )


def _after_fusing(
    pattern: Any, config: torch_ao.BackendPatternConfig, configs: Mapping[Any, torch_ao.BackendPatternConfig]
) -> torch_ao.BackendPatternConfig:
    """Return the row that applies to a pattern whose modules FX replaces by one before it reads the rows
    again: the row of that module. A batch norm after another module is folded and does not count."""
    first, *remaining = pattern if isinstance(pattern, tuple) else (pattern,)
    kept = (first, *(part for part in remaining if part not in BATCH_NORMS))
    unfolded = configs.get(kept, config) if len(kept) <= len(remaining) else config
    module = first if len(kept) == 1 else unfolded.fused_module
    if module is None:
        return config
    return configs.get(module) or torch_ao.BackendPatternConfig(module)
