"""The rules by which the states of one observer in several processes become one state.

The rule follows from what the observer keeps, so it covers torch.ao's classes, torchao's and this package's:

| state | rule |
|---|---|
| minimum and maximum | the least minimum, the greatest maximum; each channel by itself |
| the same, as a moving average | the mean over the processes that saw data |
| histogram | rebinned to the range of all, as torchao does between two batches, and added |
| counts | added |
| scale and zero point of a fake-quantize | computed anew from the merged range |
| switches of a fake-quantize, learned qparams | have to be equal |
| loaded qparams | hold until a process observes |

The order of the states is that of the ranks, on every rank, so every rank computes the same bits.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchq_compat.errors import ConvertError
from torchq_compat.read.observer_classes import FusedFakeQuantize
from torchq_compat.read.qparams import hold_qparams, release_qparams

#: The method by which a class that a user wrote merges its state.
METHOD = "merge_observer_states"
#: State -> its values in one process; entries of children have the child's name and a dot before them.
State = Mapping[str, Any]

LIBRARIES = ("torch", "torchao", "torchq_compat")
RANGE = ("min_val", "max_val")
LOADED = ("loaded_scale", "loaded_zero_point")
QPARAMS = ("scale", "zero_point")
COUNTS = ("seen", "saturated")
SWITCHES = ("fake_quant_enabled", "observer_enabled", "static_enabled", "learning_enabled")
CONSTANTS = ("eps", "quant_min", "quant_max")
BUFFERS = {*RANGE, *LOADED, *QPARAMS, *COUNTS, *SWITCHES, *CONSTANTS, "histogram"}
#: Those whose shape no observer changes.
FIXED = BUFFERS - {*RANGE, *LOADED, *QPARAMS}
#: From here on ranges lie far apart: those of all processes together, in the mean width of one.
FAR = 1.5
#: What observers keep outside their buffers, and how it is merged.
ATTRIBUTES: dict[str, Callable[[list[Any]], Any]] = {
    "left_out_infinity": any,
    "tensor_val": lambda lists: [tensor for part in lists for tensor in part],
}


def state_of(module: nn.Module) -> dict[str, Any]:
    """Return the whole state of an observer, on the CPU: its state dict, and what it keeps as attributes."""
    state = {
        name: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
        for name, value in module.state_dict().items()
    }
    for path, part in module.named_modules():
        for name in ATTRIBUTES.keys() & vars(part).keys():
            state[f"{path}.{name}" if path else name] = getattr(part, name)
    return state


def merge_states(module: nn.Module, states: Sequence[State], path: str) -> None:
    """Give ``module``, the observer at ``path``, the state that one process would have.

    Raises:
        ConvertError: the class has no rule, or the states do not fit each other.
    """
    if hasattr(type(module), METHOD):
        own = [{name: value for name, value in state.items() if name not in ATTRIBUTES} for state in states]
        getattr(module, METHOD)(own)
        return
    _check_has_rule(module, path)
    for name, child in module.named_children():
        inner = [_below(state, f"{name}.") for state in states]
        merge_states(child, inner, f"{path}.{name}")
    with torch.no_grad():
        _merge_own(module, states, path)


def _below(state: State, prefix: str) -> State:
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}


def has_seen(state: State) -> bool:
    """Return whether the observer of ``state``, or the one in the fake-quantize of ``state``, saw data."""
    low = next((value for name, value in state.items() if name.rpartition(".")[2] == "min_val"), None)
    high = next((value for name, value in state.items() if name.rpartition(".")[2] == "max_val"), None)
    if low is None or high is None:
        return True
    return bool(low.numel()) and not bool((low == torch.inf).all() and (high == -torch.inf).all())


def has_other_shape(unit: nn.Module, name: str, value: Any, held: Any) -> bool:
    """Return whether ``value``, given for ``name`` of ``unit``, has another shape than ``held`` can take."""
    is_fixed = name.rpartition(".")[2] in FIXED and not hasattr(type(unit), METHOD)
    return is_fixed and value.shape != held.shape


def _check_has_rule(module: nn.Module, path: str) -> None:
    if type(module).forward.__module__.partition(".")[0] in LIBRARIES and {*module._buffers} <= BUFFERS:
        return
    raise ConvertError.of("TQ950.no_rule", path=path, name=type(module).__qualname__, method=METHOD)


def _merge_own(module: nn.Module, states: Sequence[State], path: str) -> None:
    seen = [state for state in states if has_seen(state)]
    first = (seen or states)[0]
    for name in CONSTANTS:
        if name in module._buffers and name in first:
            _write(module, name, first[name])
    _check_equal(module, states, [name for name in SWITCHES if name in module._buffers], path)
    for name in COUNTS:
        if name in module._buffers:
            _write(module, name, torch.stack([state[name] for state in states]).sum(0))
    for name, merge in ATTRIBUTES.items():
        if hasattr(module, name):
            setattr(module, name, merge([state[name] for state in states if name in state]))
    if isinstance(module._buffers.get("min_val"), Tensor):
        _merge_ranges(module, seen or [first], path)
    _merge_qparams(module, states, seen, path)
    _merge_loaded(module, states, path)


def _merge_ranges(module: Any, states: Sequence[State], path: str) -> None:
    if len({state["min_val"].shape for state in states}) > 1:
        shapes = sorted({tuple(state["min_val"].shape) for state in states})
        raise ConvertError.of("TQ950.channels", path=path, shapes=shapes)
    lows, highs = (torch.stack([state[name] for state in states]) for name in RANGE)
    if _averages(module):
        # Sums of few float32 numbers are exact in float64: equal states keep their bits.
        low, high = (bounds.double().mean(0).to(bounds.dtype) for bounds in (lows, highs))
    else:
        low, high = lows.amin(0), highs.amax(0)
    is_finite = bool(low.isfinite().all() and high.isfinite().all())
    if "histogram" in module._buffers and is_finite:  # Else convert refuses, as in one process.
        histogram = torch.zeros_like(states[0]["histogram"])
        for state in states:
            histogram = _rebinned(module, state, histogram, low, high)
        _write(module, "histogram", histogram)
    _write(module, "min_val", low)
    _write(module, "max_val", high)


def _averages(module: nn.Module) -> bool:
    return getattr(module, "averaging_constant", 1) != 1


def lie_far_apart(merged: nn.Module, states: Sequence[State]) -> bool:
    """Return whether moving averages in ``states`` have ranges that the mean, in ``merged``, leaves out."""
    for name, part in merged.named_modules():
        own = [_below(state, f"{name}.") for state in states] if name else list(states)
        if hasattr(type(part), METHOD):
            return False
        if _averages(part) and isinstance(part._buffers.get("min_val"), Tensor):
            seen = [state for state in own if has_seen(state)]
            low, high = (torch.stack([state[key] for state in seen or own]) for key in RANGE)
            width = (high - low).mean(0).sum()
            if bool((high.amax(0) - low.amin(0)).sum() > FAR * width):
                return True
    return False


def _rebinned(module: Any, state: State, added_to: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return ``added_to``, a histogram over [low, high], plus the one of ``state``."""
    if not has_seen(state):
        return added_to
    combined: Tensor = module._combine_histograms(
        state["histogram"], state["min_val"], state["max_val"], added_to, low, high
    )
    return combined.to(added_to.dtype)


