"""Training, eager mode, compilers, exports and tools on the device."""

from __future__ import annotations

import copy
import gc
import io
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.ao.quantization as legacy
from torch import Tensor, nn
from torch.ao.quantization import get_default_qat_qconfig_mapping, get_default_qconfig_mapping
from torch.ao.quantization.quantize_fx import prepare_qat_fx as fx_prepare_qat

import torchq_compat as tc
from tests.cuda.devices import CUSTOM, calibrate, elsewhere, on, prepared_on, run
from tests.cuda.models import Batch, model_and_batches
from tests.cuda.table import case
from tests.helpers.oracle import sqnr
from torchq_compat import quantize_eager
from torchq_compat.errors import TorchQCompatError

STEPS = 5
MAPPING = get_default_qconfig_mapping("x86")


def prepared_qat(
    device: torch.device, name: str, dtype: torch.dtype = torch.float32
) -> tuple[Any, list[Batch]]:
    model, batches = model_and_batches(name)
    batches = [tuple(x.to(dtype) if x.is_floating_point() else x for x in batch) for batch in batches]
    torch.manual_seed(0)
    model = model.train().to(device, dtype)
    return (
        tc.prepare_qat_fx(model, get_default_qat_qconfig_mapping("x86"), on(device, batches[0]), CUSTOM()),
        batches,
    )


def train(
    model: Any,
    batches: list[Batch],
    device: torch.device,
    autocast: torch.dtype | None = None,
    scaler: Any = None,
) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        with torch.autocast(device.type, autocast or torch.bfloat16, enabled=autocast is not None):
            loss = model(*on(device, batches[step % len(batches)])).float().square().mean()
        optimizer.zero_grad()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        losses.append(float(loss))
    return losses


def _qat(name: str, autocast: torch.dtype | None, dtype: torch.dtype, device: torch.device) -> str:
    cpu = torch.device("cpu")
    prepared, batches = prepared_qat(device, name, dtype)
    for module in prepared.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    on_cpu, _ = prepared_qat(cpu, name)
    scaler = torch.amp.GradScaler(device.type) if autocast is torch.float16 else None
    losses = train(prepared, batches, device, autocast, scaler)
    theirs = train(
        on_cpu, [tuple(x.float() if x.is_floating_point() else x for x in b) for b in batches], cpu
    )
    assert not elsewhere(prepared, device), elsewhere(prepared, device)
    prepared.eval()
    reference = tc.convert_to_reference_fx(prepared)
    converted = tc.convert_fx(copy.deepcopy(prepared).cpu())
    trained, here = run(prepared, batches[0], device), run(reference, batches[0], device)
    lowered = run(converted, batches[0], cpu)
    assert losses[-1] < losses[0], losses
    assert sqnr(trained, here) > (20 if dtype is torch.float32 and autocast is None else 15), sqnr(
        trained, here
    )
    return (
        f"losses {losses[0]:.5f} -> {losses[-1]:.5f} (CPU float32 {theirs[0]:.5f} -> {theirs[-1]:.5f}); "
        f"q-dq {sqnr(trained, here):.0f} dB of the trained, convert_fx {sqnr(here, lowered):.0f} of q-dq"
    )


for _name, _autocast, _dtype in (
    ("convolutions", None, torch.float32),
    ("conv and LSTM", None, torch.float32),
    ("GRU", None, torch.float32),
    ("transformer layer", None, torch.float32),
    ("embeddings", None, torch.float32),
    ("convolutions", torch.bfloat16, torch.float32),
    ("conv and LSTM", torch.bfloat16, torch.float32),
    ("convolutions", torch.float16, torch.float32),
    ("conv and LSTM", torch.float16, torch.float32),
    ("convolutions", None, torch.bfloat16),
):
    case(
        f"training, {_name}"
        + (f", autocast {str(_autocast)[6:]}" if _autocast else "")
        + (f", parameters {str(_dtype)[6:]}" if _dtype is not torch.float32 else "")
    )(partial(_qat, _name, _autocast, _dtype))


@case("training that began on the CPU goes on on the device, and back")
def _(device: torch.device) -> str:
    cpu, said = torch.device("cpu"), []
    for name in ("convolutions", "conv and LSTM", "loop and constants"):
        prepared, batches = prepared_qat(cpu, name)
        losses = [
            *train(prepared, batches, cpu),
            *train(prepared.to(device), batches, device),
            *train(prepared.to(cpu), batches, cpu),
        ]
        assert not elsewhere(prepared, cpu)
        said.append(f"{name} " + " ".join(f"{losses[i]:.4f}" for i in (0, 4, 5, 9, 10, 14)))
    return "; ".join(said)


