"""Batch norms as FX treats them, through prepare and convert of torchao."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import Argument
from torchao.quantization.pt2e.quantizer import Quantizer

from torchq_compat.annotate.annotation import WrappingQuantizer
from torchq_compat.capture.training import batch_counters, drop_batch_counters, has_fixed_mode, training_flag
from torchq_compat.ops import (
    BETA,
    EPS,
    GAMMA,
    MOMENTUM,
    RUNNING_MEAN,
    RUNNING_VAR,
    TRAINING,
    TRANSPOSED,
    batch_norm_nodes,
)
from torchq_compat.support.graph_nodes import attribute_of
from torchq_compat.support.torchao_flow import convert_pt2e, prepare_pt2e, prepare_qat_pt2e
from torchq_compat.support.upstream import BatchNormBase, is_activation_post_process

# Batch norms with ``momentum=None``, whose running statistics are plain averages over all batches.
#
# nn.BatchNorm computes the factor of a batch, one over the number of batches, in Python from a tensor,
# which torch.export refuses. So these batch norms are captured with a constant momentum, and a node that
# computes the factor is inserted into the prepared graph.


#: The momentum in the captured graph; no statistic is ever updated with it.
STAND_IN = 0.1


def before_capture(model: nn.Module) -> set[str]:
    """Set a momentum in the batch norms of ``model``, the package's own copy, that have none; return the
    paths of their running means."""
    found = set()
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, BatchNormBase) and module.track_running_stats and module.momentum is None:
            found.add(f"{path}.running_mean".removeprefix("."))
    for path in found:
        norm = model.get_submodule(path.rpartition(".")[0])
        norm.momentum = STAND_IN  # type: ignore[assignment]
    return found


def averaging_factor(batches: Tensor) -> float:
    """Return the weight of the newest batch; ``batches`` is the int64 count of batches, of shape ()."""
    return 1.0 / max(float(batches), 1.0)


def average_cumulatively(prepared: GraphModule, running_means: Collection[str]) -> None:
    """Make the batch norms with ``running_means`` use the current averaging factor if ``prepared`` counts
    their batches. Batch norms without a counter in the graph update no statistics."""
    counters = {str(node.args[0].target) for node in batch_counters(prepared)}  # type: ignore[union-attr]
    for path, node in list(batch_norm_nodes(prepared)):
        counter = path.removesuffix("running_mean") + "num_batches_tracked"
        if path in running_means and counter in counters:
            with prepared.graph.inserting_before(node):
                count = prepared.graph.get_attr(counter)
                node.update_arg(MOMENTUM, prepared.graph.call_function(averaging_factor, (count,)))
    prepared.recompile()


def fix_averaging_factors(prepared: GraphModule) -> None:
    """Remove the averaging factors from a graph that will not be trained any more."""
    for _, node in batch_norm_nodes(prepared):
        if isinstance(node.args[MOMENTUM], Node):
            node.update_arg(MOMENTUM, STAND_IN)
    prepared.graph.eliminate_dead_code()


# Folds QAT's batch norms into the ops in front of them, before torchao converts.
#
# ``annotate.batch_norm`` turned ``bn(op(x, w) + b)`` into
#
#     s = gamma / sqrt(var + eps);  bn(op(x, fq(w * s)) / s + b)
#
# which in evaluation is ``op(x, fq(w * s)) + (b - mean) * s + beta``. torchao folds its own form of this
# after conversion by exporting 96 patterns and matching each, for any model: 11 seconds for one
# convolution. Batch norms that are not folded here are hidden from torchao.


ATEN = torch.ops.aten


@dataclass(frozen=True)
class _Fold:
    """One fused batch norm: the nodes of the formula above."""

    batch_norm: Node
    convolution: Node
    weight_observer: Node
    scaled_weight: Node
    bias: Node | None


def fold_batch_norms(prepared: GraphModule) -> None:
    """Fold every fused batch norm of ``prepared``, a QAT graph in evaluation, in place."""
    for _, node in list(batch_norm_nodes(prepared)):
        fold = _match_folded(node)
        if fold is not None:
            _apply(prepared, fold)
    prepared.graph.eliminate_dead_code()
    prepared.delete_all_unused_submodules()
    prepared.recompile()


def _match_folded(batch_norm: Node) -> _Fold | None:
    source, bias = batch_norm.args[0], None
    if _calls(source, ATEN.add.Tensor):
        source, reshaped = source.args[:2]  # type: ignore[union-attr]
        bias = reshaped.args[0] if _calls(reshaped, ATEN.reshape.default) else None  # type: ignore[union-attr]
        if bias is None:
            return None
    if not _calls(source, ATEN.div.Tensor):
        return None
    convolution = source.args[0]  # type: ignore[union-attr]
    observer = convolution.args[1] if isinstance(convolution, Node) and len(convolution.args) > 1 else None
    if not isinstance(observer, Node) or observer.op != "call_module":
        return None
    scaled = observer.args[0]
    if not _calls(scaled, ATEN.mul.Tensor):
        return None
    return _Fold(batch_norm, convolution, observer, scaled, bias)  # type: ignore[arg-type]


def _apply(prepared: GraphModule, fold: _Fold) -> None:
    gamma, beta, mean, variance = (_value(prepared, node) for node in fold.batch_norm.args[1:5])
    eps = fold.batch_norm.args[EPS]
    assert isinstance(eps, float)
    scale = gamma / torch.sqrt(variance + eps)
    weight, reshaped = fold.scaled_weight.args[:2]
    assert isinstance(weight, Node)
    assert isinstance(reshaped, Node)
    shape = reshaped.args[1]
    bias = _value(prepared, fold.bias) if fold.bias is not None else torch.zeros_like(mean)
    # Unique: two convolutions may share a weight, and each folds its own batch norm.
    name = fold.batch_norm.name
    constants = {
        f"{name}_folded": _value(prepared, weight) * scale.reshape(shape),  # type: ignore[arg-type]
        f"{name}_folded_bias": (bias - mean) * scale + beta,
    }
    nodes = []
    with prepared.graph.inserting_before(fold.weight_observer):
        for constant, value in constants.items():
            prepared.register_parameter(constant, nn.Parameter(value.detach()))
            nodes.append(prepared.graph.get_attr(constant))
            nodes[-1].meta["val"] = value
    fold.weight_observer.args = (nodes[0],)
    arguments = fold.convolution.args
    fold.convolution.args = (*arguments[:2], nodes[1], *arguments[3:])
    fold.batch_norm.replace_all_uses_with(fold.convolution)
    prepared.graph.erase_node(fold.batch_norm)


def _calls(node: object, target: object) -> bool:
    return isinstance(node, Node) and node.target is target


def _value(prepared: GraphModule, node: object) -> Tensor:
    assert isinstance(node, Node)
    value = attribute_of(prepared, node)
    assert isinstance(value, Tensor)
    return value


# Batch norms behind a convolution or linear in QAT, trained as FX's ``nn.intrinsic.qat`` modules train them.
#
# FX fuses the pair, so that training sees the weight that will be quantized, the folded one:
#
#     s = gamma / sqrt(var + eps);  bn(op(x, fq(w * s)) / s + b)
#
# torchao's prepare for QAT does this for conv1d and conv2d, with limits: eps and momentum become the
# defaults (qat_utils.py matches with literals ignored), padding by name and inputs that a custom module
# quantized do not work, and float pairs are rewritten too. So batch norms are hidden from torchao, and
# fused here.


#: Op -> the number of dimensions its output must have for the batch norm behind it to normalize the op's
#: output channels.
OUTPUT_DIMENSIONS: dict[object, int] = {
    ATEN.linear.default: 2,  # with more, linear and batch norm use different dimensions (pytorch/ao#4116)
    ATEN.conv1d.default: 3,
    ATEN.conv1d.padding: 3,
    ATEN.conv2d.default: 4,
    ATEN.conv2d.padding: 4,
    ATEN.conv3d.default: 5,
    ATEN.conv3d.padding: 5,
    ATEN.conv_transpose1d.default: 3,
    ATEN.conv_transpose2d.input: 4,
    ATEN.conv_transpose3d.input: 5,
}


@dataclass(frozen=True)
class _Pair:
    """An op whose only user is a batch norm, and the fake-quantize of its weight."""

    op: Node
    weight_fake_quantize: Node
    batch_norm: Node

    @property
    def weight(self) -> Node:
        weight = self.weight_fake_quantize.args[0]
        assert isinstance(weight, Node)
        return weight

    @property
    def weight_axis(self) -> int:
        """The axis of the output channels."""
        return 1 if self.op.target in TRANSPOSED else 0

    @property
    def weight_shape(self) -> list[int]:
        return list(self.weight.meta["val"].shape)

    @property
    def channels(self) -> int:
        gamma = self.batch_norm.args[GAMMA]
        assert isinstance(gamma, Node)
        return int(gamma.meta["val"].numel())


def fuse_batch_norms(prepared: GraphModule) -> None:
    """Fuse every such pair in ``prepared``, a QAT graph with its fake-quantizes, in place."""
    for _, node in list(batch_norm_nodes(prepared)):
        pair = _match_fused(prepared, node)
        if pair is not None:
            _rewrite(prepared, pair)
    prepared.recompile()


def _match_fused(prepared: GraphModule, batch_norm: Node) -> _Pair | None:
    op = batch_norm.args[0]
    if not isinstance(op, Node) or len(op.users) != 1 or batch_norm.args[GAMMA] is None:
        return None
    if has_fixed_mode(batch_norm) and training_flag(batch_norm):
        # The batch norm uses the statistics of the batch in evaluation too, so there is nothing to fold.
        return None
    if op.target not in OUTPUT_DIMENSIONS or OUTPUT_DIMENSIONS[op.target] != op.meta["val"].dim():
        return None
    fake_quantize = op.args[1]
    if not isinstance(fake_quantize, Node) or fake_quantize.op != "call_module":
        return None
    if not is_activation_post_process(prepared.get_submodule(str(fake_quantize.target))):
        return None
    if len(fake_quantize.users) != 1:
        # A weight with other users cannot be scaled for this batch norm alone.
        return None
    pair = _Pair(op, fake_quantize, batch_norm)
    # The weight of a grouped transposed convolution has no axis with all output channels.
    return pair if pair.weight_shape[pair.weight_axis] == pair.channels else None


def _rewrite(prepared: GraphModule, pair: _Pair) -> None:
    graph, op = prepared.graph, pair.op
    bias, options = op.args[2] if len(op.args) > 2 else None, op.args[3:]
    scale = _scale(graph, pair)
    op.args = (op.args[0], _scaled_weight(graph, pair, scale), None, *options)
    graph.erase_node(pair.weight_fake_quantize)
    shape = [1, -1, *[1] * (OUTPUT_DIMENSIONS[op.target] - 2)]
    with graph.inserting_before(pair.batch_norm):
        source = graph.call_function(ATEN.div.Tensor, (op, _reshaped(graph, scale, shape)))
        if bias is not None:
            source = graph.call_function(ATEN.add.Tensor, (source, _reshaped(graph, bias, shape)))
    pair.batch_norm.update_arg(0, source)


def _scale(graph: Graph, pair: _Pair) -> Node:
    """Return ``gamma / sqrt(var + eps)``, with the statistics before they are updated by the batch."""
    gamma, variance, eps = (pair.batch_norm.args[i] for i in (GAMMA, RUNNING_VAR, EPS))
    with graph.inserting_before(pair.op):
        variance_with_eps = graph.call_function(ATEN.add.Tensor, (variance, eps))
        deviation = graph.call_function(ATEN.sqrt.default, (variance_with_eps,))
        return graph.call_function(ATEN.div.Tensor, (gamma, deviation))


def _scaled_weight(graph: Graph, pair: _Pair, scale: Node) -> Node:
    """Return a call of the weight's fake-quantize on the weight times ``scale``."""
    shape = [-1 if axis == pair.weight_axis else 1 for axis in range(len(pair.weight_shape))]
    with graph.inserting_before(pair.op):
        scaled = graph.call_function(ATEN.mul.Tensor, (pair.weight, _reshaped(graph, scale, shape)))
        # Error messages take the module path from here.
        scaled.meta["nn_module_stack"] = pair.op.meta.get("nn_module_stack")
        return graph.node_copy(pair.weight_fake_quantize, lambda _: scaled)


