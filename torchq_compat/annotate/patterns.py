"""Which nodes are one op for FX and its BackendConfig: source partitions, fused patterns, supported
dtypes.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from torchq_compat.annotate.annotation import OpRecord
from torchq_compat.capture.origins import Origin, find_origin
from torchq_compat.errors import ConfigError
from torchq_compat.ops import parameter_nodes, parameters_of, those, weight_of
from torchq_compat.read.backend_configs import BATCH_NORMS, BackendTable, Join, PatternEntry, PatternPart
from torchq_compat.read.observers import ObserverConstructor
from torchq_compat.read.qconfig_mappings import QConfigRules, Selection
from torchq_compat.read.qspecs import OpSpecs
from torchq_compat.support.decisions import NOT_SUPPORTED
from torchq_compat.support.dtypes import PACKED_DTYPES, dtype_name, plain_dtype
from torchq_compat.support.torch_ao import DTypeConfig, DTypeWithConstraints, qconfig_equals

# Source partitions: the nodes of an exported graph that would be one node in FX.
#
# A torch.nn module may export to several aten nodes; FX quantizes it as one op, at its inputs and output.


@dataclass(frozen=True)
class SourcePartition:
    """One op as FX saw it.

    Attributes:
        nodes: its nodes in order.
        origin: its origin.
        inputs: (producer, consumer in the partition) of every float activation that enters.
        weights: (producer, consumer) of the weights that a QConfig can quantize.
        parameters: "weight", "bias" -> (producer, consumer); empty for a module.
        tensor_count: how many positional arguments of the first node are float tensors, repeated ones
            included.
        output: the node whose value leaves; None if several do, or the value is no float tensor.
        call_index: how many calls of the same type the same module made before.
    """

    nodes: tuple[Node, ...]
    origin: Origin
    inputs: tuple[tuple[Node, Node], ...]
    weights: tuple[tuple[Node, Node], ...]
    parameters: Mapping[str, tuple[Node, Node]]
    tensor_count: int
    output: Node | None
    call_index: int

    @property
    def label(self) -> str:
        """The module path for a module, ``scope/node`` for a function."""
        path, name = self.origin.module_path, self.nodes[-1].name
        if self.origin.is_module_call:
            return path
        return f"{path}/{name}" if path else name

    @property
    def kind(self) -> str:
        if self.origin.is_module_call:
            return self.origin.module_type.__name__
        if self.origin.wrapped:
            return self.origin.wrapped
        target = self.nodes[-1].target
        return target if isinstance(target, str) else getattr(target, "__name__", str(target))

    def with_roles(self, input_type_to_index: Mapping[str, int]) -> SourcePartition:
        """Return the partition with the roles that a BackendConfig gives to the arguments of a function: an
        argument without a role is an activation. The partition of a module is unchanged."""
        if self.origin.is_module_call:
            return self
        parameters = {name: edge for name, edge in self.parameters.items() if name in input_type_to_index}
        inputs = [*self.inputs, *(edge for name, edge in self.parameters.items() if name not in parameters)]
        node = self.nodes[0]
        for name, index in input_type_to_index.items():
            named = node.args[index] if index < len(node.args) else None
            if not self.parameters and isinstance(named, Node) and (named, node) in inputs:
                parameters[name] = (named, node)
                inputs.remove((named, node))
        has_weight = "weight" in parameters and node.target not in those("normalization")
        weights = (parameters["weight"],) if has_weight else ()
        return replace(self, inputs=tuple(inputs), weights=weights, parameters=parameters)


def find_source_partitions(graph_module: GraphModule, model: nn.Module | None) -> list[SourcePartition]:
    """Return the source partitions of ``graph_module`` in graph order; ``model`` is the exported module, or
    None if only the graph is known."""
    members: dict[str, list[Node]] = {}
    origins: dict[str, Origin] = {}
    for node in graph_module.graph.nodes:
        if node.op != "call_function" or "val" not in node.meta:
            continue
        origin = find_origin(node, model)
        members.setdefault(origin.call, []).append(node)
        origins[origin.call] = origin
    seen: Counter[tuple[str, object]] = Counter()
    partitions = []
    for call, nodes in members.items():
        # module_name_object_type_order counts calls by the caller and the type called.
        kind = origins[call].caller, next(iter(origins[call].object_types), None)
        partitions.append(_partition(tuple(nodes), origins[call], seen[kind]))
        seen[kind] += 1
    return partitions


def is_float_tensor(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype.is_floating_point


def _is_size(node: Node) -> bool:
    return isinstance(node.meta.get("val"), (int, float, torch.SymInt, torch.SymFloat, torch.SymBool))


def _partition(nodes: tuple[Node, ...], origin: Origin, call_index: int) -> SourcePartition:
    inside = set(nodes)
    inputs: list[tuple[Node, Node]] = []
    weights: list[tuple[Node, Node]] = []
    for node in nodes:
        if (weight := weight_of(node)) is not None:
            weights.append((weight, node))
        for producer in _activations(node, origin):
            if producer not in inside and (producer, node) not in inputs:
                inputs.append((producer, node))
    # torch.export computes a size where it is first needed, perhaps within a module that it does not belong
    # to.
    leaving = [node for node in nodes if not _is_size(node) and not inside.issuperset(node.users)]
    output = leaving[0] if len(leaving) == 1 and is_float_tensor(leaving[0]) else None
    parameters = {} if origin.is_module_call else parameters_of(nodes[0])
    count = sum(is_float_tensor(arg) for arg in nodes[0].args if isinstance(arg, Node))
    return SourcePartition(
        nodes, origin, tuple(inputs), tuple(weights), parameters, count, output, call_index
    )


def _activations(node: Node, origin: Origin) -> list[Node]:
    parameters = parameter_nodes(node)
    return [
        producer
        for producer in node.all_input_nodes
        if producer not in parameters
        and is_float_tensor(producer)
        and not (origin.is_module_call and producer.op == "get_attr")
    ]


# Fused patterns of a BackendConfig: ops that run as one, with nothing observed between them.
#
# FX has two kinds. A pattern with a fuser method replaces modules by a fused one before any QConfig is
# read: the QConfig of the first module applies, and QConfigs by object type must be the same for all of the
# modules. A pattern without a fuser method, of functions, is matched later: the QConfig of the last op
# applies.


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

    @cached_property
    def observed_partition(self) -> SourcePartition:
        """The first op, with the inputs and weights of the whole pattern that are observed."""
        partition = self.first.with_roles(self.input_type_to_index)
        if not self.observes_inputs:
            return replace(partition, inputs=(), weights=())
        # Without a fused module FX observes the inputs of the first op, and no inputs of later ones.
        if self.entry is None or not self.entry.is_fused_module:
            return partition
        inside = {node for op in self.ops for node in op.nodes}
        joining = (edge for op in self.ops[1:] for edge in op.inputs if edge[0] not in inside)
        return replace(partition, inputs=(*partition.inputs, *joining))


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
    matcher = _Matcher(
        {node: partition for partition in partitions for node in partition.nodes}, backend, folded_into
    )
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
    return [matcher.fused_pattern(ops, rules) for ops in patterns]


MayJoin = Callable[[SourcePartition, int], bool]


@dataclass(frozen=True)
class _Matcher:
    by_node: Mapping[Node, SourcePartition]
    backend: BackendTable
    folded_into: Collection[str]

    def patterns(
        self, partitions: list[SourcePartition], may_join: MayJoin
    ) -> list[tuple[SourcePartition, ...]]:
        matches: list[tuple[SourcePartition, ...]] = []
        absorbed: set[Node] = set()
        for partition in partitions:
            if partition.nodes[-1] in absorbed:
                continue
            ops = self._longest(partition, may_join)
            absorbed.update(op.nodes[-1] for op in ops[1:])
            matches.append(ops)
        return [ops for ops in matches if ops[0].nodes[-1] not in absorbed]

    def _longest(self, partition: SourcePartition, may_join: MayJoin) -> tuple[SourcePartition, ...]:
        """Return the longest pattern that starts with ``partition``; its beginnings need not be patterns."""
        longest: tuple[SourcePartition, ...] = (partition,)
        ops = longest
        while (follower := self._follower(ops, may_join)) is not None:
            ops = (*ops, follower)
            if self._entry(ops) is not None and not self._is_taken_from_behind(ops, may_join):
                longest = ops
        return longest

    def _is_taken_from_behind(self, ops: tuple[SourcePartition, ...], may_join: MayJoin) -> bool:
        """Return whether the last of ``ops`` is fused with its follower instead, as a batch norm behind a
        transposed convolution with its ReLU: FX looks for fused modules from the last op backwards."""
        follower = self._follower(ops[-1:], may_join)
        if follower is None:
            return False
        entry = self._entry((ops[-1], follower))
        is_fused = entry is not None and entry.is_fused_module
        return is_fused and self._entry((*ops, follower)) is None

    def _follower(self, ops: tuple[SourcePartition, ...], may_join: MayJoin) -> SourcePartition | None:
        """Return the op behind ``ops`` that continues a fused pattern of the backend, or None."""
        output = ops[-1].output
        if output is None or len(output.users) != 1:
            return None
        follower = self.by_node.get(next(iter(output.users)))
        chains = () if follower is None else self._chains((*ops, follower))
        if follower is None or not any(self.backend.may_start(*chain) for chain in chains):
            return None
        side = _side(ops[-1], follower)
        return follower if side is None or may_join(follower, side) else None

    def _entry(self, ops: tuple[SourcePartition, ...]) -> PatternEntry | None:
        return next(filter(None, (self.backend.find(*chain) for chain in self._chains(ops))), None)

    def _chains(self, ops: tuple[SourcePartition, ...]) -> Iterator[tuple[tuple[PatternPart, ...], ...]]:
        """Yield the parts of ``ops``, and those with the batch norm that is in the weight of the first: a
        pattern that does not fuse it still has it."""
        first, *remaining = _pattern_parts(ops)
        yield (first, *remaining)
        if remaining and ops[0].label in self.folded_into:
            yield (first, BATCH_NORMS, *remaining)

    def _fuses_batch_norm(self, ops: tuple[SourcePartition, ...]) -> bool:
        """Return whether the backend fuses ``ops`` with a batch norm behind the first one. FX fuses modules
        once: a linear that has taken a batch norm in is not fused with a ReLU as well."""
        first, *remaining = _pattern_parts(ops)
        if any(kind in BATCH_NORMS for part in remaining for kind in part):
            return True  # Training keeps the batch norm, and it is one of ``ops``.
        return self.backend.find(first, BATCH_NORMS, *remaining) is not None

    def fused_pattern(self, ops: tuple[SourcePartition, ...], rules: QConfigRules) -> FusedPattern:
        """Return the pattern of ``ops``, with the QConfig that applies to it."""
        entry, own_entry = self._entry(ops), self.backend.find(ops[0].origin.object_types)
        if entry is not None and ops[0].label in self.folded_into and not self._fuses_batch_norm(ops):
            entry = replace(entry, is_fused_module=False)
        roles = own_entry.input_type_to_index if own_entry else {}
        first, deciding = (OpRecord(ops[0].label, op.origin, op.call_index) for op in (ops[0], ops[-1]))
        if entry is not None and entry.is_fused_module:
            _check_one_qconfig(ops, entry, rules)
            deciding = first
        observes_inputs = first.select(rules).qconfig is not None
        return FusedPattern(ops, entry, roles, deciding.select(rules), deciding, observes_inputs)


def _pattern_parts(ops: tuple[SourcePartition, ...]) -> tuple[tuple[PatternPart, ...], ...]:
    """List, for each of ``ops``, the object types by which a pattern may name it."""
    parts: list[tuple[PatternPart, ...]] = [ops[0].origin.object_types]
    for before, op in itertools.pairwise(ops):
        side, kinds = _side(before, op), op.origin.object_types
        parts.append(kinds if side is None else tuple(Join(kind, side) for kind in kinds))
    return tuple(parts)


def _side(before: SourcePartition, op: SourcePartition) -> int | None:
    """Return the position of the output of ``before`` in the arguments of ``op``; None if ``op`` has only one
    tensor, and -1 if the output is there twice, as in ``x + x``, which matches no pattern."""
    if len(op.inputs) == 1 and (op.origin.is_module_call or op.tensor_count <= 1 + len(op.parameters)):
        return None
    sides = [side for side, argument in enumerate(op.nodes[0].args) if argument is before.output]
    return sides[0] if len(sides) == 1 else -1


def is_folded_in_fx(op: Node, batch_norm: Node, model: nn.Module, backend: BackendTable) -> bool:
    """Return whether FX folds ``batch_norm`` into ``op``: it knows modules of the classes that the backend
    names, and matches from the last op backwards, so that a ReLU may take the batch norm first."""
    pair = [find_origin(node, model) for node in (op, batch_norm)]
    kinds = [origin.object_types for origin in pair]
    if not all(origin.is_module_call for origin in pair) or backend.find(*kinds) is None:
        return False
    if len(batch_norm.users) != 1:
        return True
    (reader,) = batch_norm.users
    kinds.append(find_origin(reader, model).object_types)
    return backend.find(*kinds[1:]) is None or backend.find(*kinds) is not None


def _check_one_qconfig(ops: tuple[SourcePartition, ...], entry: PatternEntry, rules: QConfigRules) -> None:
    pattern = entry.pattern if isinstance(entry.pattern, tuple) else (entry.pattern,)
    # FX puts an nn.ReLU into the fused module for a functional relu.
    types = [part if isinstance(part, type) else nn.ReLU for part in pattern if not isinstance(part, Join)]
    first, *others = (rules.object_types.get(kind) for kind in types)
    is_transposed = ops[0].nodes[-1].target in those("transposed")
    for kind, qconfig in zip(types[1:], others, strict=True):
        # The default mappings name transposed convolutions alone; FX trains none with a batch norm.
        if is_transposed and kind not in rules.object_types:
            continue
        if not qconfig_equals(qconfig, first):
            names = [getattr(part, "__name__", str(part)) for part in types]
            path, joined, other = ops[0].label, " + ".join(names), str(kind.__name__)
            raise ConfigError.of(
                "TQ910.conflict_in_pattern", path=path, pattern=joined, other=other, types=names
            )


# Whether a backend supports an op in the dtypes and ranges of a QConfig.
#
# FX's rule: some DTypeConfig of the op's pattern must match the QConfig's activation dtype, its
# ``is_dynamic``, and, for a function, the weight and bias dtypes; and the observers must satisfy the
# constraints of the config: quantization range, smallest scale, fixed scale and zero point.


def find_dtype_config(
    entry: PatternEntry, specs: OpSpecs, *, has_weight: bool, has_bias: bool
) -> DTypeConfig | str:
    """Return the first DTypeConfig of ``entry`` that allows ``specs``, or the reason, for people, why none
    does.

    Args:
        has_weight: whether the op is a function with a weight argument; ``takes_weight`` checks the weight
            of a module.
        has_bias: whether the op is a function with a bias argument.
    """
    reasons = []
    for config in entry.dtype_configs:
        reason = _violation(config, specs, has_weight, has_bias)
        if not reason:
            return config
        reasons.append(reason)
    return f"{NOT_SUPPORTED}: {'; '.join(dict.fromkeys(reasons)) or 'it has no dtype configs for it'}"


def takes_weight(entry: PatternEntry, specs: OpSpecs) -> bool:
    """Return whether a module's weight is quantized: FX requires one DTypeConfig that matches all four
    dtypes."""
    bias, output = _bias_and_output(specs)
    expected = (specs.activation_dtype, output, specs.declared_weight_dtype)
    for config in entry.dtype_configs:
        given = (config.input_dtype, config.output_dtype, config.weight_dtype)
        same = all(_is_same(a, b) for a, b in zip(given, expected, strict=True))
        same_bias = bool(config.is_dynamic) or _is_same(config.bias_dtype, bias)
        if same and same_bias and bool(config.is_dynamic) == specs.is_dynamic:
            return True
    return False


def _bias_and_output(specs: OpSpecs) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes of the bias and of the result."""
    bias = torch.float16 if is_half_static(specs) else torch.float32
    return bias, torch.float32 if specs.is_dynamic else specs.activation_dtype


