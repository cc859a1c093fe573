"""One model through live FX and through this package: what is quantized, and how near it is to float."""

from __future__ import annotations

import contextlib
import copy
import functools
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.ao.quantization.quantize_fx as fx
from torch import Tensor, nn
from torch.ao.quantization import get_default_qconfig_mapping
from torch.fx import GraphModule

import torchq_compat as tc
from tests.helpers.oracle import (
    CONVERT_LSTM,
    MAP_LSTM,
    activation_qparams,
    calibrate,
    fx_activation_qparams,
    leaves,
    sqnr,
)
from tests.helpers.plain_loops import with_plain_loops
from tests.parity.fx_decisions import quantized_by_fx, quantized_by_us
from tests.zoo.entry import Entry, Inputs
from tests.zoo.sane_statistics import settle
from torchq_compat.errors import QuantizationWarning, TorchQCompatError

__all__ = ["OWN_SIZE", "measure", "name_of_sizes"]

MAPPING = "x86"
BATCHES = 3
#: Number of batches of a size whose noise and signal are pooled: the SQNR of a few numbers varies by 20 dB.
POOLED = 6
#: The name that plain loops use for the sizes a model is prepared at.
OWN_SIZE = "as prepared"
WRONG_SHAPE = -1000.0  # dB
#: The SQNR in dB if there is no noise in float64, so that the numbers stay JSON.
EQUAL = 999.0
QPARAMS_TOLERANCE = 1e-5


def measure(entry: Entry) -> dict[str, Any]:
    """Return the row of ``entry``: plain values, ready for JSON."""
    torch.manual_seed(0)
    batches = [entry.batch() for _ in range(BATCHES)]
    model = settle(entry.make(), [entry.large_batch() for _ in range(BATCHES)])
    # A calibrated batch and an unseen one.
    tested = [batches[0], entry.batch()]
    others = {name_of_sizes(sizes): _batches(entry, sizes) for sizes in entry.others}
    unseen = _batches(entry, {})
    _warm_up()
    theirs = _fx_side(entry, model, batches)
    ours = _our_side(entry, model, batches, theirs["sides"])
    row: dict[str, Any] = {"model": entry.name, "source": entry.source}
    row["batch_norm"] = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())
    row["fx"] = {key: value for key, value in theirs.items() if key != "sides"}
    row["ours"] = {key: value for key, value in ours.items() if key != "sides"}
    row.update(_differences(theirs["sides"], ours["sides"]))
    for side in (theirs, ours):
        name = "fx" if side is theirs else "ours"
        row[name]["sqnr"] = {
            form: _sqnr(entry, model, runner, tested)
            for form, runner in side["sides"].items()
            if form != "prepared"
        }
    row["prepared"] = ours.get("prepared_sqnr", {})
    row["own_size"] = {
        form: _sqnr(entry, model, runner, unseen, pooled=True)
        for form, runner in ours["sides"].items()
        if form != "prepared"
    }
    if entry.is_recurrent and ours["sides"]:
        loops = with_plain_loops(ours["sides"]["reference"], model)
        row["plain_loops"] = {
            name: _sqnr(entry, model, loops, given, pooled=True)
            for name, given in {OWN_SIZE: unseen, **others}.items()
        }
    row["other_sizes"] = {
        name: {
            **{
                form: _sqnr(entry, model, runner, given, pooled=True)
                for form, runner in ours["sides"].items()
            },
            **{
                f"fx_{form}": _sqnr(entry, model, runner, given, pooled=True)
                for form, runner in theirs["sides"].items()
            },
        }
        for name, given in others.items()
    }
    return row


def _batches(entry: Entry, sizes: Mapping[str, int]) -> list[Inputs]:
    return [entry.batch(**sizes) for _ in range(POOLED)]


def name_of_sizes(sizes: Mapping[str, int]) -> str:
    return " ".join(f"{name} {size}" for name, size in sizes.items())


@functools.cache
def _warm_up() -> None:
    """Import and compile what is needed once, so that it counts in no measured time."""
    model, given = nn.Sequential(nn.Linear(2, 2), nn.ReLU()).eval(), (torch.randn(3, 2),)
    with _quiet():
        for engine in (fx, tc):
            prepared = engine.prepare_fx(copy.deepcopy(model), get_default_qconfig_mapping(MAPPING), given)
            prepared(*given)
            engine.convert_fx(prepared)


def _fx_side(entry: Entry, model: nn.Module, batches: Sequence[Inputs]) -> dict[str, Any]:
    """Return times, refusal and graphs of FX."""
    side: dict[str, Any] = {"sides": {}}
    has_lstm = any(isinstance(module, nn.LSTM) for module in model.modules())
    custom = (MAP_LSTM, CONVERT_LSTM) if has_lstm else (None, None)
    with _quiet():
        try:
            prepared, seconds = _timed(
                lambda: fx.prepare_fx(
                    copy.deepcopy(model), get_default_qconfig_mapping(MAPPING), batches[0], custom[0]
                )
            )
            side["prepare_s"] = seconds
            # Calibration is part of the trial: models whose sizes a proxy fixed fail here.
            calibrate(prepared, batches)
            reference = fx.convert_to_reference_fx(copy.deepcopy(prepared), custom[1])
            to_lower = copy.deepcopy(prepared)
            lowered, side["convert_s"] = _timed(lambda: fx.convert_fx(to_lower, custom[1]))
            _run(reference, batches[0])
        except Exception as failure:
            side["refused"] = _first_line(failure)
            return side
    recurrent = (nn.RNNBase, nn.RNNCellBase)
    side["float_recurrent"] = any(
        type(m).__module__ == "torch.nn.modules.rnn" and isinstance(m, recurrent) for m in reference.modules()
    )
    side["sides"] = {"prepared": prepared, "reference": reference, "lowered": lowered}
    return side