def _reshaped(graph: Graph, vector: Argument, shape: list[int]) -> Node:
    return graph.call_function(ATEN.reshape.default, (vector, shape))


# Which batch norms may be folded into the convolution or linear in front of them.
#
# torchao's ``_fuse_conv_bn_`` folds every batch norm that reads a convolution: it does not check whether
# other nodes read the convolution, its weight or its bias, nor whether the statistics are those of the
# batch.


BATCH_NORM = torch.ops.aten.batch_norm.default
#: Positions of the arguments that make two batch norms the same function in evaluation.
CONSTANTS = (GAMMA, BETA, RUNNING_MEAN, RUNNING_VAR, EPS)


def unfoldable_batch_norms(graph_module: GraphModule) -> set[Node]:
    """Return the batch norms of ``graph_module`` whose folding would change other results."""
    batch_norms = [node for node in graph_module.graph.nodes if node.target is BATCH_NORM]
    readers = _readers(graph_module)
    parameters = dict(graph_module.named_parameters(remove_duplicate=False))
    return {
        node
        for node in batch_norms
        # torchao registers the folded weight as a parameter, which fails if the weight is a buffer.
        if not _can_be_folded(node, readers) or not _names(node.args[0]) <= parameters.keys()
    }


def _readers(graph_module: GraphModule) -> dict[str, set[Node]]:
    """Return the nodes that read each parameter and buffer, by its name."""
    found: dict[str, set[Node]] = {}
    for node in graph_module.graph.nodes:
        if node.op == "get_attr":
            found.setdefault(str(node.target), set()).update(node.users)
    return found


