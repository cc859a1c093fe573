"""What the state_dict of a model holds beside its tensors, and the check of one that is loaded."""

import copy
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torchao.quantization.pt2e.fake_quantize import FakeQuantizeBase
from torchao.quantization.pt2e.observer import ObserverBase

from torchq_compat.errors import CheckpointError
from torchq_compat.read.qdq import (
    CHOOSE_QPARAMS,
    CONVERT_DTYPE,
    DEQUANTIZE,
    DEQUANTIZE_PER_CHANNEL,
    QUANTIZE,
    is_qdq,
)
from torchq_compat.read.qparams import SCALE, ZERO_POINT, adopt_loaded_qparams
from torchq_compat.support.argument_checks import shown
from torchq_compat.support.graph_nodes import attribute_of, copied_graph
from torchq_compat.support.quantized_tensors import is_quantized
from torchq_compat.support.torch_ao import FakeQuantizeBase as LegacyFakeQuantizeBase
from torchq_compat.support.torch_ao import ObserverBase as LegacyObserverBase

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


# Check a state before it is loaded, and load it whole: ``nn.Module.load_state_dict`` accepts some bad states,
# crashes on others, and stops midway.

OBSERVERS = (ObserverBase, LegacyObserverBase, FakeQuantizeBase, LegacyFakeQuantizeBase)
#: A key of the metadata of states that were checked, or are the model's own.
CHECKED = "torchq_compat_checked"


class Numbers(NamedTuple):
    """What the numbers of an entry can be.

    Attributes:
        kind: ``range``, ``scale``, ``zero point``, or ``number`` for what observers have besides.
        other: the entry that has as many of them; empty if none does.
        counts: how many there can be; empty if that is not known.
        limits: the least and the largest; None if they are not known.
    """

    kind: str
    other: str = ""
    counts: tuple[int, ...] = ()
    limits: tuple[Any, Any] | None = None


def numbers_of_qparams(
    scale: str, zero_point: str, limits: tuple[Any, Any] | None = None, counts: tuple[int, ...] = ()
) -> dict[str, Numbers]:
    """Return what scales and zero points of these names can be, of integers within ``limits``."""
    return {
        scale: Numbers("scale", zero_point, counts),
        zero_point: Numbers("zero point", scale, counts, limits),
    }


def load_whole(
    model: nn.Module, state: Mapping[str, Any], load: Callable[..., Any], *, strict: bool = True
) -> Any:
    """Call ``load`` with a copy of ``state``, which was checked; if it does not fit, restore ``model``.

    Args:
        load: (state, strict=...) -> what ``nn.Module.load_state_dict`` returns.

    Raises:
        CheckpointError: ``state`` does not fit.
    """
    own = model.state_dict()
    # Observers keep the tensors they are given, uncopied: two models would share them.
    copies = [
        OrderedDict((k, v.clone() if isinstance(v, Tensor) else copy.copy(v)) for k, v in items.items())
        for items in (state, own)
    ]
    # Without version metadata torch treats the state as an old one, and resets the eps of observers.
    metadata = getattr(state, "_metadata", None) or getattr(own, "_metadata", {})
    for item in copies:
        item._metadata = {k: {**v, CHECKED: True} for k, v in metadata.items()}  # type: ignore[attr-defined]
    given, before = copies
    try:
        adopt_loaded_qparams(model, given)
        return load(given, strict=strict)
    except Exception as cause:
        adopt_loaded_qparams(model, before)
        load(before, strict=False)
        if isinstance(cause, CheckpointError):
            raise
        raise CheckpointError.other_model(str(cause)) from cause


def check_state(
    state: Any, model: nn.Module, rename: Callable[[dict[str, Any]], None] | None = None
) -> dict[str, Any]:
    """Refuse anything that is not a state, and values that copying would silently change.

    Args:
        rename: gives the entries of a copy of ``state`` the names that they have in ``model``.

    Returns:
        The state; its ranges and qparams are in the dtypes of ``model``.

    Raises:
        CheckpointError: ``state`` is not a mapping from names; it has a value that is not a tensor, a meta
            tensor, a tensor whose numbers the dtype of ``model`` cannot hold, a range of an observer that is
            NaN or has ends that differ in number, a scale that is not positive and finite, a zero point that
            the integers do not have, qparams for another number of channels, or a shape of more values than
            it stores.
    """
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise CheckpointError.of("TQ960.not_a_state", result=shown(state))
    own = model.state_dict()
    checked = OrderedDict(state)
    checked._metadata = getattr(state, "_metadata", None)  # type: ignore[attr-defined]
    _refuse(checked, lambda name: _problem(name, checked[name], own.get(name)))
    if rename is not None:
        rename(checked)
        _refuse(checked, lambda name: _problem(name, checked[name], own.get(name), is_renamed=True))
    numbers = {
        name: value for name, value in _numbers(model).items() if isinstance(checked.get(name), Tensor)
    }
    for name in numbers:
        checked[name] = _as_held(checked[name], own.get(name))
    _refuse(numbers, lambda name: _problem_of_numbers(name, numbers[name], {**own, **checked}))
    return checked