def _violation(config: DTypeConfig, specs: OpSpecs, has_weight: bool, has_bias: bool) -> str:
    """Return what in ``specs`` the DTypeConfig ``config`` does not allow, or an empty string."""
    if config.input_dtype is not None and bool(config.is_dynamic) != specs.is_dynamic:
        return f"activations have to be {'dynamic' if config.is_dynamic else 'static'}"
    bias, output = _bias_and_output(specs)
    dtypes = {
        "input": ("activation", config.input_dtype, specs.activation_dtype),
        **({"weight": ("weight", config.weight_dtype, specs.declared_weight_dtype)} if has_weight else {}),
        **({"bias": ("bias", config.bias_dtype, bias)} if has_bias else {}),
        "output": ("output", config.output_dtype, output),
    }
    for role, (what, allowed, asked) in dtypes.items():
        if allowed is None:
            continue
        if not _is_same(allowed, asked):
            return f"{what} {dtype_name(asked)} where it takes {dtype_name(allowed)}"
        limits = getattr(config, f"{role}_dtype_with_constraints", None)
        constructor = specs.weight_constructor if role == "weight" else specs.activation_constructor
        of = "weight" if role == "weight" else "activation"
        if limits is None or limits.dtype is None or plain_dtype(limits.dtype) != constructor.settings.dtype:
            continue
        if violation := _range_violation(of, limits, constructor) or _fixed_violation(
            of, limits, constructor
        ):
            return violation
    return ""


