"""Batch norms as FX treats them, through prepare and convert of torchao."""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import Argument
from torchao.quantization.pt2e.quantizer import Quantizer

from torchq_compat import ops
from torchq_compat.annotate.annotation import WrappingQuantizer
from torchq_compat.capture.training import (
    batch_counters,
    drop_batch_counters,
    has_fixed_mode,
    module_of,
    training_flag,
)
from torchq_compat.read.qdq import FOLDED_SCALE
from torchq_compat.support import graph_nodes
from torchq_compat.support.process_state import convert_pt2e, prepare_pt2e, without_code
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
    result = set()
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, BatchNormBase) and module.track_running_stats and module.momentum is None:
            result.add(f"{path}.running_mean".removeprefix("."))
    for path in result:
        norm = model.get_submodule(path.rpartition(".")[0])
        norm.momentum = STAND_IN  # type: ignore[assignment]
    return result


def averaging_factor(batches: Tensor) -> float:
    """Return the weight of the newest batch; ``batches`` is the int64 count of batches, of shape ()."""
    return 1.0 / max(float(batches), 1.0)


def average_cumulatively(prepared: GraphModule, running_means: Collection[str]) -> None:
    """Make the batch norms with ``running_means`` use the current averaging factor if ``prepared`` counts
    their batches. Batch norms without a counter in the graph update no statistics."""
    counters = {str(node.args[0].target) for node in batch_counters(prepared)}  # type: ignore[union-attr]
    for path, node in list(ops.batch_norm_nodes(prepared)):
        counter = path.removesuffix("running_mean") + "num_batches_tracked"
        if path in running_means and counter in counters:
            with prepared.graph.inserting_before(node):
                count = prepared.graph.get_attr(counter)
                node.update_arg(ops.MOMENTUM, prepared.graph.call_function(averaging_factor, (count,)))


def set_momentum(prepared: GraphModule, path: str, momentum: float | None) -> None:
    """Give the batch norms of the module at ``path`` another momentum; None averages over all batches."""
    for running_mean, node in list(ops.batch_norm_nodes(prepared)):
        if module_of(node) != path:
            continue
        if momentum is None:
            average_cumulatively(prepared, {running_mean})
        else:
            node.update_arg(ops.MOMENTUM, momentum)
        prepared.recompile()


def fix_averaging_factors(prepared: GraphModule) -> None:
    """Remove the averaging factors from a graph that will not be trained any more."""
    for _, node in ops.batch_norm_nodes(prepared):
        if isinstance(node.args[ops.MOMENTUM], Node):
            node.update_arg(ops.MOMENTUM, STAND_IN)
    prepared.graph.eliminate_dead_code()


# One fold for calibration and training.
#
# The pair is ``bn(op(x, w) + b)``. With ``s = gamma / sqrt(var + eps)``, one number for each output channel,
# it is in evaluation ``op(x, w * s) + (b - mean) * s + beta``: calibrated models are folded so before they
# are observed. While they train, as FX's ``nn.intrinsic.qat`` modules do, they see the weight that will be
# quantized, ``bn(op(x, fq(w * s)) / s + b)``; convert folds what is left of it.
#
# torchao's folds are not used. That of calibration folds every batch norm that reads a convolution, whoever
# else reads the convolution, its weight or its bias, and fails on grouped transposed convolutions, as FX
# does. That of training has eps and momentum of the defaults (qat_utils.py matches with literals ignored),
# knows no padding by name, and exports 96 patterns for any model: 11 seconds for one convolution.


ATEN = torch.ops.aten
BATCH_NORM = ATEN.batch_norm.default
#: The position of the argument in a transposed convolution.
GROUPS = 6
#: Positions of the arguments that make two batch norms the same function in evaluation.
CONSTANTS = (ops.GAMMA, ops.BETA, ops.RUNNING_MEAN, ops.RUNNING_VAR, ops.EPS)

#: Computes an aten operator of tensors, or writes a node that does.
Call = Callable[..., Any]
#: Whether a batch norm, the second, may be folded into the op that it follows.
MayFold = Callable[[Node, Node], bool]


