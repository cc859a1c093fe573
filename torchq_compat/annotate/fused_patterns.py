"""Fused patterns of a BackendConfig: ops that run as one, with nothing observed between them.

FX has two kinds. A pattern with a fuser method replaces modules by a fused one before any QConfig is read:
the QConfig of the first module applies, and QConfigs by object type must be the same for all of the modules.
A pattern without a fuser method, of functions, is matched later: the QConfig of the last op applies.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.fx import Node

from torchq_compat.annotate.op_records import OpRecord
from torchq_compat.annotate.source_partitions import SourcePartition
from torchq_compat.config.backend_configs import BATCH_NORMS, BackendTable, Join, PatternEntry, PatternPart
from torchq_compat.config.qconfig_mappings import ObjectType, QConfigRules
from torchq_compat.errors import ConfigError
from torchq_compat.qspecs.selectors import Selection
from torchq_compat.support.torch_ao import qconfig_equals

__all__ = ["FusedPattern", "match_fused_patterns"]

ATEN = torch.ops.aten
TRANSPOSED = (ATEN.conv_transpose1d.default, ATEN.conv_transpose2d.input, ATEN.conv_transpose3d.input)
#: The position of their argument of that name.
GROUPS = 6


@dataclass(frozen=True)
class FusedPattern:
    """Ops that run as one; most patterns have a single op.

    Attributes:
        ops: the ops, in the order they run.
        entry: the backend's entry for the pattern; None if it has none.
        input_type_to_index: the positions of weight and bias of the first op, if it is a function.
        selection: the QConfig that applies to the whole pattern.
        record: the op whose QConfig that is.
        observes_inputs: False if the first op's own QConfig is None.
    """

    ops: tuple[SourcePartition, ...]
    entry: PatternEntry | None
    input_type_to_index: Mapping[str, int]
    selection: Selection
    record: OpRecord
    observes_inputs: bool

    @property
    def first(self) -> SourcePartition:
        return self.ops[0]

    @property
    def last(self) -> SourcePartition:
        return self.ops[-1]

    @property
    def observed_partition(self) -> SourcePartition:
        """The first op, with the inputs and weights of the whole pattern that are observed."""
        partition = self.first.with_roles(self.input_type_to_index)
        if not self.observes_inputs:
            return replace(partition, inputs=(), weights=())
        # Without a fused module FX observes the inputs of the first op, and no inputs of later ones.
        if self.entry is None or not self.entry.is_fused_module:
            return partition
        return replace(partition, inputs=(*partition.inputs, *self._joining_inputs()))

    def _joining_inputs(self) -> tuple[tuple[Node, Node], ...]:
        """Return the (producer, consumer) edges from outside into the ops behind the first one."""
        inside = {node for op in self.ops for node in op.nodes}
        return tuple(edge for op in self.ops[1:] for edge in op.inputs if edge[0] not in inside)


def match_fused_patterns(
    partitions: list[SourcePartition],
    rules: QConfigRules,
    backend: BackendTable,
    folded_into: Collection[str] = (),
) -> list[FusedPattern]:
    """Return the longest matches of the backend's fused patterns; an op in no match is a pattern of its own.

    Args:
        folded_into: the labels of the ops that a batch norm may have been folded into.

    Raises:
        ConfigError: modules of a fused pattern have different QConfigs by object type.
    """
    matcher = _Matcher({node: partition for partition in partitions for node in partition.nodes}, backend)
    # If both inputs of an add could belong to a pattern, FX uses the left one.
    joined_on_the_left = {
        op.nodes[-1]
        for ops in matcher.patterns(partitions, lambda op, side: side == 0)
        for before, op in itertools.pairwise(ops)
        if _side(before, op) == 0
    }
    patterns = matcher.patterns(
        partitions, lambda op, side: side == 0 or op.nodes[-1] not in joined_on_the_left
    )
    return [_fused_pattern(ops, rules, backend, folded_into) for ops in patterns]


MayJoin = Callable[[SourcePartition, int], bool]


@dataclass(frozen=True)
class _Matcher:
    by_node: Mapping[Node, SourcePartition]
    backend: BackendTable

    def patterns(
        self, partitions: list[SourcePartition], may_join: MayJoin
    ) -> list[tuple[SourcePartition, ...]]:
        found: list[tuple[SourcePartition, ...]] = []
        absorbed: set[Node] = set()
        for partition in partitions:
            if partition.nodes[-1] in absorbed:
                continue
            ops = self._longest(partition, may_join)
            absorbed.update(op.nodes[-1] for op in ops[1:])
            found.append(ops)
        return [ops for ops in found if ops[0].nodes[-1] not in absorbed]

    def _longest(self, partition: SourcePartition, may_join: MayJoin) -> tuple[SourcePartition, ...]:
        """Return the longest pattern that starts with ``partition``; its beginnings need not be patterns."""
        longest: tuple[SourcePartition, ...] = (partition,)
        ops = longest
        while (follower := self._follower(ops, may_join)) is not None:
            ops = (*ops, follower)
            if _entry(ops, self.backend) is not None:
                longest = ops
        return longest

    def _follower(self, ops: tuple[SourcePartition, ...], may_join: MayJoin) -> SourcePartition | None:
        """Return the op behind ``ops`` that continues a fused pattern of the backend, or None."""
        output = ops[-1].output
        if output is None or len(output.users) != 1:
            return None
        follower = self.by_node.get(next(iter(output.users)))
        if follower is None or not self.backend.may_start(*_pattern_parts((*ops, follower))):
            return None
        side = _side(ops[-1], follower)
        return follower if side is None or may_join(follower, side) else None


def _entry(ops: tuple[SourcePartition, ...], backend: BackendTable) -> PatternEntry | None:
    return backend.find(*_pattern_parts(ops))


def _pattern_parts(ops: tuple[SourcePartition, ...]) -> tuple[tuple[PatternPart, ...], ...]:
    """List, for each of ``ops``, the object types by which a pattern may name it."""
    parts = [_parts(before, op) for before, op in itertools.pairwise(ops)]
    return (ops[0].origin.object_types, *parts)


def _parts(before: SourcePartition, op: SourcePartition) -> tuple[PatternPart, ...]:
    """List the object types by which a pattern may name ``op`` if it follows ``before``."""
    side = _side(before, op)
    if side is None:
        return op.origin.object_types
    return tuple(Join(kind, side) for kind in op.origin.object_types)


def _side(before: SourcePartition, op: SourcePartition) -> int | None:
    """Return the position of the output of ``before`` in the arguments of ``op``; None if ``op`` has only one
    tensor, and -1 if the output is there twice, as in ``x + x``, which matches no pattern."""
    if len(op.inputs) == 1 and (op.origin.is_module_call or op.tensor_count <= 1 + len(op.parameters)):
        return None
    sides = [side for side, argument in enumerate(op.nodes[0].args) if argument is before.output]
    return sides[0] if len(sides) == 1 else -1


def _fused_pattern(
    ops: tuple[SourcePartition, ...],
    rules: QConfigRules,
    backend: BackendTable,
    folded_into: Collection[str],
) -> FusedPattern:
    entry, own_entry = _entry(ops, backend), _entry(ops[:1], backend)
    if entry is not None and ops[0].label in folded_into and not _fuses_batch_norm(ops, backend):
        entry = replace(entry, is_fused_module=False)
    if entry is not None and _is_grouped_and_transposed(ops[0]):
        entry = replace(
            entry, is_fused_module=False
        )  # Its batch norm stays apart: see batch_norm/foldable.py.
    roles = own_entry.input_type_to_index if own_entry else {}
    first, deciding = _record(ops[0], ops[0].label), _record(ops[-1], ops[0].label)
    if entry is not None and entry.is_fused_module:
        _check_one_qconfig(ops, entry, rules)
        deciding = first
    observes_inputs = first.select(rules).qconfig is not None
    return FusedPattern(ops, entry, roles, deciding.select(rules), deciding, observes_inputs)


def _is_grouped_and_transposed(op: SourcePartition) -> bool:
    node = op.nodes[-1]
    return node.target in TRANSPOSED and len(node.args) > GROUPS and bool(node.args[GROUPS] != 1)


def _fuses_batch_norm(ops: tuple[SourcePartition, ...], backend: BackendTable) -> bool:
    """Return whether the backend fuses ``ops`` with a batch norm behind the first one. FX fuses modules once:
    a linear that has taken a batch norm in is not fused with a ReLU as well."""
    first, *rest = _pattern_parts(ops)
    if any(kind in BATCH_NORMS for part in rest for kind in part):
        return True  # Training keeps the batch norm, and it is one of ``ops``.
    return backend.find(first, BATCH_NORMS, *rest) is not None


def _record(op: SourcePartition, label: str) -> OpRecord:
    return OpRecord(label, op.origin, op.call_index)


def _check_one_qconfig(ops: tuple[SourcePartition, ...], entry: PatternEntry, rules: QConfigRules) -> None:
    pattern = entry.pattern if isinstance(entry.pattern, tuple) else (entry.pattern,)
    types = [_module_type(part) for part in pattern if not isinstance(part, Join)]
    first, *others = (rules.object_types.get(kind) for kind in types)
    for kind, qconfig in zip(types[1:], others, strict=True):
        if not qconfig_equals(qconfig, first):
            raise _conflict_in_fused_pattern(
                ops[0].label, [getattr(part, "__name__", str(part)) for part in types], str(kind.__name__)
            )


def _module_type(part: ObjectType) -> type:
    """Return ``part`` if it is a class, else nn.ReLU: FX puts an nn.ReLU into the fused module for a
    functional relu."""
    return part if isinstance(part, type) else nn.ReLU


def _conflict_in_fused_pattern(path: str, types: list[str], other: str) -> ConfigError:
    return ConfigError(
        f"qconfig_mapping: object_type: {path!r} starts the fused pattern {' + '.join(types)}, but the "
        f"qconfig of {other} is not that of {types[0]}.",
        hint="set the same qconfig for all of these object types, or none for any of them; "
        "module_name switches a single place off.",
    )