def _can_be_folded(batch_norm: Node, readers: dict[str, set[Node]]) -> bool:
    op = batch_norm.args[0]
    # After the first fold, a batch norm behind a batch norm would look like one behind the convolution.
    if not isinstance(op, Node) or op.target not in OUTPUT_DIMENSIONS or batch_norm.args[TRAINING]:
        return False
    if not all(_is_constant(batch_norm.args[position]) for position in (RUNNING_MEAN, RUNNING_VAR)):
        return False
    if op.target in TRANSPOSED and not _has_all_outputs(op, batch_norm):
        return False
    constants = [argument for argument in op.args[1:3] if argument is not None]
    # Other readers of the weight or the bias must feed an equal batch norm, as in a block called several
    # times.
    return all(
        _is_constant(constant)
        and all(_is_same_block(reader, op, batch_norm) for reader in readers[_name(constant)])
        for constant in constants
    )


def _has_all_outputs(op: Node, batch_norm: Node) -> bool:
    """Return whether the weight of a transposed convolution has an axis with all output channels: with groups
    it has none, and torch's ``fuse_conv_bn_weights`` fails (2.13)."""
    weight, mean = op.args[1], batch_norm.args[RUNNING_MEAN]
    assert isinstance(weight, Node)
    assert isinstance(mean, Node)
    return bool(weight.meta["val"].shape[1] == mean.meta["val"].shape[0])


