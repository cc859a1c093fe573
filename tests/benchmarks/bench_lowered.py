"""Milliseconds of lowered models beside FX's, ONNX Runtime's and OpenVINO's static int8, in one process.

    python -m tests.benchmarks.bench_lowered [MODEL ...] [--pixels N] [--threads N] [--rounds N] [--json FILE]

All have int8 weights per channel and uint8 activations. ONNX Runtime's are calibrated on the same inputs, by
``quantize_static`` in the form QDQ; OpenVINO runs that file, if it is installed. MODEL: of torchvision, or
one of ``OWN``. Only the ratios mean anything. "exported": the program of
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
from functools import partial
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

NAMES = FX, ONNXRUNTIME, OPENVINO, OURS, EXPORTED, FULL = (
    *("FX", "ONNX Runtime", "OpenVINO"),
    *("ours", "exported", "full"),
)
RATIOS = (
    *((OURS, FX), (OURS, ONNXRUNTIME), (EXPORTED, OURS)),
    *((FULL, ONNXRUNTIME), (FULL, OPENVINO)),
)
#: Of the signal over what quantization adds: less than this, and a contender computes something else.
LEAST_SQNR = 5.0

Run = Callable[[], Any]


class TextReader(nn.Module):
    """Convolutions over an image, an LSTM in both directions over its columns, a label for each."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs, pool in ((1, 64, 2), (64, 128, 2), (128, 256, (2, 1)), (256, 256, (2, 1))):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
            layers += [nn.MaxPool2d(pool)]
        self.features = nn.Sequential(*layers)
        self.reader = nn.LSTM(512, 256, bidirectional=True, batch_first=True)
        self.labels = nn.Linear(512, 37)

    def forward(self, x: Tensor) -> Tensor:
        columns: Tensor = self.features(x).flatten(1, 2).transpose(1, 2)
        return self.labels(self.reader(columns)[0])  # type: ignore[no-any-return]


class BertLayer(nn.Module):
    def __init__(self, width: int = 768, heads: int = 12) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.inside = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        parts = (linear(x).unflatten(-1, (self.heads, -1)) for linear in (self.query, self.key, self.value))
        attended = nn.functional.scaled_dot_product_attention(*(part.transpose(1, 2) for part in parts))
        x = self.norms[0](x + self.out(attended.transpose(1, 2).flatten(2)))
        return self.norms[1](x + self.inside(x))  # type: ignore[no-any-return]


#: Name -> the model, and the shape of its input.
OWN: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "bert_layer": (BertLayer, (1, 128, 768)),
    "text_reader": (TextReader, (1, 1, 32, 128)),
}
MODELS = ("resnet18", "mobilenet_v2", "vit_b_32", *OWN)


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
        make, shape = OWN.get(
            name, (partial(load, name, from_timm=False), (1, 3, options.pixels, options.pixels))
        )
        images = [torch.randn(shape) for _ in range(4)]
        model = make().eval()
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
    with tempfile.TemporaryDirectory() as directory:
        path = written_as_onnx(model, images, directory)
        return {**runs, ONNXRUNTIME: in_onnxruntime(path, x, threads), **in_openvino(path, x, threads)}


def written_as_onnx(model: nn.Module, images: Sequence[Tensor], directory: str) -> str:
    """Return the path of ``model`` as ONNX Runtime quantizes it."""
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    given = iter([{"x": image.numpy()} for image in images])

    class Reader:
        def get_next(self) -> Any:
            return next(given, None)

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
    return paths[-1]


def in_onnxruntime(path: str, x: Tensor, threads: int) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    feed = {"x": x.numpy()}
    return lambda: session.run(None, feed)[0]


def in_openvino(path: str, x: Tensor, threads: int) -> dict[str, Run]:
    try:
        import openvino
    except ImportError:
        return {}
    settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
    request = openvino.Core().compile_model(path, "CPU", settings).create_infer_request()
    feed = {0: x.numpy()}
    return {OPENVINO: lambda: request.infer(feed)[0]}


def table(rows: dict[str, dict[str, float]]) -> Table:
    made = Table(title="milliseconds, median; dB of the result")
    for column in ("model", *NAMES, *(f"{one} / {other}" for one, other in RATIOS)):
        made.add_column(column, justify="left" if column == "model" else "right")
    for name, row in rows.items():
        times = [f"{row[each]:.2f} ({row[f'{each} dB']:.1f})" if each in row else "-" for each in NAMES]
        ratios = [f"{row[one] / row[other]:.2f}" if other in row else "-" for one, other in RATIOS]
        made.add_row(name, *times, *ratios)
    return made


if __name__ == "__main__":
    main()
