"""torchao's prepare and convert of one graph, with FX's rules for its observers."""

import operator
from collections.abc import Collection, Iterator
from contextlib import nullcontext
from enum import Enum
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.fake_quantize import FakeQuantizeBase
from torchao.quantization.pt2e.observer import (
    FixedQParamsObserver,
    NoopObserver,
    PlaceholderObserver,
    RecordingObserver,
)
from torchao.quantization.pt2e.quantizer import Quantizer
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from torchq_compat.annotate import batch_norm
from torchq_compat.annotate.annotation import OuterGraphQuantizer, SpecQuantizer, op_record
from torchq_compat.read import observers
from torchq_compat.read.observer_classes import FusedFakeQuantize, converts_otherwise, use_observer_qparams
from torchq_compat.read.qdq import LARGE, constant_value, fold_weights, is_scaled_weight
from torchq_compat.read.qparams import FrozenObserver, fold_weight, has_loaded_qparams, qparams_of
from torchq_compat.read.torch_ao_classes import is_of_torch_ao
from torchq_compat.support import graph_nodes, metadata
from torchq_compat.support.dtypes import SIXTEEN_BITS, dtype_range, is_integer, plain_dtype
from torchq_compat.support.process_state import prepare_pt2e, without_code
from torchq_compat.support.torch_ao import observer as legacy_observer
from torchq_compat.support.upstream import FakeTensor, is_activation_post_process
from torchq_compat.support.user_warnings import silenced

# Observers that a script replaced or removed between prepare and convert.
#
# Scripts and toolkits set ``prepared.activation_post_process_0`` to another observer of torch.ao, or erase
# the node. torchao's convert knows its own classes only, and would leave the value float without a word.


class ObservedPlace(NamedTuple):
    """A place that prepare observes.

    Attributes:
        target: the path of the observer.
        op: the path of the op in its decision; empty if the value belongs to none.
        is_weight: whether it observes a weight of the model.
    """

    target: str
    op: str
    is_weight: bool


def observed_op(observer_node: Node) -> str:
    """Return the label of the op whose result, else whose input or weight, ``observer_node`` observes."""
    for node in (observer_node.args[0], *observer_node.users):
        record = op_record(node) if isinstance(node, Node) else None
        if record is not None:
            return record.label
    return ""


def observed_places(prepared: GraphModule) -> Iterator[ObservedPlace]:
    """Yield the places that ``prepared`` observes, in graph order."""
    for node, _ in observer_nodes(prepared):
        yield ObservedPlace(str(node.target), observed_op(node), graph_nodes.source_of(node).op == "get_attr")


def adopt_observers(prepared: GraphModule) -> tuple[str, ...]:
    """Adapt the observers of torch.ao in ``prepared``, which is changed, to torchao's convert; they keep what
    they have observed. Return their paths."""
    adopted: dict[int, nn.Module] = {}
    for node, module in graph_nodes.called_modules(prepared):
        if is_of_torch_ao(module):
            # A shared observer is one module under several names.
            prepared.set_submodule(
                str(node.target), adopted.setdefault(id(module), observers.adapted(module))
            )
    calls = (node for node, module in graph_nodes.called_modules(prepared) if module in adopted.values())
    return tuple(dict.fromkeys(str(node.target) for node in calls))


# torchao's prepare and convert of one graph: prepare with given specs, convert with FX's ranges.
#
# The outer graph and every recurrent cell go through ``prepare_graph`` and ``convert_graph``.


TO_DTYPE = torch.ops.aten.to.dtype
#: Operators that call a graph module -> the position of that argument.
BODY_OF_LOOP = {torch.ops.higher_order.scan: 0, torch.ops.higher_order.while_loop: 1}


def prepare_graph(
    graph_module: GraphModule,
    quantizer: Quantizer,
    *,
    is_qat: bool = False,
    cumulative: Collection[str] = (),
    may_fold: batch_norm.MayFold = batch_norm.folds_all,
) -> GraphModule:
    """Put observers (or fake-quantizes) into ``graph_module`` where ``quantizer`` says. The result is to be
    wrapped: it has no code, or that of an earlier graph.

    Args:
        cumulative: what ``batch_norm.before_capture`` returned.
        may_fold: which batch norms may be folded into the op that they follow.
    """
    asked = OuterGraphQuantizer(quantizer)
    # A user's Quantizer may run the graph.
    with without_code(graph_module.graph) if isinstance(quantizer, SpecQuantizer) else nullcontext():
        prepared = batch_norm.prepare(graph_module, asked, is_qat, cumulative, may_fold)
        if is_qat:
            _prepare_bodies(prepared, asked)
        _call_shared_observers_by_one_name(prepared)
        return _allow_train_eval(prepared)


