"""Prepare, calibrate and convert on the device, beside the same on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.ao.quantization as legacy
from torch import Tensor, nn
from torch.ao.quantization import QConfig, QConfigMapping, get_default_qconfig_mapping
from torch.ao.quantization.quantize_fx import convert_to_reference_fx as fx_reference
from torch.ao.quantization.quantize_fx import prepare_fx as fx_prepare

import torchq_compat as tc
from tests.cuda.models import MODELS, Batch, model_and_batches
from tests.cuda.table import case
from tests.helpers.oracle import sqnr
from torchq_compat.errors import TorchQCompatError

CUSTOM = tc.get_default_prepare_custom_config


def on(device: torch.device, batch: Batch) -> Batch:
    """Return ``batch`` on ``device``; lengths of packed sequences stay, as torch asks."""
    return tuple(x if x.dim() == 1 else x.to(device) for x in batch)


def run(model: Any, batch: Batch, device: torch.device) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(*on(device, batch))
    return result.float().cpu()


def prepared_on(device: torch.device, name: str, **options: Any) -> tuple[Any, nn.Module, list[Batch]]:
    model, batches = model_and_batches(name)
    mapping = get_default_qconfig_mapping("x86")
    prepared = tc.prepare_fx(model.to(device), mapping, on(device, batches[0]), CUSTOM(), **options)
    return prepared, model, batches


def calibrate(prepared: Any, batches: Iterable[Batch], device: torch.device) -> Any:
    for batch in batches:
        run(prepared, batch, device)
    return prepared


def elsewhere(model: nn.Module, device: torch.device) -> list[str]:
    """Return the names of parameters and buffers that are not on ``device``, but of what only CPUs run."""
    both = [*model.named_parameters(), *model.named_buffers()]
    both = [pair for pair in both if not pair[0].endswith("operator_program")]
    return [f"{name} on {value.device}" for name, value in both if value.device.type != device.type]


def ranges(prepared: nn.Module) -> dict[str, Tensor]:
    return {
        name: value.cpu()
        for name, value in prepared.state_dict().items()
        if name.endswith(("min_val", "max_val"))
    }


def _whole_flow(name: str, device: torch.device) -> str:
    cpu = torch.device("cpu")
    prepared, model, batches = prepared_on(device, name)
    calibrate(prepared, batches, device)
    on_cpu, model_on_cpu, _ = prepared_on(cpu, name)
    calibrate(on_cpu, batches, cpu)
    assert not elsewhere(prepared, device), elsewhere(prepared, device)
    ours, theirs = ranges(prepared), ranges(on_cpu)
    assert ours.keys() == theirs.keys()
    off = max(
        float(((ours[n] - theirs[n]).abs() / (theirs[n].abs() + 1e-3)).max()) for n in ours if ours[n].numel()
    )
    assert off < 1e-3, f"ranges differ by {off}"
    reference, reference_on_cpu = (tc.convert_to_reference_fx(each) for each in (prepared, on_cpu))
    assert not elsewhere(reference, device), elsewhere(reference, device)
    exact = run(model_on_cpu, batches[0], cpu)
    here, there = run(reference, batches[0], device), run(reference_on_cpu, batches[0], cpu)
    converted = tc.convert_fx(prepared)
    lowered = run(converted, batches[0], device)
    moved = tc.convert_fx(copy.deepcopy(prepared).cpu())
    text = str(tc.explain(converted))
    is_told = device.type == "cpu" or str(device) in text
    assert run(model, batches[0], device).isfinite().all()
    assert sqnr(exact, here) > min(15, sqnr(exact, there) - 1), (
        f"{sqnr(exact, here):.1f} dB of the float model"
    )
    assert is_told, "explain does not say where the model is"
    return (
        f"ranges off by {off:.1e}; q-dq {sqnr(there, here):.0f} dB of the CPU's, {sqnr(exact, here):.0f} of "
        f"the float model (CPU {sqnr(exact, there):.0f}); convert_fx {sqnr(here, lowered):.0f} dB of q-dq; "
        f"converted after .cpu() {sqnr(here, run(moved, batches[0], cpu)):.0f}"
    )


for _name in MODELS:
    case(f"whole flow, {_name}")(partial(_whole_flow, _name))


@case("observers of every kind")
def _(device: torch.device) -> str:
    observers: dict[str, Callable[..., Any]] = {
        name: getattr(legacy, name)
        for name in (
            *("MinMaxObserver", "MovingAverageMinMaxObserver", "HistogramObserver"),
            *("PerChannelMinMaxObserver", "MovingAveragePerChannelMinMaxObserver"),
        )
    }
    done = []
    for name, observer in observers.items():
        model, batches = model_and_batches("convolutions")
        is_weight = "PerChannel" in name
        weight = observer if is_weight else legacy.MinMaxObserver
        activation = legacy.MinMaxObserver if is_weight else observer
        scheme = torch.per_channel_symmetric if is_weight else torch.per_tensor_symmetric
        qconfig = QConfig(
            activation.with_args(dtype=torch.quint8), weight.with_args(dtype=torch.qint8, qscheme=scheme)
        )
        mapping = QConfigMapping().set_global(qconfig)
        prepared = tc.prepare_fx(model.to(device), mapping, on(device, batches[0]))
        calibrate(prepared, batches, device)
        assert not elsewhere(prepared, device), (name, elsewhere(prepared, device))
        reference = tc.convert_to_reference_fx(prepared)
        done.append(
            f"{name} {sqnr(run(model, batches[0], device), run(reference, batches[0], device)):.0f} dB"
        )
    return "; ".join(done)


@case("FX's reference on the device has our numbers")
def _(device: torch.device) -> str:
    said = []
    for name in ("convolutions", "embeddings"):
        prepared, _model, batches = prepared_on(device, name)
        model, _ = model_and_batches(name)
        fx = fx_prepare(model.to(device), get_default_qconfig_mapping("x86"), on(device, batches[0]))
        ours, theirs = (calibrate(each, batches, device) for each in (prepared, fx))
        here = run(tc.convert_to_reference_fx(ours), batches[0], device)
        there = run(fx_reference(theirs).to(device), batches[0], device)
        said.append(f"{name} {sqnr(there, here):.0f} dB")
        assert sqnr(there, here) > 30, said
    return ", ".join(said)


@case("prepared on the CPU, calibrated on the device, converted on the CPU")
def _(device: torch.device) -> str:
    cpu, said = torch.device("cpu"), []
    failed = {}
    for name in MODELS:
        try:
            prepared, model, batches = prepared_on(cpu, name)
            exact = run(model, batches[0], cpu)
            calibrate(prepared.to(device), batches, device)
            assert not elsewhere(prepared, device), elsewhere(prepared, device)
            reference = tc.convert_to_reference_fx(prepared)
            here = run(reference, batches[0], device)
            back = run(reference.cpu(), batches[0], cpu)
            lowered = run(tc.convert_fx(prepared.cpu()), batches[0], cpu)
            said.append(
                f"{name} {sqnr(exact, here):.0f}/{sqnr(exact, back):.0f}/{sqnr(exact, lowered):.0f} dB"
            )
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {str(error)[:200]}"
    assert not failed, (failed, said)
    return "; ".join(said)


@case("state dicts from the device to the CPU")
def _(device: torch.device) -> str:
    cpu, said = torch.device("cpu"), []
    for name in ("convolutions", "LSTM, 2 layers, bidirectional"):
        prepared, _model, batches = prepared_on(device, name)
        calibrate(prepared, batches, device)
        other, _, _ = prepared_on(cpu, name)
        other.load_state_dict(prepared.state_dict())
        assert not elsewhere(other, cpu)
        here, there = tc.convert_to_reference_fx(prepared), tc.convert_to_reference_fx(other)
        states = here.state_dict(), there.state_dict()
        assert states[0].keys() == states[1].keys()
        there.load_state_dict(here.state_dict())
        tc.convert_fx(other).load_state_dict(tc.convert_fx(prepared.cpu()).state_dict())
        said.append(f"{name} {sqnr(run(there, batches[0], cpu), run(here, batches[0], device)):.0f} dB")
    return "; ".join(said)


@case("inputs and parameters on two devices are errors of ours")
def _(device: torch.device) -> str:
    if device.type == "cpu":
        return "one device"
    prepared, model, batches = prepared_on(device, "convolutions")
    calibrate(prepared, batches, device)
    mixed, _ = model_and_batches("convolutions")
    mixed.fc.to(device)
    lstm, _model, sequences = prepared_on(device, "LSTM, 2 layers, bidirectional")
    mapping = get_default_qconfig_mapping("x86")
    converted, reference = tc.convert_fx(prepared), tc.convert_to_reference_fx(prepared)
    calls = {
        "prepared": lambda: prepared(*batches[0]),
        "q-dq": lambda: reference(*batches[0]),
        "converted": lambda: converted(*batches[0]),
        "LSTM": lambda: lstm(*sequences[0]),
        "example": lambda: tc.prepare_fx(model, mapping, batches[0]),
        "model": lambda: tc.prepare_fx(mixed, mapping, on(device, batches[0])),
        "lowered": lambda: tc.convert_fx(copy.deepcopy(prepared).cpu())(*on(device, batches[0])),
        "lowered moved": lambda: tc.convert_fx(copy.deepcopy(prepared).cpu()).to(device)(
            *on(device, batches[0])
        ),
    }
    said = []
    for name, call in calls.items():
        try:
            result = call()
            said.append(f"{name}: NO ERROR, {getattr(result, 'device', '')}")
        except TorchQCompatError as error:
            said.append(f"{name}: {type(error).__name__} {error.code} {str(error)[:150]!r}")
        except Exception as error:
            said.append(f"{name}: RAW {type(error).__name__} {str(error)[:150]!r}")
    assert not any("RAW" in each for each in said), "; ".join(said)
    return "; ".join(said)
