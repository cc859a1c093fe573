"""Fused patterns of a BackendConfig: the chains of ops that run as one, with nothing observed between them.

FX has two kinds. A pattern with a fuser method replaces modules by a fused one before any QConfig is looked
at: the QConfig of the first module counts, and one by object type has to be the same for all of them. A
pattern without, of functions, is matched later: the QConfig of the last op counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from torch.ao.quantization.qconfig import qconfig_equals
from torch.fx import Node

from torchq_compat.annotate.groups import OpGroup
from torchq_compat.errors import ConfigError
from torchq_compat.legacy.backend_configs import BackendTable, PatternEntry
from torchq_compat.legacy.qconfig_mappings import ObjectType, QConfigRules
from torchq_compat.specs.selectors import Selection, select_for_function, select_for_module

__all__ = ["Chain", "find_chains"]


@dataclass(frozen=True)
class Chain:
    """Ops that run as one, in the order they run; most chains have one.

    Attributes:
        entry: the backend's row for it, None if it has none.
        input_type_to_index: where the first op, if it is a function, has its weight and bias.
        selection: the QConfig that counts for all of it.
        observes_inputs: False where the first op's own QConfig is None.
    """

    ops: tuple[OpGroup, ...]
    entry: PatternEntry | None
    input_type_to_index: Mapping[str, int]
    selection: Selection
    observes_inputs: bool

    @property
    def first(self) -> OpGroup:
        return self.ops[0]

    @property
    def last(self) -> OpGroup:
        return self.ops[-1]


def find_chains(groups: list[OpGroup], rules: QConfigRules, backend: BackendTable) -> list[Chain]:
    """The longest chains of the backend's fused patterns; an op in none is a chain of its own.

    Raises:
        ConfigError: modules that fuse have different QConfigs by object type.
    """
    by_node = {node: group for group in groups for node in group.nodes}
    chains: list[Chain] = []
    absorbed: set[Node] = set()
    for group in groups:
        if group.nodes[-1] in absorbed:
            continue
        ops: tuple[OpGroup, ...] = (group,)
        while (follower := _follower(ops, by_node, backend)) is not None:
            absorbed.add(follower.nodes[-1])
            ops = (*ops, follower)
        chains.append(_chain(ops, rules, backend))
    return chains


def _follower(
    ops: tuple[OpGroup, ...], by_node: Mapping[Node, OpGroup], backend: BackendTable
) -> OpGroup | None:
    """The op behind ``ops`` that the backend fuses with them."""
    output = ops[-1].output
    if output is None or len(output.users) != 1:
        return None
    follower = by_node.get(next(iter(output.users)))
    if follower is None or len(follower.inputs) != 1:
        return None
    return follower if _entry((*ops, follower), backend) is not None else None


def _entry(ops: tuple[OpGroup, ...], backend: BackendTable) -> PatternEntry | None:
    return backend.find(*(op.origin.object_types for op in ops))


def _chain(ops: tuple[OpGroup, ...], rules: QConfigRules, backend: BackendTable) -> Chain:
    entry, own_entry = _entry(ops, backend), _entry(ops[:1], backend)
    roles = own_entry.input_type_to_index if own_entry else {}
    first, last = _select(rules, ops[0]), _select(rules, ops[-1])
    if entry is not None and entry.is_fused_module:
        _check_one_qconfig(ops, entry, rules)
        last = first
    return Chain(ops, entry, roles, last, observes_inputs=first.qconfig is not None)


def _check_one_qconfig(ops: tuple[OpGroup, ...], entry: PatternEntry, rules: QConfigRules) -> None:
    pattern = entry.pattern if isinstance(entry.pattern, tuple) else (entry.pattern,)
    types = [_module_type(part) for part in pattern]
    first, *others = (rules.object_types.get(kind) for kind in types)
    for kind, qconfig in zip(types[1:], others, strict=True):
        if not qconfig_equals(qconfig, first):
            raise ConfigError.conflict_in_fused_pattern(
                ops[0].label, [getattr(part, "__name__", str(part)) for part in types], str(kind.__name__)
            )


def _module_type(part: ObjectType) -> type:
    """FX puts an nn.ReLU into the fused module for a functional relu."""
    return part if isinstance(part, type) else nn.ReLU


def _select(rules: QConfigRules, group: OpGroup) -> Selection:
    origin = group.origin
    if origin.is_module_call:
        return select_for_module(rules, origin.module_type, origin.module_path, group.call_index)
    return select_for_function(
        rules, origin.object_types, origin.module_type, origin.module_path, group.call_index
    )
