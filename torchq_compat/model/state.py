"""What the state_dict of a model holds beside its tensors, and the check of one that is loaded."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import Argument
from torchao.quantization.pt2e.fake_quantize import FakeQuantizeBase
from torchao.quantization.pt2e.observer import ObserverBase

from torchq_compat.errors import CheckpointError
from torchq_compat.read.qdq import CHOOSE_QPARAMS, DEQUANTIZE, DEQUANTIZE_PER_CHANNEL, QUANTIZE, is_qdq
from torchq_compat.support.argument_checks import shown
from torchq_compat.support.graph_nodes import attribute_of
from torchq_compat.support.quantized_tensors import is_quantized
from torchq_compat.support.torch_ao import FakeQuantizeBase as LegacyFakeQuantizeBase
from torchq_compat.support.torch_ao import ObserverBase as LegacyObserverBase
from torchq_compat.support.user_warnings import is_of_treespec, silenced

# Per-tensor qparams in the state_dict.
#
# PT2E writes them into the graph as literals, so the state_dict of a converted model would have integer
# weights without the scales of the activations around them. They are saved as one tensor, one row per q-dq
# node. For dynamic qparams, the row has what they are chosen with: the smallest scale, and the integers
# over which a tensor is spread.


def qparams_state(graph_module: GraphModule) -> Tensor:
    """Return the qparams of ``graph_module``, in graph order, as a float64 tensor of shape (q-dq nodes, 4).

    The columns are scale, zero point, quant_min and quant_max; for dynamic qparams smallest scale, 0, least
    and largest integer.
    """
    rows = [_row_of(node) for node in _per_tensor_nodes(graph_module)]
    return torch.tensor(rows, dtype=torch.float64).reshape(-1, 4)


def set_qparams_state(graph_module: GraphModule, state: Tensor) -> None:
    """Write the qparams of ``state``, which ``qparams_state`` returned, into the graph.

    Raises:
        CheckpointError: ``state`` is not a tensor, has another number of q-dq nodes, or invalid qparams.
    """
    nodes = _per_tensor_nodes(graph_module)
    if not isinstance(state, Tensor):
        raise CheckpointError.bad_value("the per-tensor qparams", f"are {shown(state)}")
    if state.shape != (len(nodes), 4):
        raise CheckpointError.other_model(
            f"it has {state.shape[0]} per-tensor q-dq nodes where the model has {len(nodes)}"
        )
    if not bool(state.isfinite().all() and (state[:, 0] > 0).all()):
        raise CheckpointError.bad_value(
            "the per-tensor qparams", "are no finite numbers, or hold a scale of 0"
        )
    for node, (_, zero_point, low, high) in zip(nodes, state.tolist(), strict=True):
        dtype = next(arg for arg in node.args if isinstance(arg, torch.dtype))
        if not (low < high and all(_has(dtype, number) for number in (zero_point, low, high))):
            numbers = f"zero point {zero_point:g} from {low:g} to {high:g}"
            raise CheckpointError.bad_value("the per-tensor qparams", f"hold {numbers}, not of {dtype}")
    for node, row in zip(nodes, state.tolist(), strict=True):
        node.args = _with_row(node, row)
    graph_module.recompile()


def _has(dtype: torch.dtype, number: float) -> bool:
    """Return whether integers of ``dtype`` have this ``number``; the qparams of floats are not read."""
    return dtype.is_floating_point or (
        number == int(number) and torch.iinfo(dtype).min <= number <= torch.iinfo(dtype).max
    )


def _row_of(node: Node) -> tuple[Any, ...]:
    if node.target is not CHOOSE_QPARAMS:
        return node.args[1:5]
    _, low, high, smallest_scale, _ = node.args
    return smallest_scale, 0, low, high


def _with_row(node: Node, row: list[float]) -> tuple[Any, ...]:
    """Return the arguments of ``node`` with the qparams of ``row``."""
    scale, zero_point, low, high = row[0], *map(int, row[1:])
    if node.target is CHOOSE_QPARAMS:
        return node.args[0], low, high, scale, *node.args[4:]
    return node.args[0], scale, zero_point, low, high, *node.args[5:]


def _per_tensor_nodes(graph_module: GraphModule) -> list[Node]:
    return [
        node for node in graph_module.graph.nodes if node.target in (QUANTIZE, DEQUANTIZE, CHOOSE_QPARAMS)
    ]


# Check a state before it is loaded: ``nn.Module.load_state_dict`` accepts some bad states, and crashes on
# others.


def check_state(state: Any, model: nn.Module) -> None:
    """Refuse anything that is not a state, and values that copying would silently change.

    Raises:
        CheckpointError: ``state`` is not a mapping from names; it has a value that is not a tensor, a meta
            tensor, a tensor whose numbers the dtype of ``model`` cannot hold, a range of an observer that is
            NaN or has ends that differ in number, a scale that is not positive and finite, a zero point that
            the integers do not have, or a shape of more values than it stores.
    """
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise CheckpointError.of("TQ960.not_a_state", result=shown(state))
    own, scales, observed = model.state_dict(), set(_scales(model)), set(_observed(model))
    zero_points = dict(_zero_points(model))
    for name, value in state.items():
        expected = own.get(name)
        if not isinstance(value, Tensor):
            if isinstance(expected, Tensor):
                raise CheckpointError.bad_value(name, f"must be a tensor, got {shown(value)}")
            continue
        if value.is_meta:
            raise CheckpointError.bad_value(name, "is a meta tensor, which has no values")
        if isinstance(expected, Tensor) and (value.is_nested or value.layout is not expected.layout):
            raise CheckpointError.bad_value(name, "is sparse or nested, where the model has a dense tensor")
        is_like_own = isinstance(expected, Tensor) and expected.shape == value.shape
        if not is_like_own and value.numel() * value.element_size() > value.untyped_storage().nbytes():
            # A few bytes in a file, terabytes when it is copied.
            raise CheckpointError.bad_value(
                name, f"has the shape {tuple(value.shape)}, but not as many values"
            )
        is_of_qparams = name in observed | scales | zero_points.keys()
        if is_quantized(value) and is_of_qparams:
            raise CheckpointError.bad_value(name, f"is {value.dtype}, which is no dtype of a range or scale")
        if isinstance(expected, Tensor) and not _can_hold(expected.dtype, value):
            raise CheckpointError.bad_value(name, f"is {value.dtype} where the model has {expected.dtype}")
        if name.endswith("_extra_state") and isinstance(expected, Tensor):
            given, own_form = (f"{t.dtype} of the shape {tuple(t.shape)}" for t in (value, expected))
            if value.shape[1:] != expected.shape[1:] or value.element_size() == 1 < expected.element_size():
                raise CheckpointError.bad_value(name, f"is {given}, where the model has {own_form}")
        if not is_of_qparams:
            continue
        held = _as_held(value, expected)
        if name in observed and bool(held.isnan().any()):
            raise CheckpointError.bad_value(name, "holds NaN")
        other = _other_end(name) if name in observed else None
        highest = state.get(other, own.get(other)) if other is not None else None
        if isinstance(highest, Tensor) and highest.numel() != value.numel():
            counts = f"{value.numel()} numbers, where {other} holds {highest.numel()}"
            raise CheckpointError.bad_value(name, f"holds {counts}")
        if name in scales and not bool((held.isfinite() & (held > 0)).all()):
            raise CheckpointError.bad_value(name, "holds a scale that is no positive number")
        if name in zero_points and not bool(held.isfinite().all()):
            raise CheckpointError.bad_value(name, "holds a zero point that is no number")
        if name in zero_points and not held.is_floating_point():
            limits = torch.iinfo(zero_points[name])
            if not bool(((held >= limits.min) & (held <= limits.max)).all()):
                raise CheckpointError.bad_value(name, f"holds a zero point outside of {zero_points[name]}")


def _as_held(value: Tensor, expected: Any) -> Tensor:
    """Return ``value`` as the model will hold it: 1e300 is infinite in float32."""
    held = value.to(expected.dtype) if isinstance(expected, Tensor) else value
    # torch (2.13) compares no numbers of 8 bits.
    return held.float() if held.is_floating_point() and held.element_size() == 1 else held


def _other_end(name: str) -> str | None:
    """Return the name of the highest value seen, for the name of the lowest; torchao's observers accept any
    number of either."""
    return f"{name.removesuffix('min_val')}max_val" if name.endswith("min_val") else None


def _can_hold(dtype: torch.dtype, value: Tensor) -> bool:
    """Return whether copying ``value`` to ``dtype`` keeps its numbers, up to the rounding of floats."""
    if value.dtype is dtype:
        return True
    if value.dtype is torch.bool or not torch.can_cast(value.dtype, dtype):
        return False
    if is_quantized(value) or value.is_floating_point() or dtype.is_floating_point or dtype.is_complex:
        return True
    # Integers wrap around.
    return bool(torch.equal(value.to(dtype).to(value.dtype), value))


def _observed(model: nn.Module) -> Iterator[str]:
    """Yield the names of what the observers of ``model`` have seen."""
    for path, module in model.named_modules():
        if isinstance(module, (ObserverBase, LegacyObserverBase)):
            for name, value in module.named_buffers(prefix=path, recurse=False):
                if value.is_floating_point():
                    yield name


def _scales(model: nn.Module) -> Iterator[str]:
    """Yield the names of the scales that fake-quantizes and the q-dq operators of ``model`` read."""
    for path, module in model.named_modules():
        if isinstance(module, (FakeQuantizeBase, LegacyFakeQuantizeBase)):
            yield f"{path}.scale"
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            scale = node.args[1] if is_qdq(node) else None
            if isinstance(scale, Node) and scale.op == "get_attr":
                yield f"{path}.{scale.target}".removeprefix(".")


def _zero_points(model: nn.Module) -> Iterator[tuple[str, torch.dtype]]:
    """Yield the names of the zero points that the q-dq operators of ``model`` read, with their dtypes."""
    for path, module in model.named_modules():
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            if is_qdq(node) and len(node.args) > 2:
                zero_point = node.args[2]
                dtypes = [arg for arg in node.args if isinstance(arg, torch.dtype)]
                if isinstance(zero_point, Node) and zero_point.op == "get_attr" and dtypes:
                    yield f"{path}.{zero_point.target}".removeprefix("."), dtypes[0]


# Integer tables with float zero points, FX's scheme for embeddings, rewritten for exported programs.
#
# torch computes ``dequantize_per_channel`` with float zero points, other runtimes do not: ExecuTorch's
# kernel stops the process. An exported graph computes the same numbers with plain operators, and for an
# embedding only on the rows that are looked up.


ATEN = torch.ops.aten


def with_plain_tables(model: nn.Module, graph: Graph) -> Graph | None:
    """Return a copy of ``graph`` that dequantizes tables with float zero points by plain operators.

    Args:
        model: the module with the tensors that ``graph`` reads.
        graph: the graph; it is not changed.

    Returns:
        The copy; None if ``graph`` has no such table.
    """
    if not any(_has_float_zero_points(model, node) for node in _dequantizes(graph)):
        return None
    with silenced(is_of_treespec, FutureWarning):
        plain = copy.deepcopy(graph)
    for table in _dequantizes(plain):
        if _has_float_zero_points(model, table):
            _write_plain(plain, table)
    return plain


def look_up_rows(graph: Graph, embedding: Node) -> None:
    """Rewrite ``dequantize_per_channel(table)[indices]`` in place, as operators on the rows.

    Args:
        graph: the graph of ``embedding``; the dequantize of the table stays in it.
        embedding: an ``aten.embedding`` node; not changed unless its table is such a dequantize, by rows.
    """
    table, indices = embedding.args[:2]
    assert isinstance(table, Node)
    if table.target is not DEQUANTIZE_PER_CHANNEL or table.args[3] != 0:
        return
    integers, scales, zero_points = table.args[:3]
    with graph.inserting_before(embedding):

        def rows_of(tensor: Argument) -> Node:
            rows = graph.call_function(ATEN.index.Tensor, (tensor, [indices]))
            return graph.call_function(ATEN.to.dtype, (rows, torch.float32))

        def column_of(tensor: Argument) -> Node:
            return graph.call_function(ATEN.unsqueeze.default, (rows_of(tensor), -1))

        shifted = graph.call_function(ATEN.sub.Tensor, (rows_of(integers), column_of(zero_points)))
        result = _in_out_dtype(graph, table, (shifted, column_of(scales)))
    result.meta = dict(embedding.meta)
    embedding.replace_all_uses_with(result)
    graph.erase_node(embedding)


def _dequantizes(graph: Graph) -> list[Node]:
    return list(graph.find_nodes(op="call_function", target=DEQUANTIZE_PER_CHANNEL))


def _has_float_zero_points(model: nn.Module, dequantize: Node) -> bool:
    zero_points = dequantize.args[2]
    if not isinstance(zero_points, Node) or zero_points.op != "get_attr":
        return False
    return bool(attribute_of(model, zero_points).is_floating_point())


def _write_plain(graph: Graph, table: Node) -> None:
    for reader in list(table.users):
        if reader.target is ATEN.embedding.default and reader.args[0] is table:
            look_up_rows(graph, reader)
    if table.users:
        _dequantize_whole(graph, table)
    else:
        graph.erase_node(table)


def _dequantize_whole(graph: Graph, table: Node) -> None:
    integers, scales, zero_points, axis = table.args[:4]
    assert isinstance(integers, Node)
    assert isinstance(axis, int)
    with graph.inserting_before(table):
        # The channel dimension is moved last, where the scales broadcast.
        moved = graph.call_function(ATEN.movedim.int, (integers, axis, -1))
        floats = graph.call_function(ATEN.to.dtype, (moved, torch.float32))
        shifted = graph.call_function(ATEN.sub.Tensor, (floats, zero_points))
        result = _in_out_dtype(graph, table, (shifted, scales))
        result = graph.call_function(ATEN.movedim.int, (result, -1, axis))
    result.meta = dict(table.meta)
    table.replace_all_uses_with(result)
    graph.erase_node(table)


def _in_out_dtype(graph: Graph, table: Node, factors: tuple[Node, Argument]) -> Node:
    """Insert the product of ``factors``, in the dtype that ``table`` dequantizes to."""
    product = graph.call_function(ATEN.mul.Tensor, factors)
    dtype = table.kwargs.get("out_dtype")
    return product if dtype is None else graph.call_function(ATEN.to.dtype, (product, dtype))


# Whether ``load_state_dict`` of our models accepts a state of FX: it refuses, unless the process enables it.
#
# ``torchq-compat run`` enables it: the script that it runs was written for FX's models and states.

#: Names of entries that only FX's models, and torch.ao's eager models, have.
ONLY_FX = re.compile(
    r"(^|\.)(([^.]+_)?activation_post_process(_\d+)?\.|weight_fake_quant\.|_packed_params\.|_all_weight_values\."
    r"|_packed_weight_|weight_(scale|zero_point|qscheme|dtype|axis)$)|_(scale|zero_point)_\d+$|_packed_weight_\d+$"
)
#: Names of entries that states of our models have, and no state of FX has.
OURS = re.compile(r"\.observer\.|^_frozen_param\d+$|(^|\.)_extra_state$|\.saturated$|\.loaded_scale$")
#: (model, state of FX) -> what ``load_state_dict`` returns.
Loader = Callable[[Any, Mapping[str, Any]], Any]
_LOADERS: list[Loader] = []


def accept_fx_states(loader: Loader) -> None:
    """Make ``loader`` load FX's states into our models, from now on in this process."""
    _LOADERS[:] = [loader]


def fx_state_loader() -> Loader | None:
    """Return the function that loads FX's states; None if they are refused."""
    return _LOADERS[0] if _LOADERS else None


def is_fx_state(state: Mapping[str, Any]) -> bool:
    """Return whether ``state`` has entries of FX's prepared or converted models, and none of only ours."""
    return any(ONLY_FX.search(name) for name in state) and not any(OURS.search(name) for name in state)