def calibrate_with_float_weights(prepared: GraphModule) -> None:
    """Let the fake-quantizes of weights only observe, for calibration: FX has them in training only."""
    for node, module in observer_nodes(prepared):
        if _fake_quantizes_weight(graph_nodes.source_of(node), module):
            module.disable_fake_quant()  # type: ignore[operator]


def convert_graph(
    prepared: GraphModule, *, as_fx: bool = True, is_trained: bool = True, observer_qparams: bool = False
) -> GraphModule:
    """Replace the observers of ``prepared`` by q-dq. This changes ``prepared``: pass a copy.

    Args:
        as_fx: whether to clamp to FX's ranges and choose dynamic qparams as FX does, not as torchao does.
        is_trained: whether to keep the ranges that fake-quantizes clamped to in training.
        observer_qparams: whether fake-quantizes convert with their observers' qparams and the dtype's
            range, as in FX. The metadata of the result name what this changes, or would change.
    """
    otherwise: list[str] = []
    adopt_observers(prepared)

    def fix_observers(folded: GraphModule) -> None:
        _observe_weights(folded)
        if as_fx:
            for node, module in observer_nodes(folded):
                if converts_otherwise(module, is_trained=is_trained) and (label := observed_op(node)):
                    otherwise.append(label)
            if observer_qparams:
                for _, module in observer_nodes(folded):
                    use_observer_qparams(module)
            _freeze_activation_observers(folded, is_trained=is_trained and not observer_qparams)
            for node, module in observer_nodes(folded):
                # As FX's reference conversion, which chooses qparams in each call.
                if not isinstance(module, observers.WeightObserver) and getattr(module, "is_dynamic", False):
                    folded.set_submodule(str(node.target), observers.DynamicQuantization.of(module))
        _fold_float_qparams(folded)
        for node, module in observer_nodes(folded):
            # Where torchao's convert reads them; weight observers do this themselves.
            if has_loaded_qparams(module) and not isinstance(module, observers.WeightObserver):
                folded.set_submodule(str(node.target), FrozenObserver(module, qparams_of(module)))
        _cast_around_observers(folded)
        # They name nodes of the original, whose q-dq torchao's convert would look for.
        for node in folded.graph.nodes:
            node.meta.pop(Q_ANNOTATION_KEY, None)

    converted = _allow_train_eval(batch_norm.convert(prepared, fix_observers, _fold_all))
    metadata.FX_CONVERTS_OTHERWISE.write(converted, tuple(dict.fromkeys(otherwise)))
    return converted


def _fold_all(converted: GraphModule) -> None:
    """Fold the weights of ``converted`` and of the bodies of its loops."""
    fold_weights(converted)
    for node in converted.graph.nodes:
        if node.target in BODY_OF_LOOP:
            _fold_all(converted.get_submodule(str(node.args[BODY_OF_LOOP[node.target]].target)))  # type: ignore[arg-type]


def observer_nodes(graph_module: GraphModule) -> Iterator[tuple[Node, nn.Module]]:
    """Yield each node that calls an observer or fake-quantize, with the module it calls."""
    called = graph_nodes.called_modules(graph_module)
    return ((node, module) for node, module in called if is_activation_post_process(module))


class ObserverFault(Enum):
    """The reason why the qparams of an observer would be meaningless."""

    UNSEEN = "has seen no data"
    NOT_FINITE = "has seen NaN or infinity"
    NO_QPARAMS = "computes no qparams"
    ACCIDENT = "has a range that no calibration data of a model have"


#: What lies beyond comes from an overflow or a defect of the data; a step of 8 bits is billions then.
LARGEST_RANGE = 1e12
#: Observers that only record, or only name a dtype, and never have a scale.
WITHOUT_QPARAMS = (
    *(NoopObserver, PlaceholderObserver, RecordingObserver),
    *(legacy_observer.NoopObserver, legacy_observer.PlaceholderObserver, legacy_observer.RecordingObserver),
)


def observer_faults(graph_module: GraphModule) -> list[tuple[str, ObserverFault]]:
    """Return the label and the fault of each observer in ``graph_module`` that cannot be converted."""
    result = []
    for node, module in observer_nodes(graph_module):
        if not _quantizes_static(module):
            continue
        if isinstance(module, observers.WeightObserver):
            fault = ObserverFault.NO_QPARAMS if isinstance(module.observer, WITHOUT_QPARAMS) else None
        else:
            fault = observer_fault(module)
        if fault is not None:
            result.append((observer_label(node), fault))
    return result