def _is_same_block(reader: Node, op: Node, batch_norm: Node) -> bool:
    if reader.target is not op.target or len(reader.users) != 1 or _weights(reader) != _weights(op):
        return False
    (follower,) = reader.users
    return (
        follower.target is BATCH_NORM
        and follower.args[0] is reader
        and not follower.args[TRAINING]
        and all(_key(follower.args[i]) == _key(batch_norm.args[i]) for i in CONSTANTS)
    )


def _weights(op: Node) -> list[object]:
    return [_key(argument) for argument in op.args[1:3] if argument is not None]


def _names(op: Argument) -> set[str]:
    """Return the names of the weight and bias of ``op``."""
    assert isinstance(op, Node)
    return {_name(argument) for argument in op.args[1:3] if argument is not None}


def _is_constant(argument: Argument) -> bool:
    return isinstance(argument, Node) and argument.op == "get_attr"


def _name(argument: Argument) -> str:
    assert isinstance(argument, Node)
    return str(argument.target)


def _key(argument: Argument) -> object:
    """Return a key for ``argument`` that is the same for two nodes that read one attribute."""
    return argument.target if isinstance(argument, Node) and argument.op == "get_attr" else argument


# Hides batch norms from torchao while it prepares or converts; this package fuses, folds or keeps them.
#
# torchao's convert looks for its QAT patterns if there is any batch norm: it exports 96 patterns and
# matches each, 17 seconds for a model of one batch norm (qat_utils.py, _fold_conv_bn_qat). Fused batch
# norms are folded before; see ``annotate.batch_norm``.


def hide_batch_norms(graph_module: GraphModule) -> None:
    """Replace every batch norm of ``graph_module`` by a call that torchao does not recognize."""
    _replace(graph_module, BATCH_NORM, kept_batch_norm)


def hide_unfoldable_batch_norms(graph_module: GraphModule) -> None:
    """Hide the batch norms that torchao's prepare must not fold; see ``unfoldable_batch_norms``."""
    for node in unfoldable_batch_norms(graph_module):
        node.target = kept_batch_norm