def _compiled(name: str, device: torch.device) -> str:
    prepared, _, batches = prepared_on(device, name)
    reference = tc.convert_to_reference_fx(calibrate(prepared, batches, device))
    torch._dynamo.reset()
    here, there = (
        run(each, batches[0], device) for each in (reference, torch.compile(reference, dynamic=False))
    )
    assert sqnr(here, there) > 25, sqnr(here, there)
    return f"{sqnr(here, there):.0f} dB"


for _name in ("convolutions", "transformer layer", "LSTM, 2 layers, bidirectional"):
    case(f"torch.compile of the q-dq model, {_name}")(partial(_compiled, _name))


@case("torch.compile of the model in training")
def _(device: torch.device) -> str:
    prepared, batches = prepared_qat(device, "convolutions")
    alone = train(copy.deepcopy(prepared), batches, device)
    torch._dynamo.reset()
    compiled = train(torch.compile(prepared), batches, device)
    assert abs(compiled[-1] - alone[-1]) < 0.02 * alone[0], (compiled, alone)
    return f"losses {alone[-1]:.6f}, compiled {compiled[-1]:.6f}"


@case("a CUDA graph of the q-dq model")
def _(device: torch.device) -> str:
    if device.type != "cuda":
        return "of CUDA only"
    said = []
    for name in ("convolutions", "GRU"):
        prepared, _, batches = prepared_on(device, name)
        reference = tc.convert_to_reference_fx(calibrate(prepared, batches, device))
        x = on(device, batches[0])
        with torch.no_grad():
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                reference(*x)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                result = reference(*x)
        x[0].copy_(batches[1][0])
        graph.replay()
        said.append(f"{name} {sqnr(run(reference, batches[1], device), result.float().cpu()):.0f} dB")
    return "; ".join(said)