def observers_without_infinity(graph_module: GraphModule) -> list[str]:
    """Return the labels of the observers that have met infinite values and ignored them."""
    return [
        observer_label(node)
        for node, module in observer_nodes(graph_module)
        if any(getattr(part, "left_out_infinity", False) for part in module.modules())
    ]


def observer_label(node: Node) -> str:
    """Return a readable label of the observer that ``node`` calls: module path, observed op, observer."""
    source = graph_nodes.source_of(node)
    path = graph_nodes.module_path_of(source)
    if not path:
        return f"{source.name} ({node.target})"
    name = path if path.replace(".", "_") == source.name else f"{path}/{source.name}"
    return f"{name} ({node.target})"


def _call_shared_observers_by_one_name(prepared: GraphModule) -> None:
    """Call each shared observer by its first name: torchao registers it once per node, but
    ``named_modules()`` has only the first name."""
    first = {module: path for path, module in prepared.named_modules()}
    again = [(node, first[m]) for node, m in observer_nodes(prepared) if node.target != first[m]]
    for node, path in again:
        prepared.delete_submodule(str(node.target))
        node.target = path


def _prepare_bodies(prepared: GraphModule, asked: OuterGraphQuantizer) -> None:
    """Prepare the bodies of loops: torchao's convert handles them, its prepare for training does not (torchao
    0.18)."""
    for node in list(prepared.graph.nodes):
        if node.target in BODY_OF_LOOP:
            name = str(node.args[BODY_OF_LOOP[node.target]].target)
            body = prepared.get_submodule(name)
            assert isinstance(body, GraphModule)
            setattr(prepared, name, prepare_pt2e(body, asked))


def _allow_train_eval(graph_module: GraphModule) -> GraphModule:
    """Restore train() and eval() of the graph and of loop bodies: torchao makes them raise, but scripts call
    them."""
    for module in graph_module.modules():
        if isinstance(module, GraphModule):
            module.__dict__.pop("train", None)
            module.__dict__.pop("eval", None)
    return graph_module


def _observe_weights(prepared: GraphModule) -> None:
    """Let the observers of weights observe them, and the fake-quantizes of weights once more, as their next
    call in evaluation would: since the last call the optimizer and the folded batch norm changed the weights.
    """
    for node, module in observer_nodes(prepared):
        source = graph_nodes.source_of(node)
        if isinstance(module, observers.WeightObserver):
            module.observe_weight(constant_value(prepared, source), str(source.target))
        elif _fake_quantizes_weight(source, module) and not has_loaded_qparams(module):
            if observer_fault(module) is ObserverFault.UNSEEN:
                module.disable_fake_quant()  # type: ignore[operator]  # No training used its qparams.
            with torch.no_grad():
                _observe_weight(prepared, source, module)


def _observe_weight(prepared: GraphModule, source: Node, module: nn.Module) -> None:
    if isinstance(module, FusedFakeQuantize):
        factors = source.args[:2] if is_scaled_weight(source) else (source,)
        module.observe(*(constant_value(prepared, factor) for factor in factors))  # type: ignore[arg-type]
        return
    value = constant_value(prepared, source)
    result = module(value.clone() if source.op == "get_attr" else value)  # Kernels ask for it as if to write.
    if result.numel() > LARGE:
        del result, value
        graph_nodes.give_back_freed()


def _fake_quantizes_weight(source: Node, module: nn.Module) -> bool:
    return isinstance(module, FakeQuantizeBase) and (source.op == "get_attr" or is_scaled_weight(source))


def _freeze_activation_observers(prepared: GraphModule, *, is_trained: bool) -> None:
    """Replace each static per-tensor observer by one with its final qparams and the range FX clamps to.

    A reduced-range observer has quant_max 127, and PT2E's quantize op would saturate there; FX's saturates
    at the dtype's own 255. Inside the calibrated range both give the same integers.
    """
    # List all nodes first: nodes that share an observer share its name, which the frozen one replaces.
    for node, module in list(observer_nodes(prepared)):
        if isinstance(module, observers.WeightObserver) or not _quantizes_static(module):
            continue
        # The caller warns once about all observers without data, with their paths.
        with silenced():
            scale, zero_point = qparams_of(module)
        if scale.numel() != 1:
            continue
        limits = _range_of_quantize_op(module, is_trained=is_trained)
        frozen = FrozenObserver(module, (scale.float(), zero_point), limits)
        prepared.set_submodule(str(node.target), frozen)


