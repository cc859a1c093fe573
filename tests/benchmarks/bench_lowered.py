"""Milliseconds of lowered image models beside FX's and ONNX Runtime's static int8, in turns in one process.

    python -m tests.benchmarks.bench_lowered [MODEL ...] [--pixels N] [--threads N] [--rounds N] [--json FILE]

All have int8 weights per channel and uint8 activations. ONNX Runtime's are calibrated on the same images, by
``quantize_static`` in the form QDQ. Only the ratios mean anything. "exported": the program of
``torch.export`` of our lowered model. "full": ours with ``nn.MultiheadAttention`` as a custom module, whose
projections FX leaves in float, and the whole range of 8 bits, as ONNX Runtime has it.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.ao.quantization.quantize_fx as fx
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.ao.quantization import get_default_qconfig_mapping

import torchq_compat as tc
from tests.benchmarks.bench_prepare import load
from tests.benchmarks.timing import measure_in_turns
from tests.zoo.sane_statistics import settle

MODELS = ("resnet18", "mobilenet_v2", "vit_b_32")
NAMES = FX, ONNXRUNTIME, OURS, EXPORTED, FULL = "FX", "ONNX Runtime", "ours", "exported", "full"
RATIOS = ((OURS, FX), (OURS, ONNXRUNTIME), (EXPORTED, FX), (EXPORTED, OURS), (FULL, ONNXRUNTIME))
#: Of the signal over what quantization adds: less than this, and a contender computes something else.
LEAST_SQNR = 5.0

Run = Callable[[], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--pixels", type=int, default=224)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    rows = {}
    for name in options.models:
        torch.manual_seed(0)
        images = [torch.randn(1, 3, options.pixels, options.pixels) for _ in range(4)]
        model = load(name, from_timm=False)
        for parameter in model.parameters():
            if parameter.dim() > 1 and not parameter.any():  # as torchvision's head of a ViT
                nn.init.normal_(parameter, std=0.02)
        model = settle(model, [(image,) for image in images])
        rows[name] = measure(model, images, options.threads, options.rounds)
        Console(width=120).print(table({name: rows[name]}))
    Console(width=120).print(table(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


@torch.no_grad()
def measure(model: nn.Module, images: Sequence[Tensor], threads: int, rounds: int) -> dict[str, float]:
    """Return the median milliseconds of each contender, on the first of ``images``."""
    x, runs = images[0], contenders(model, images, threads)
    expected, row = model(x), dict[str, float]()
    for name, run in runs.items():
        noise = torch.as_tensor(run()) - expected
        row[f"{name} dB"] = sqnr = float(10 * torch.log10(expected.square().sum() / noise.square().sum()))
        if sqnr < LEAST_SQNR:
            raise RuntimeError(f"{name} computes something else: {sqnr:.1f} dB")
    timings = measure_in_turns(runs, rounds=rounds, turn_seconds=0.15)
    return row | {name: timing.median_ms for name, timing in timings.items()}


def contenders(model: nn.Module, images: Sequence[Tensor], threads: int) -> dict[str, Run]:
    """Return name -> call on the first of ``images``."""
    x, mapping = images[0], get_default_qconfig_mapping("x86")
    theirs = fx.prepare_fx(copy.deepcopy(model), mapping, (x,))
    ours = tc.prepare_fx(model, mapping, (x,))
    whole_range = get_default_qconfig_mapping("onednn")
    full = tc.prepare_fx(model, whole_range, (x,), tc.get_default_prepare_custom_config())
    for prepared in (theirs, ours, full):
        for image in images:
            prepared(image)
    lowered, kept, whole = tc.convert_fx(ours), fx.convert_fx(theirs), tc.convert_fx(full)
    exported = torch.export.export(lowered, (x,)).module()
    runs = {
        FX: lambda: kept(x),
        OURS: lambda: lowered(x),
        EXPORTED: lambda: exported(x),
        FULL: lambda: whole(x),
    }
    return {**runs, ONNXRUNTIME: in_onnxruntime(model, images, threads)}


def in_onnxruntime(model: nn.Module, images: Sequence[Tensor], threads: int) -> Run:
    """Return a call of ``model`` as ONNX Runtime quantizes it."""
    import onnxruntime
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    given = iter([{"x": image.numpy()} for image in images])

    class Reader:
        def get_next(self) -> Any:
            return next(given, None)

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    with tempfile.TemporaryDirectory() as directory:
        paths = [str(Path(directory, f"{name}.onnx")) for name in ("float", "folded", "int8")]
        torch.onnx.export(model, (images[0],), paths[0], input_names=["x"], dynamo=True, verbose=False)
        quant_pre_process(*paths[:2])
        quantize_static(
            *paths[1:],
            Reader(),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )
        session = onnxruntime.InferenceSession(paths[2], options, providers=["CPUExecutionProvider"])
    feed = {"x": images[0].numpy()}
    return lambda: session.run(None, feed)[0]


def table(rows: dict[str, dict[str, float]]) -> Table:
    made = Table(title="milliseconds, median; dB of the result")
    for column in ("model", *NAMES, *(f"{one} / {other}" for one, other in RATIOS)):
        made.add_column(column, justify="left" if column == "model" else "right")
    for name, row in rows.items():
        times = [f"{row[each]:.2f} ({row[f'{each} dB']:.1f})" for each in NAMES]
        made.add_row(name, *times, *(f"{row[one] / row[other]:.2f}" for one, other in RATIOS))
    return made


if __name__ == "__main__":
    main()