def _refuse(names: Iterable[str], problem_of: Callable[[str], str | None]) -> None:
    for name in names:
        if (problem := problem_of(name)) is not None:
            raise CheckpointError.bad_value(name, problem)


def _problem(name: str, value: Any, expected: Any, *, is_renamed: bool = False) -> str | None:
    """Return why ``value`` is none for the entry ``name``, where the model has ``expected``; what is not yet
    renamed may be a quantized tensor that stands for several entries."""
    if not isinstance(value, Tensor):
        return f"must be a tensor, got {shown(value)}" if isinstance(expected, Tensor) else None
    if value.is_meta:
        return "is a meta tensor, which has no values"
    if value.is_nested or value.layout is not getattr(expected, "layout", torch.strided):
        return "is sparse or nested, where the model has a dense tensor"
    is_like_own = isinstance(expected, Tensor) and expected.shape == value.shape
    if not is_like_own and value.numel() * value.element_size() > value.untyped_storage().nbytes():
        # A few bytes in a file, terabytes when it is copied.
        return f"has the shape {tuple(value.shape)}, but not as many values"
    if not isinstance(expected, Tensor):
        return None
    is_other_kind = is_renamed and is_quantized(value) and not is_quantized(expected)
    if is_other_kind or not _can_hold(expected.dtype, value):
        return f"is {value.dtype} where the model has {expected.dtype}"
    if expected.dim() == 0 and value.numel() != 1:
        return f"holds {value.numel()} numbers, where the model holds 1"  # torch takes the first.
    if name.endswith("_extra_state"):
        given, own_form = (f"{t.dtype} of the shape {tuple(t.shape)}" for t in (value, expected))
        if value.shape[1:] != expected.shape[1:] or value.element_size() == 1 < expected.element_size():
            return f"is {given}, where the model has {own_form}"
    return None


def _problem_of_numbers(name: str, numbers: Numbers, state: Mapping[str, Any]) -> str | None:
    held, other = state[name], state.get(numbers.other)
    if is_quantized(held) or held.is_complex():
        return f"is {held.dtype}, which is no dtype of a range or scale"
    values = held.float()  # What most kernels compute in.
    if numbers.kind == "range" and bool(values.isnan().any()):
        return "holds NaN"
    if numbers.kind == "scale" and not bool((values.isfinite() & (values > 0)).all()):
        return "holds a scale that is no positive number"
    if numbers.kind in ("number", "zero point") and not bool(values.isfinite().all()):
        return f"holds a {numbers.kind} that is NaN or infinite"
    if numbers.limits is not None and not held.is_floating_point():
        low, high = numbers.limits
        if not bool(((held >= low) & (held <= high)).all()):
            return f"holds a zero point outside of {low} to {high}"
    # Observers and fake-quantizes accept any number of values.
    if numbers.counts and held.numel() not in numbers.counts:
        return f"holds {held.numel()} numbers, where the model has {numbers.counts[0]}"
    if isinstance(other, Tensor) and other.numel() != held.numel():
        return f"holds {held.numel()} numbers, where {numbers.other} holds {other.numel()}"
    if not name.endswith("min_val") or not isinstance(other, Tensor):
        return None
    if other.shape != held.shape:
        return f"has the shape {tuple(held.shape)}, where {numbers.other} has {tuple(other.shape)}"
    if is_no_range(values, other):
        return f"is larger than {numbers.other}, or infinite"
    return None


def is_no_range(low: Tensor, high: Tensor) -> bool:
    """Return whether the range of an observer has seen no values that ``low`` and ``high`` could be."""
    is_unseen = low.isposinf() & high.isneginf()
    return not bool((is_unseen | ((low <= high) & low.isfinite() & high.isfinite())).all())


def _as_held(value: Tensor, expected: Any) -> Tensor:
    """Return ``value`` as the model will hold it: 1e300 is infinite in float32."""
    if not isinstance(expected, Tensor) or is_quantized(value):
        return value
    held = value.to(expected.dtype)
    # Observers read the shape of one number.
    return held.reshape((1,) * expected.dim()) if held.numel() == 1 else held


def _can_hold(dtype: torch.dtype, value: Tensor) -> bool:
    """Return whether copying ``value`` to ``dtype`` keeps its numbers, up to the rounding of floats."""
    if value.dtype is dtype:
        return True
    if value.dtype is torch.bool or not torch.can_cast(value.dtype, dtype):
        return False
    if is_quantized(value) or dtype.is_complex:
        return True
    if value.is_floating_point():
        held = value.to(dtype)
        # torch (2.13) compares no numbers of 8 bits.
        before, after = (item.float() if item.element_size() == 1 else item for item in (value, held))
        return bool((before.isfinite() == after.isfinite()).all())
    if dtype.is_floating_point:
        return True
    # Integers wrap around.
    return bool(torch.equal(value.to(dtype).to(value.dtype), value))