def activations_as_observed(prepared: GraphModule) -> None:
    """Let the fake-quantizes of activations convert with their observers' qparams, for custom modules, which
    read them before the graph is converted."""
    for node, module in observer_nodes(prepared):
        if graph_nodes.source_of(node).op != "get_attr":
            use_observer_qparams(module)


def _fold_float_qparams(prepared: GraphModule) -> None:
    """Fold the weights with float zero points, whatever observes them and wherever their qparams are from."""
    for node, module in observer_nodes(prepared):
        is_weight = graph_nodes.source_of(node).op == "get_attr"
        if is_weight and getattr(module, "qscheme", None) is torch.per_channel_affine_float_qparams:
            fold_weight(prepared, node, *qparams_of(module), module)


def _cast_around_observers(prepared: GraphModule) -> None:
    """Insert casts to float32 and back around observers of other float dtypes.

    quantized_decomposed's quantize accepts float32 only, so float64 is cast. For float16 and bfloat16, a
    dynamic q-dq pair and one of dtype float16 return float32, which is cast back.
    """
    graph = prepared.graph
    for node, module in list(observer_nodes(prepared)):
        source = graph_nodes.source_of(node)
        value = source.meta.get("val")
        if not isinstance(value, Tensor) or not _comes_out_narrow(module, value.dtype):
            continue
        with graph.inserting_before(node):
            narrow = graph.call_function(TO_DTYPE, (source, torch.float32))
        with value.fake_mode if isinstance(value, FakeTensor) else nullcontext():
            narrow.meta["val"] = value.float()
        node.args = (narrow,)
        with graph.inserting_after(node):
            wide = graph.call_function(TO_DTYPE, (node, value.dtype))
        wide.meta["val"] = value
        node.replace_all_uses_with(wide, delete_user_cb=partial(operator.is_not, wide))


def _comes_out_narrow(module: nn.Module, dtype: torch.dtype) -> bool:
    """Return whether the q-dq pair of ``module`` would change the ``dtype`` of its input."""
    if dtype in (torch.float16, torch.bfloat16):
        return getattr(module, "is_dynamic", False) or getattr(module, "dtype", None) is torch.float16
    return dtype is torch.float64


def _range_of_quantize_op(module: nn.Module, *, is_trained: bool) -> tuple[int, int]:
    """Return the range that the quantize op of ``module`` clamps to: the dtype's range, as in FX.

    The observer's own range is kept if the model was trained with it (a fake-quantize clamps to it), if it
    was given with fixed qparams, and for dtypes that FX does not have.
    """
    source, dtype = getattr(module, "activation_post_process", module), plain_dtype(module.dtype)  # type: ignore[arg-type]
    trained_to = is_trained and isinstance(module, FakeQuantizeBase)
    if trained_to or isinstance(source, FixedQParamsObserver) or dtype in SIXTEEN_BITS:
        return int(source.quant_min), int(source.quant_max)  # type: ignore[arg-type]
    return dtype_range(dtype)


def _quantizes_static(module: nn.Module) -> bool:
    dtype = getattr(module, "dtype", None)  # A block-wise observer writes its q-dq itself, and has none.
    return dtype is not None and is_integer(dtype) and not getattr(module, "is_dynamic", False)


def observer_fault(module: nn.Module) -> ObserverFault | None:
    if has_loaded_qparams(module):
        return None
    if isinstance(module, observers.LegacyFakeQuantizeAdapter) and module.learns_qparams:
        scale, _ = module.calculate_qparams()
        return None if bool(scale.isfinite().all()) else ObserverFault.NOT_FINITE
    if isinstance(getattr(module, "legacy", module), WITHOUT_QPARAMS):
        return ObserverFault.NO_QPARAMS
    for part in module.modules():
        low, high = getattr(part, "min_val", None), getattr(part, "max_val", None)
        if isinstance(low, Tensor) and isinstance(high, Tensor):
            if low.numel() == 0 or bool(((low == torch.inf) & (high == -torch.inf)).any()):
                return ObserverFault.UNSEEN
            if not bool(low.isfinite().all() and high.isfinite().all() and (low <= high).all()):
                return ObserverFault.NOT_FINITE
            if bool((torch.maximum(low.abs(), high.abs()) > LARGEST_RANGE).any()):
                return ObserverFault.ACCIDENT
    return None