def folds_all(_op: Node, _batch_norm: Node) -> bool:
    """Return True: every batch norm whose folding changes no other result is folded."""
    return True


def _compute(target: Any, *args: Any) -> Tensor:
    result: Tensor = target(*args)
    return result


def _scale(call: Call, gamma: Any, variance: Any, eps: Any) -> Any:
    """Return ``s``; ``gamma`` is None for a batch norm without affine parameters."""
    deviation = call(ATEN.sqrt.default, call(ATEN.add.Tensor, variance, eps))
    if gamma is None:
        return call(ATEN.reciprocal.default, deviation)
    return call(ATEN.div.Tensor, gamma, deviation)


def _beside_weight(call: Call, scale: Any, op: Node, weight_shape: Sequence[int]) -> Any:
    """Return ``scale`` in a shape that multiplies the weight of ``op``."""
    ones = [1] * (len(weight_shape) - 2)
    if op.target not in ops.those("transposed"):
        return call(ATEN.reshape.default, scale, [-1, 1, *ones])
    groups = op.args[GROUPS] if len(op.args) > GROUPS else 1
    if groups == 1:
        return call(ATEN.reshape.default, scale, [1, -1, *ones])
    # The weight has a row for each input channel, with the output channels of that input's group.
    inputs, outputs = weight_shape[:2]
    of_groups = call(ATEN.reshape.default, scale, [groups, outputs])
    of_inputs = call(ATEN.repeat_interleave.self_int, of_groups, inputs // groups, 0)  # type: ignore[operator]
    return call(ATEN.reshape.default, of_inputs, [inputs, outputs, *ones])


def _folded_bias(graph_module: GraphModule, batch_norm: Node, bias: Argument, *factors: Tensor) -> Tensor:
    """Return ``bias`` with ``batch_norm`` in it: it is multiplied by one of ``factors`` after the other."""
    b, beta, mean = (
        _value(graph_module, node)
        for node in (bias, batch_norm.args[ops.BETA], batch_norm.args[ops.RUNNING_MEAN])
    )
    assert mean is not None
    folded = math.prod(factors, start=-mean if b is None else b - mean)
    return (folded if beta is None else folded + beta).detach()


def _value(graph_module: GraphModule, node: Argument) -> Tensor | None:
    if node is None:
        return None
    assert isinstance(node, Node)
    return graph_nodes.constant_of(graph_module, node)


# Calibration: folded before anything is observed.


def fold_constants(graph_module: GraphModule, may_fold: MayFold) -> None:
    """Fold every batch norm of ``graph_module``, in evaluation, whose folding changes no other result."""
    readers = _readers(graph_module)
    pairs = [
        (op, node)
        for _, node in ops.batch_norm_nodes(graph_module)
        if isinstance(op := node.args[0], Node) and _can_be_folded(node, readers) and may_fold(op, node)
    ]
    #: Name of a weight -> name of the folded bias. Blocks that are called several times are folded once.
    biases: dict[str, str] = {}
    for op, node in pairs:
        weight, bias = op.args[1], op.args[2] if len(op.args) > 2 else None
        assert isinstance(weight, Node)
        name = str(weight.target)
        if name not in biases:
            biases[name] = f"{name}_bias" if bias is None else _name(bias)
            gamma, variance = (_value(graph_module, node.args[i]) for i in (ops.GAMMA, ops.RUNNING_VAR))
            # In the order of torch's fuse_conv_bn_weights and fuse_linear_bn_weights, for FX's bits.
            factors = [torch.rsqrt(variance + node.args[ops.EPS])]  # type: ignore[arg-type, operator]
            factors += [] if gamma is None else [gamma]
            factors = [math.prod(factors)] if op.target is ATEN.linear.default else factors  # type: ignore[list-item]
            value = graph_nodes.constant_of(graph_module, weight)
            new = _folded_bias(graph_module, node, bias, *factors).to(value.dtype)
            folded: Tensor = value * _beside_weight(_compute, math.prod(factors), op, value.shape)
            _assign(graph_module, name, folded.to(value.dtype).detach())
            _assign(graph_module, biases[name], new)
        with graph_module.graph.inserting_before(op):
            new_bias = graph_module.graph.get_attr(biases[name])
        new_bias.meta["val"] = graph_nodes.attribute_of(graph_module, new_bias)
        op.args = (*op.args[:2], new_bias, *op.args[3:])
        graph_nodes.replace_node(node, op)
    if pairs:
        graph_module.graph.eliminate_dead_code()
        graph_module.recompile()


def _assign(graph_module: GraphModule, name: str, value: Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    module = graph_module.get_submodule(owner)
    if leaf in module._buffers:
        module.register_buffer(leaf, value)
    else:
        module.register_parameter(leaf, nn.Parameter(value))


def _readers(graph_module: GraphModule) -> dict[str, set[Node]]:
    """Return the nodes that read each parameter and buffer, by its name."""
    matches: dict[str, set[Node]] = {}
    for node in graph_module.graph.nodes:
        if node.op == "get_attr":
            matches.setdefault(str(node.target), set()).update(node.users)
    return matches


def _can_be_folded(batch_norm: Node, readers: dict[str, set[Node]]) -> bool:
    op = batch_norm.args[0]
    # A batch norm behind a batch norm stays: it does not read the convolution.
    if not isinstance(op, Node) or not _normalizes_channels(op) or batch_norm.args[ops.TRAINING]:
        return False
    if not all(_is_constant(batch_norm.args[position]) for position in (ops.RUNNING_MEAN, ops.RUNNING_VAR)):
        return False
    constants = [argument for argument in op.args[1:3] if argument is not None]
    # Other readers of the weight or the bias must feed an equal batch norm, as in a block called several
    # times.
    return all(
        _is_constant(constant)
        and all(_is_same_block(reader, op, batch_norm) for reader in readers[_name(constant)])
        for constant in constants
    )


def _normalizes_channels(op: Node) -> bool:
    dimensions = ops.facts(op.target).dimensions
    return dimensions > 0 and bool(dimensions == op.meta["val"].dim())


def _is_same_block(reader: Node, op: Node, batch_norm: Node) -> bool:
    if reader.target is not op.target or len(reader.users) != 1 or _weights(reader) != _weights(op):
        return False
    (follower,) = reader.users
    return (
        follower.target is BATCH_NORM
        and follower.args[0] is reader
        and not follower.args[ops.TRAINING]
        and all(_key(follower.args[i]) == _key(batch_norm.args[i]) for i in CONSTANTS)
    )


def _weights(op: Node) -> list[object]:
    return [_key(argument) for argument in op.args[1:3] if argument is not None]


def _is_constant(argument: Argument) -> bool:
    return isinstance(argument, Node) and argument.op == "get_attr"


def _name(argument: Argument) -> str:
    assert isinstance(argument, Node)
    return str(argument.target)


def _key(argument: Argument) -> object:
    """Return a key for ``argument`` that is the same for two nodes that read one attribute."""
    return argument.target if isinstance(argument, Node) and argument.op == "get_attr" else argument


# Training: fused when fake-quantizes are there, folded at convert.


def fuse_batch_norms(prepared: GraphModule, may_fold: MayFold) -> None:
    """Fuse every pair in ``prepared``, a QAT graph with its fake-quantizes, in place."""
    for _, node in list(ops.batch_norm_nodes(prepared)):
        op = node.args[0]
        if isinstance(op, Node) and _can_be_fused(prepared, op, node) and may_fold(op, node):
            _fuse(prepared.graph, op, node)


def _can_be_fused(prepared: GraphModule, op: Node, batch_norm: Node) -> bool:
    if len(op.users) != 1 or not _normalizes_channels(op):
        return False
    if has_fixed_mode(batch_norm) and training_flag(batch_norm):
        # The batch norm uses the statistics of the batch in evaluation too, so there is nothing to fold.
        return False
    fake_quantize = op.args[1]
    if not isinstance(fake_quantize, Node) or fake_quantize.op != "call_module":
        return False
    # A weight with other users cannot be scaled for this batch norm alone.
    is_observer = is_activation_post_process(prepared.get_submodule(str(fake_quantize.target)))
    return is_observer and len(fake_quantize.users) == 1


def _fuse(graph: Graph, op: Node, batch_norm: Node) -> None:
    fake_quantize = op.args[1]
    assert isinstance(fake_quantize, Node)
    weight = graph_nodes.source_of(fake_quantize)
    bias, options = op.args[2] if len(op.args) > 2 else None, op.args[3:]

    def call(target: Any, *args: Any) -> Node:
        return graph.call_function(target, args)

    with graph.inserting_before(op):
        # With the statistics before they are updated by the batch.
        scale = _scale(call, *(batch_norm.args[i] for i in (ops.GAMMA, ops.RUNNING_VAR, ops.EPS)))
        beside = _beside_weight(call, scale, op, list(weight.meta["val"].shape))
        scaled = call(ATEN.mul.Tensor, weight, beside)
        # Error messages take the module path from here.
        scaled.meta["nn_module_stack"] = op.meta.get("nn_module_stack")
        op.args = (op.args[0], graph.node_copy(fake_quantize, lambda _: scaled), None, *options)
    graph.erase_node(fake_quantize)
    shape = [1, -1, *[1] * (ops.facts(op.target).dimensions - 2)]
    with graph.inserting_before(batch_norm):
        source = call(ATEN.div.Tensor, op, call(ATEN.reshape.default, scale, shape))
        if bias is not None:
            source = call(ATEN.add.Tensor, source, call(ATEN.reshape.default, bias, shape))
    batch_norm.update_arg(0, source)


@dataclass(frozen=True)
class _Fused:
    """One fused pair: nodes of ``bn(op(x, fq(w * s)) / s + b)``."""

    op: Node
    weight_observer: Node
    weight: Node
    bias: Node | None


def _match_fused(batch_norm: Node) -> _Fused | None:
    source, bias = batch_norm.args[0], None
    if _calls(source, ATEN.add.Tensor):
        source, reshaped = source.args[:2]  # type: ignore[union-attr]
        bias = reshaped.args[0] if _calls(reshaped, ATEN.reshape.default) else None  # type: ignore[union-attr]
        if bias is None:
            return None
    if not _calls(source, ATEN.div.Tensor):
        return None
    op = source.args[0]  # type: ignore[union-attr]
    observer = op.args[1] if isinstance(op, Node) and ops.facts(op.target).dimensions else None
    if not isinstance(observer, Node) or observer.op != "call_module":
        return None
    scaled = observer.args[0]
    if not _calls(scaled, ATEN.mul.Tensor):
        return None
    return _Fused(op, observer, scaled.args[0], bias)  # type: ignore[arg-type, union-attr]


def fold_batch_norms(prepared: GraphModule) -> None:
    """Fold every fused batch norm of ``prepared``, a QAT graph in evaluation, in place."""
    for _, node in list(ops.batch_norm_nodes(prepared)):
        if (fused := _match_fused(node)) is not None:
            _fold_fused(prepared, node, fused)
    prepared.graph.eliminate_dead_code()
    graph_nodes.delete_unused_modules(prepared)


def _fold_fused(prepared: GraphModule, batch_norm: Node, fused: _Fused) -> None:
    gamma, variance = (_value(prepared, batch_norm.args[i]) for i in (ops.GAMMA, ops.RUNNING_VAR))
    scale = _scale(_compute, gamma, variance, batch_norm.args[ops.EPS])
    weight = graph_nodes.attribute_of(prepared, fused.weight)
    bias = _folded_bias(prepared, batch_norm, fused.bias, scale).to(weight.dtype)
    beside = _beside_weight(_compute, scale, fused.op, weight.shape).to(weight.dtype).detach()
    # Unique: two convolutions may share a weight, and each folds its own batch norm.
    constants = {f"{batch_norm.name}{FOLDED_SCALE}": beside, f"{batch_norm.name}_folded_bias": bias}
    nodes = []
    with prepared.graph.inserting_before(fused.weight_observer):
        for name, value in constants.items():
            prepared.register_parameter(name, nn.Parameter(value))
            nodes.append(prepared.graph.get_attr(name))
            nodes[-1].meta["val"] = value
        # The folded weight is computed where it is read: there is one at a time.
        scaled = prepared.graph.call_function(ATEN.mul.Tensor, (fused.weight, nodes[0]))
    scaled.meta["val"] = fused.weight.meta["val"]
    fused.weight_observer.args = (scaled,)
    fused.op.args = (*fused.op.args[:2], nodes[1], *fused.op.args[3:])
    graph_nodes.replace_node(batch_norm, fused.op)


def _calls(node: object, target: object) -> bool:
    return isinstance(node, Node) and node.target is target


# Hides batch norms from torchao, whose folds are not used.


def hide_batch_norms(graph_module: GraphModule) -> None:
    """Replace every batch norm of ``graph_module`` by a call that torchao does not recognize."""
    _replace(graph_module, BATCH_NORM, kept_batch_norm)


def show_batch_norms(graph_module: GraphModule) -> None:
    """Undo ``hide_batch_norms``."""
    _replace(graph_module, kept_batch_norm, BATCH_NORM)


class HidingFromTorchao(WrappingQuantizer):
    """A Quantizer that shows the batch norms to ``quantizer`` alone: in calibration torchao's prepare would
    fold them before, in training fuse them after. It would not take numbers that are nodes, nor be silent
    about lists, among the keyword arguments of what is annotated."""

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        show_batch_norms(model)
        return super().transform_for_annotation(model)

    def annotate(self, model: GraphModule) -> GraphModule:
        annotated = super().annotate(model)
        hide_batch_norms(annotated)
        for node in annotated.graph.nodes:
            for name, value in node.kwargs.items():
                if isinstance(value, (Node, tuple, list)):
                    node.update_kwarg(name, slice(value, None))
        return annotated


def _show_keywords(graph_module: GraphModule) -> None:
    for node in graph_module.graph.nodes:
        for name, value in node.kwargs.items():
            if isinstance(value, slice):
                node.update_kwarg(name, value.start)


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


ROLES = {
    "weight": ops.GAMMA,
    "bias": ops.BETA,
    "running_mean": ops.RUNNING_MEAN,
    "running_var": ops.RUNNING_VAR,
}


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
    for _, node in ops.batch_norm_nodes(graph_module):
        arguments = {role: node.args[position] for role, position in ROLES.items()}
        eps = node.args[ops.EPS]
        assert isinstance(eps, float)
        fused = _match_fused(node)
        bias = None if fused is None or fused.bias is None else str(fused.bias.target)
        names = {role: str(arg.target) for role, arg in arguments.items() if isinstance(arg, Node)}
        yield BatchNormParts(names, eps, None if fused is None else fused.op, bias)


# torchao's prepare and convert, with batch norms as FX treats them.


def prepare(
    graph_module: GraphModule,
    quantizer: Quantizer,
    is_qat: bool,
    cumulative: Collection[str],
    may_fold: MayFold,
) -> GraphModule:
    """Insert observers or fake-quantizes into ``graph_module`` where ``quantizer`` annotates; see
    ``prepare_graph``."""
    if not is_qat:
        fold_constants(graph_module, may_fold)
        hide_batch_norms(graph_module)
    prepared = prepare_pt2e(graph_module, HidingFromTorchao(quantizer), is_qat=is_qat)
    show_batch_norms(prepared)
    _show_keywords(prepared)
    if is_qat:
        fuse_batch_norms(prepared, may_fold)
    average_cumulatively(prepared, cumulative)
    return prepared


def convert(
    prepared: GraphModule,
    fix_observers: Callable[[GraphModule], None],
    fold: Callable[[GraphModule], None],
) -> GraphModule:
    """Return ``prepared``, which is changed, with its observers replaced by q-dq. The result is to be
    wrapped: it has no code.

    Args:
        fix_observers: called after the batch norms are folded, before torchao reads the observers.
        fold: folds the weights.
    """
    with without_code(prepared.graph):
        drop_batch_counters(prepared)
        fix_averaging_factors(prepared)
        fold_batch_norms(prepared)
        fix_observers(prepared)
        hide_batch_norms(prepared)
        converted = convert_pt2e(prepared, fold)
        show_batch_norms(converted)
        return converted