def _numbers(model: nn.Module) -> dict[str, Numbers]:
    """Return what the observers, q-dq operators and other modules of ``model`` save, by name."""
    result: dict[str, Numbers] = {}
    modules = dict(model.named_modules())
    for path, module in modules.items():
        inside: dict[str, Numbers] = getattr(module, "numbers_in_state", dict)()
        if isinstance(module, OBSERVERS):
            inside = _numbers_of_observer(module, _counts(path, module, modules))
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            dtypes = [index for index, arg in enumerate(node.args) if isinstance(arg, torch.dtype)]
            if is_qdq(node) and dtypes and node.target not in (CHOOSE_QPARAMS, CONVERT_DTYPE):
                scale, zero_point = (str(getattr(arg, "target", "")) for arg in node.args[1:3])
                inside |= numbers_of_qparams(scale, zero_point, node.args[dtypes[0] - 2 : dtypes[0]])
        prefix = f"{path}." if path else ""
        for name, numbers in inside.items():
            result[f"{prefix}{name}"] = numbers._replace(other=f"{prefix}{numbers.other}")
    return result


def _counts(path: str, observer: Any, modules: Mapping[str, nn.Module]) -> tuple[int, ...]:
    """Return how many values ``observer`` can have: one, or one for each channel of a weight and fewer before
    it is seen; empty if only the call tells."""
    if "channel" not in str(getattr(observer, "qscheme", "channel")):
        return (1,)
    owner, is_of_weight, _ = path.rpartition("weight_fake_quant")
    weight = getattr(modules.get(owner.removesuffix(".")), "weight", None) if is_of_weight else None
    return () if weight is None else (weight.shape[int(observer.ch_axis)], 1, 0)


def _numbers_of_observer(observer: Any, counts: tuple[int, ...]) -> dict[str, Numbers]:
    buffers = {name: value for name, value in observer._buffers.items() if value is not None}
    result = {name: Numbers("number") for name, value in buffers.items() if value.is_floating_point()}
    if {"min_val", "max_val"} <= result.keys():
        result["min_val"] = Numbers("range", "max_val", counts)
        result["max_val"] = Numbers("range", "min_val", counts)
    result |= numbers_of_qparams(SCALE, ZERO_POINT)
    # A learned scale, a parameter, may have any value after a step: the next call clamps it.
    if "scale" in buffers:
        limits = getattr(observer, "quant_min", None), getattr(observer, "quant_max", None)
        known_limits = None if None in limits else limits
        result |= numbers_of_qparams("scale", "zero_point", known_limits, tuple(filter(None, counts)))
    return result


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
        The copy, which calls the functions below; None if ``graph`` has no such table.
    """
    if not any(_has_float_zero_points(model, node) for node in _dequantizes(graph)):
        return None
    plain = copied_graph(graph)
    for table in _dequantizes(plain):
        if not _has_float_zero_points(model, table):
            continue
        for reader in list(table.users) if table.args[3] == 0 else ():
            if reader.target is ATEN.embedding.default and reader.args[0] is table:
                reader.target, reader.kwargs = look_up_rows, dict(table.kwargs)
                reader.args = (*table.args[:3], reader.args[1])
        table.target = dequantize_channels
        if not table.users:
            plain.erase_node(table)
    return plain


def look_up_rows(
    integers: Tensor,
    scales: Tensor,
    zero_points: Tensor,
    indices: Tensor,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the rows at ``indices`` of a table that is quantized by rows."""
    rows, factor, shift = (
        ATEN.index.Tensor(item, [indices]).to(torch.float32) for item in (integers, scales, zero_points)
    )
    result: Tensor = (rows - shift.unsqueeze(-1)) * factor.unsqueeze(-1)
    return result if out_dtype is None else result.to(out_dtype)


def dequantize_channels(
    integers: Tensor,
    scales: Tensor,
    zero_points: Tensor,
    axis: int,
    *limits: Any,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return what ``quantized_decomposed.dequantize_per_channel`` computes."""
    shape = [1] * integers.dim()
    shape[axis] = -1
    factor, shift = (item.to(torch.float32).reshape(shape) for item in (scales, zero_points))
    result = (integers.to(torch.float32) - shift) * factor
    return result if out_dtype is None else result.to(out_dtype)


def _dequantizes(graph: Graph) -> list[Node]:
    return list(graph.find_nodes(op="call_function", target=DEQUANTIZE_PER_CHANNEL))


def _has_float_zero_points(model: nn.Module, dequantize: Node) -> bool:
    zero_points = dequantize.args[2]
    if not isinstance(zero_points, Node) or zero_points.op != "get_attr":
        return False
    return bool(attribute_of(model, zero_points).is_floating_point())


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