def show_batch_norms(graph_module: GraphModule) -> None:
    """Undo ``hide_batch_norms`` and ``hide_unfoldable_batch_norms``."""
    _replace(graph_module, kept_batch_norm, BATCH_NORM)


class ShowingBatchNorms(WrappingQuantizer):
    """A Quantizer that first restores the batch norms that were hidden while torchao folded the others."""

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        show_batch_norms(model)
        return super().transform_for_annotation(model)


class HidingBatchNorms(WrappingQuantizer):
    """A Quantizer that hides the batch norms after ``quantizer`` has annotated: torchao's prepare for QAT
    would fuse them next, with default constants."""

    def annotate(self, model: GraphModule) -> GraphModule:
        annotated = super().annotate(model)
        hide_batch_norms(annotated)
        return annotated


def kept_batch_norm(*args: object) -> Tensor:
    """Compute ``aten.batch_norm``; a target that torchao does not recognize."""
    result: Tensor = BATCH_NORM(*args)
    return result


def _replace(graph_module: GraphModule, target: object, replacement: object) -> None:
    replaced = [node for node in graph_module.graph.nodes if node.target is target]
    for node in replaced:
        node.target = replacement
    if replaced:
        graph_module.recompile()


# The names of the parameters of each batch norm in a graph, and the op it was fused with.


ROLES = {"weight": GAMMA, "bias": BETA, "running_mean": RUNNING_MEAN, "running_var": RUNNING_VAR}


@dataclass(frozen=True)
class BatchNormParts:
    """One batch norm.

    Attributes:
        names: the attribute of nn.BatchNorm -> the name of the parameter or buffer in the graph.
        eps: the number that is added to the variance.
        op: the convolution or linear that QAT fused with it; None if it is not fused.
        bias: the name of the bias of ``op``; None if there is none.
    """

    names: dict[str, str]
    eps: float
    op: Node | None
    bias: str | None


def describe(graph_module: GraphModule) -> Iterator[BatchNormParts]:
    """Yield the parts of each batch norm of ``graph_module`` with running statistics."""
    for _, node in batch_norm_nodes(graph_module):
        arguments = {role: node.args[position] for role, position in ROLES.items()}
        eps = node.args[EPS]
        assert isinstance(eps, float)
        op, bias = _fused(node)
        names = {role: str(each.target) for role, each in arguments.items() if isinstance(each, Node)}
        yield BatchNormParts(names, eps, op, bias)


def _fused(batch_norm: Node) -> tuple[Node | None, str | None]:
    """Return the op and the name of its bias in ``bn(op(x, w * s) / s + b)``; None for what is not there."""
    source, bias = batch_norm.args[0], None
    if isinstance(source, Node) and source.target is ATEN.add.Tensor:
        reshaped = source.args[1]
        if isinstance(reshaped, Node) and isinstance(reshaped.args[0], Node):
            bias = str(reshaped.args[0].target)
        source = source.args[0]
    if not isinstance(source, Node) or source.target is not ATEN.div.Tensor:
        return None, None
    op = source.args[0]
    return (op, bias) if isinstance(op, Node) and op.target in OUTPUT_DIMENSIONS else (None, None)


# torchao's prepare and convert, with batch norms as FX treats them.


def prepare(
    graph_module: GraphModule, quantizer: Quantizer, *, is_qat: bool, cumulative: Collection[str] = ()
) -> GraphModule:
    """Insert observers or fake-quantizes into ``graph_module`` where ``quantizer`` annotates.

    Args:
        cumulative: the paths of running means that ``before_capture`` returned.
    """
    if is_qat:
        prepared = prepare_qat_pt2e(graph_module, HidingBatchNorms(quantizer))
        show_batch_norms(prepared)
        fuse_batch_norms(prepared)
    else:
        hide_unfoldable_batch_norms(graph_module)
        prepared = prepare_pt2e(graph_module, ShowingBatchNorms(quantizer))
    if cumulative:
        average_cumulatively(prepared, cumulative)
    return prepared


def convert(prepared: GraphModule, fix_observers: Callable[[GraphModule], None]) -> GraphModule:
    """Return ``prepared``, which is changed, with its observers replaced by q-dq.

    Args:
        fix_observers: called after the batch norms are folded, before torchao reads the observers.
    """
    drop_batch_counters(prepared)
    fix_averaging_factors(prepared)
    fold_batch_norms(prepared)
    fix_observers(prepared)
    hide_batch_norms(prepared)
    converted = convert_pt2e(prepared)
    show_batch_norms(converted)
    return converted