def _our_side(
    entry: Entry, model: nn.Module, batches: Sequence[Inputs], theirs: Mapping[str, GraphModule]
) -> dict[str, Any]:
    """Return times, refusal, warnings and graphs of this package."""
    side: dict[str, Any] = {"sides": {}, "warnings": []}
    config = tc.get_default_prepare_custom_config() if entry.is_recurrent else None
    stage = "prepare"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            prepared, side["prepare_s"] = _timed(
                lambda: tc.prepare_fx(model, get_default_qconfig_mapping(MAPPING), batches[0], config)
            )
            stage = "calibrate"
            calibrate(prepared, batches)
            stage = "convert"
            lowered, side["convert_s"] = _timed(lambda: tc.convert_fx(prepared))
            side["sides"] = {
                "prepared": prepared,
                "reference": getattr(lowered, "reference", lowered),
                "lowered": lowered,
            }
            # Measured now, because each run is observed.
            side["prepared_sqnr"] = _sqnr(entry, model, prepared, batches[:1])
        except TorchQCompatError as refusal:
            side["refused"] = str(refusal)
        except Exception as failure:
            side["crashed"] = f"{stage}: {_first_line(failure)}"
            side["traceback"] = traceback.format_exc(limit=-6)
    side["warnings"] = [str(w.message) for w in caught if issubclass(w.category, QuantizationWarning)]
    return side


def _differences(theirs: Mapping[str, GraphModule], ours: Mapping[str, GraphModule]) -> dict[str, Any]:
    """Return ops and activation qparams of both sides, and their differences."""
    found: dict[str, Any] = {}
    if ours:
        here = _without_copies(quantized_by_us(ours["prepared"]))
        found["ops"] = {"ours": here.total()}
        found["contradictions"] = _contradictions(ours["lowered"])
        found["qparams"] = {"ours": len(activation_qparams(ours["reference"]))}
    if ours and theirs:
        there = quantized_by_fx(theirs["prepared"])
        found["ops"]["fx"] = there.total()
        found["ops"]["only_fx"] = sorted(" ".join(key).strip() for key in (there - here).elements())
        found["ops"]["only_ours"] = sorted(" ".join(key).strip() for key in (here - there).elements())
        a, b = fx_activation_qparams(theirs["reference"]), activation_qparams(ours["reference"])
        found["qparams"] |= {"fx": len(a), "equal": _count_equal(sorted(a), sorted(b))}
    return found


def _without_copies(ops: Counter[tuple[str, str]]) -> Counter[tuple[str, str]]:
    """Return ``ops`` without ``contiguous``, also absent from FX's side: torch.export drops some of them."""
    return Counter({key: count for key, count in ops.items() if key[1] != "contiguous"})


def _count_equal(theirs: list[tuple[float, int]], ours: list[tuple[float, int]]) -> int:
    """Return how many of FX's qparams are among ours, using each of ours once."""
    left, equal = list(ours), 0
    for scale, zero_point in theirs:
        for other in left:
            if abs(scale - other[0]) <= QPARAMS_TOLERANCE * scale + 1e-9 and zero_point == other[1]:
                left.remove(other)
                equal += 1
                break
    return equal


def _contradictions(lowered: GraphModule) -> list[str]:
    """Return the nodes that ``explain`` calls both float and lowered."""
    actions: dict[tuple[str, str], set[str]] = {}
    for decision in tc.explain(lowered):
        if decision.node:
            actions.setdefault((decision.path, decision.node), set()).add(str(decision.action.value))
    return sorted(path for (path, _), found in actions.items() if {"float", "lowered"} <= found)


def _sqnr(
    entry: Entry, model: nn.Module, runner: nn.Module, given: Sequence[Inputs], *, pooled: bool = False
) -> dict[str, Any]:
    """Return the lowest SQNR in dB of all results of all batches, or which model refused. With ``pooled`` the
    batches of a result count as one, if their sizes allow it."""
    pairs: list[list[tuple[Tensor, Tensor]]] = []
    for inputs in given:
        try:
            expected = leaves(entry.measured(_run(model, inputs)))
        except Exception as failure:
            return {"float_fails": _first_line(failure)}
        try:
            found = leaves(entry.measured(_run(runner, inputs)))
        except TorchQCompatError as refusal:
            return {"refused": str(refusal)}
        except Exception as failure:
            return {"crashed": _first_line(failure)}
        if [t.shape for t in expected] != [t.shape for t in found]:
            return {"dB": WRONG_SHAPE}
        pairs.append([(a, b) for a, b in zip(expected, found, strict=True) if a.is_floating_point()])
    if pooled:
        pairs = [[_joined(of_a_result) for of_a_result in zip(*pairs, strict=True)]]
    return {"dB": round(min([EQUAL, *(_distance(a, b) for batch in pairs for a, b in batch)]), 2)}


def _joined(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    expected, found = (torch.cat([tensor.flatten() for tensor in side]) for side in zip(*pairs, strict=True))
    return expected, found


def _distance(expected: Tensor, found: Tensor) -> float:
    value = sqnr(expected, found)
    return EQUAL if value == float("inf") else value if value == value else WRONG_SHAPE


def _run(runner: nn.Module, inputs: Inputs) -> Any:
    # A model may write to its arguments, and a random op has to return the same to all.
    torch.manual_seed(1)
    with torch.no_grad(), _quiet():
        return runner(*copy.deepcopy(inputs))


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    start = time.process_time()
    result = call()
    return result, round(time.process_time() - start, 3)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _first_line(failure: BaseException) -> str:
    lines = str(failure).strip().splitlines()
    return f"{type(failure).__name__}: {lines[0][:300] if lines else ''}"