class Eager(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = legacy.QuantStub(), legacy.DeQuantStub()
        self.conv, self.bn, self.relu = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
        self.fc = nn.Linear(8 * 64, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn(self.conv(self.quant(x))))
        result: Tensor = self.dequant(self.fc(x.flatten(1)))
        return result


@case("eager mode")
def _(device: torch.device) -> str:
    _, batches = model_and_batches("convolutions")
    said = []
    for is_qat in (False, True):
        torch.manual_seed(0)
        model = Eager().to(device).train(is_qat)
        if is_qat:
            model.qconfig = legacy.get_default_qat_qconfig("x86")  # type: ignore[assignment]
            fused = quantize_eager.fuse_modules_qat(model, [["conv", "bn", "relu"]])
            prepared = quantize_eager.prepare_qat(fused)
            train(prepared, batches, device)
            prepared.eval()
        else:
            model.qconfig = legacy.get_default_qconfig("x86")  # type: ignore[assignment]
            fused = quantize_eager.fuse_modules(model, [["conv", "bn", "relu"]])
            prepared = calibrate(quantize_eager.prepare(fused), batches, device)
        assert not elsewhere(prepared, device), elsewhere(prepared, device)
        converted = quantize_eager.convert(prepared)
        assert not elsewhere(converted, device), elsewhere(converted, device)
        floats, here = run(prepared, batches[0], device), run(converted, batches[0], device)
        lowered = quantize_eager.lower(copy.deepcopy(converted).cpu(), batches[0])
        same = run(lowered, batches[0], torch.device("cpu"))
        said.append(
            f"{'trained' if is_qat else 'calibrated'} {sqnr(floats, here):.0f} dB, "
            f"lowered {sqnr(here, same):.0f}"
        )
        assert sqnr(floats, here) > 15, said
    return "; ".join(said)


@case("eager mode, recurrent")
def _(device: torch.device) -> str:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant = legacy.QuantStub(), legacy.DeQuantStub()
            self.lstm, self.fc = nn.LSTM(6, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.dequant(self.fc(self.lstm(self.quant(x))[0]))
            return result

    torch.manual_seed(0)
    model = Net().eval().to(device)
    model.qconfig = legacy.get_default_qconfig("x86")  # type: ignore[assignment]
    _, batches = model_and_batches("GRU")
    prepared = calibrate(quantize_eager.prepare(model), batches, device)
    converted = quantize_eager.convert(prepared)
    assert not elsewhere(converted, device), elsewhere(converted, device)
    return f"{sqnr(run(model, batches[0], device), run(converted, batches[0], device)):.0f} dB"


@case("quantize_dynamic")
def _(device: torch.device) -> str:
    said = []
    for name in ("LSTM, 2 layers, bidirectional", "GRU", "packed LSTM"):
        model, batches = model_and_batches(name)
        exact = run(model, batches[0], torch.device("cpu"))
        dynamic = tc.quantize_dynamic(model.to(device), {nn.Linear, nn.LSTM, nn.GRU})
        assert not elsewhere(dynamic, device), elsewhere(dynamic, device)
        said.append(f"{name} {sqnr(exact, run(dynamic, batches[0], device)):.0f} dB")
    return "; ".join(said)


@case("dynamic by prepare_fx")
def _(device: torch.device) -> str:
    said = []
    mapping = legacy.QConfigMapping().set_global(legacy.default_dynamic_qconfig)
    for name in ("LSTM, 2 layers, bidirectional", "transformer layer"):
        model, batches = model_and_batches(name)
        prepared = tc.prepare_fx(model.to(device), mapping, on(device, batches[0]), CUSTOM())
        reference = tc.convert_to_reference_fx(prepared)
        here = run(reference, batches[0], device)
        said.append(f"{name} {sqnr(run(model, batches[0], device), here):.0f} dB")
        tc.convert_fx(prepared)(*on(device, batches[0]))
    return "; ".join(said)


@case("half precision models after calibration in it")
def _(device: torch.device) -> str:
    said = []
    for dtype in (torch.bfloat16, torch.float16):
        for name in ("convolutions", "GRU"):
            model, batches = model_and_batches(name)
            batches = [tuple(x.to(dtype) for x in batch) for batch in batches]
            model = model.to(device, dtype)
            prepared = tc.prepare_fx(model, MAPPING, on(device, batches[0]), CUSTOM())
            calibrate(prepared, batches, device)
            here = run(tc.convert_to_reference_fx(prepared), batches[0], device)
            said.append(f"{name} {str(dtype)[6:]} {sqnr(run(model, batches[0], device), here):.0f} dB")
    return "; ".join(said)


@case("export, and the program at another batch size")
def _(device: torch.device) -> str:
    said = []
    for name in ("convolutions", "LSTM, 2 layers, bidirectional", "GRU", "transformer layer", "embeddings"):
        prepared, _, batches = prepared_on(device, name)
        reference = tc.convert_to_reference_fx(calibrate(prepared, batches, device))
        program = tc.export(reference, on(device, batches[0]))
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        read = torch.export.load(file).module()
        one = tuple(torch.cat([x, x]) for x in batches[0])
        said.append(f"{name} {sqnr(run(reference, one, device), run(read, one, device)):.0f} dB")
        if name == "convolutions":
            half = tc.export(tc.convert_fx(prepared), on(device, batches[0])).module()
            said.append(f"of convert_fx {sqnr(run(reference, one, device), run(half, one, device)):.0f} dB")
    return "; ".join(said)


@case("ONNX of a model on the device")
def _(device: torch.device) -> str:
    import numpy as np
    import onnxruntime as ort

    said = []
    for name in ("convolutions", "GRU"):
        prepared, _, batches = prepared_on(device, name)
        reference = tc.convert_to_reference_fx(calibrate(prepared, batches, device))
        content = tc.to_onnx(reference, on(device, batches[0])).to_bytes()
        session = ort.InferenceSession(content, providers=["CPUExecutionProvider"])
        there = session.run(None, {session.get_inputs()[0].name: np.asarray(batches[0][0])})[0]
        said.append(f"{name} {sqnr(run(reference, batches[0], device), torch.from_numpy(there)):.0f} dB")
    return "; ".join(said)


@case("compare, suggest, streaming, explain")
def _(device: torch.device) -> str:
    model, batches = model_and_batches("convolutions")
    model, data = model.to(device), [on(device, batch) for batch in batches]
    comparison = tc.compare(model, MAPPING, data[0], data)
    said = [f"compare {len(str(comparison).splitlines())} lines"]
    suggestion = tc.suggest(model, MAPPING, data[0], data, n=1)
    said.append(f"suggest {type(suggestion).__name__}")
    prepared, _, batches = prepared_on(device, "GRU")
    reference = tc.convert_to_reference_fx(calibrate(prepared, batches, device))
    stream, x = tc.streaming(reference), batches[0][0].to(device)
    with torch.no_grad():
        parts = torch.cat([stream(x[:3]), stream(x[3:])]).cpu()
    said.append(f"streaming {sqnr(run(reference, batches[0], device), parts):.0f} dB")
    for each in (prepared, reference):
        report = tc.explain(each)
        assert report.rows
        assert report.to_json()
    return "; ".join(said)


@case("states of FX's models, saved on the device")
def _(device: torch.device) -> str:
    from torch.ao.quantization.quantize_fx import prepare_fx as fx_prepare

    from torchq_compat.checkpoints import load_fx_state

    prepared, _, batches = prepared_on(device, "convolutions")
    model, _ = model_and_batches("convolutions")
    fx = calibrate(fx_prepare(model.to(device), MAPPING, on(device, batches[0])), batches, device)
    load_fx_state(prepared, fx.state_dict())
    assert not elsewhere(prepared, device)
    on_cpu, _, _ = prepared_on(torch.device("cpu"), "convolutions")
    load_fx_state(on_cpu, fx.state_dict())
    assert not elsewhere(on_cpu, torch.device("cpu"))
    here = run(tc.convert_to_reference_fx(prepared), batches[0], device)
    there = run(tc.convert_to_reference_fx(on_cpu), batches[0], torch.device("cpu"))
    return f"device and CPU: {sqnr(there, here):.0f} dB"


@case("convert_fx on the device says so, moves to the CPU, and does not run integers there")
def _(device: torch.device) -> str:
    prepared, _, batches = prepared_on(device, "conv and LSTM")
    converted = tc.convert_fx(calibrate(prepared, batches, device))
    rows = [row for row in str(tc.explain(converted)).splitlines() if str(device) in row]
    moved = copy.deepcopy(converted).cpu()
    cpu = torch.device("cpu")
    here = run(converted, batches[0], device)
    return (
        f"explain: {rows[:2]}; moved to the CPU {sqnr(here, run(moved, batches[0], cpu)):.0f}"
        f" dB; operators of ours: {sum('torchq_compat' in str(n.target) for n in moved.graph.nodes)}"
    )


def _timed(step: Callable[[], Any], device: torch.device, count: int = 30) -> float:
    for _ in range(5):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / count * 1000


@case("milliseconds of a training step and of a calibration batch, beside FX's")
def _(device: torch.device) -> str:
    if device.type == "cpu":
        return "on a device only"

    def block(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())

    torch.manual_seed(0)
    model = nn.Sequential(
        block(3, 64), *(block(64, 64) for _ in range(6)), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    x = (torch.randn(32, 3, 56, 56, device=device),)
    model = model.to(device).train()
    mapping = get_default_qat_qconfig_mapping("x86")
    models: dict[str, Any] = {
        "float": copy.deepcopy(model),
        "ours": tc.prepare_qat_fx(copy.deepcopy(model), mapping, x),
        "FX": fx_prepare_qat(copy.deepcopy(model), mapping, x),
    }
    said = []
    for name, each in models.items():
        optimizer = torch.optim.SGD(each.parameters(), lr=1e-3)

        def step(each: Any = each, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            each(*x).square().mean().backward()
            optimizer.step()

        said.append(f"train {name} {_timed(step, device):.2f}")
    from torch.ao.quantization.quantize_fx import prepare_fx as fx_prepare

    model.eval()
    for name, each in (
        ("float", model),
        ("ours", tc.prepare_fx(model, MAPPING, x)),
        ("FX", fx_prepare(copy.deepcopy(model), MAPPING, x)),
    ):
        with torch.no_grad():
            said.append(f"calibrate {name} {_timed(lambda each=each: each(*x), device, 10):.2f}")
    return "; ".join(said)


@case("memory of twelve flows comes back")
def _(device: torch.device) -> str:
    def flow() -> None:
        prepared, _, batches = prepared_on(device, "convolutions")
        tc.convert_to_reference_fx(calibrate(prepared, batches, device))
        tc.convert_fx(prepared)

    def allocated() -> int:
        gc.collect()
        return torch.cuda.memory_allocated() if device.type == "cuda" else 0

    flow()
    before = allocated()
    for _ in range(12):
        flow()
    grown = allocated() - before
    assert grown < 2**20, f"{grown} bytes stay"
    return f"{grown} bytes stay"


@case("a plain TorchQCompatError where the device has no memory left")
def _(device: torch.device) -> str:
    if device.type == "cpu":
        return "of a device only"
    model = nn.Linear(8, 8).eval().to(device)
    prepared = tc.prepare_fx(model, MAPPING, (torch.randn(2, 8, device=device),))
    torch.cuda.set_per_process_memory_fraction(0.02)
    try:
        prepared(torch.empty(2**24, 8, device=device))
        prepared(torch.empty(2**27, 8, device=device))
        return "no error"
    except (torch.OutOfMemoryError, TorchQCompatError) as error:
        return f"{type(error).__name__} {str(error)[:150]!r}"
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