def _merge_qparams(module: Any, states: Sequence[State], seen: Sequence[State], path: str) -> None:
    names = [name for name in QPARAMS if name in {**module._buffers, **module._parameters}]
    observer: Any = getattr(module, "activation_post_process", None)
    learning = module._buffers.get("learning_enabled")
    ranges = observer is not None and "min_val" in observer._buffers
    if not ranges or (learning is not None and bool(learning)):
        _check_equal(module, states, names, path)
        return
    if not names or not seen:
        return
    for name in names:
        _write(module, name, seen[0][name])
    is_fused = isinstance(module, FusedFakeQuantize)
    qparams = module.trained_qparams() if is_fused else observer.calculate_qparams()
    for name, value in zip(QPARAMS, qparams, strict=True):
        _write(module, name, value)


def _merge_loaded(module: nn.Module, states: Sequence[State], path: str) -> None:
    loaded = [state for state in states if LOADED[0] in state]
    observed = any(LOADED[0] not in state and has_seen(state) for state in states)
    release_qparams(module)
    if loaded and not observed:
        if not all(torch.equal(state[name], loaded[0][name]) for state in loaded for name in LOADED):
            raise _differ(path, "loaded qparams")
        hold_qparams(module, loaded[0][LOADED[0]], loaded[0][LOADED[1]])


def _check_equal(module: nn.Module, states: Sequence[State], names: Sequence[str], path: str) -> None:
    for name in names:
        if not all(torch.equal(state[name], states[0][name]) for state in states):
            raise _differ(path, name)
        _write(module, name, states[0][name])


def _differ(path: str, what: str) -> ConvertError:
    return ConvertError.of("TQ950.ranks_differ", what=what, path=path)


def _write(module: nn.Module, name: str, value: Tensor) -> None:
    """Change a buffer in place, because DistributedDataParallel holds it."""
    tensor: Tensor = getattr(module, name)
    if tensor.shape != value.shape:
        tensor.resize_(value.shape)
    tensor.copy_(value)