def _range_violation(what: str, allowed: DTypeWithConstraints, constructor: ObserverConstructor) -> str:
    given = constructor.settings.limits
    low, high = allowed.quant_min_lower_bound, allowed.quant_max_upper_bound
    if low is not None and high is not None:
        if given.quant_min is None or given.quant_max is None:
            return f"{what} has no quant_min and quant_max, they have to be within [{low}, {high}]"
        if given.quant_min < low or given.quant_max > high:
            result = f"[{given.quant_min}, {given.quant_max}]"
            return f"{what} quant_min and quant_max are {result}, they have to be within [{low}, {high}]"
    smallest = allowed.scale_min_lower_bound
    if smallest is not None and (given.eps is None or given.eps < smallest):
        return f"{what} eps is {given.eps}, it has to be at least scale_min {smallest}"
    return ""


def _fixed_violation(what: str, allowed: DTypeWithConstraints, constructor: ObserverConstructor) -> str:
    scale, zero_point = allowed.scale_exact_match, allowed.zero_point_exact_match
    if scale is None or zero_point is None:
        return ""
    expected = f"fixed qparams with scale {scale:.6g} and zero point {zero_point}"
    given = constructor.settings.limits
    if given.fixed_scale is None:
        return f"{what} has no fixed qparams, it takes {expected}"
    if (given.fixed_scale, given.fixed_zero_point) != (scale, zero_point):
        result = f"scale {given.fixed_scale:.6g} and zero point {given.fixed_zero_point}"
        return f"{what} has fixed qparams with {result}, it takes {expected}"
    return ""


def is_half_static(specs: OpSpecs) -> bool:
    """Return whether activations and weights are rounded to float16, with no qparams."""
    return {specs.activation_dtype, specs.weight_dtype} == {torch.float16} and not specs.is_dynamic


def _is_same(allowed: torch.dtype | None, asked: torch.dtype) -> bool:
    """Return whether two dtypes are the same; quint8 and uint8 are, but quint4x2 is only equal to itself."""
    allowed = allowed or torch.float32
    if PACKED_DTYPES & {allowed, asked}:
        return allowed is asked
    return plain_dtype(allowed) == plain_dtype(asked)
