"""CPU seconds to prepare and convert image models: this package over FX, side by side in one process.

    python -m tests.benchmarks.bench_prepare [MODEL ...] [--timm] [--pixels N] [--rounds N] [--json FILE]

The models are torchvision's, or timm's with ``--timm``. Only the ratios mean anything. Beside them stand how
many times a model was exported, and how: "followed" at static sizes, "symbols" where torch's symbols were
needed, "fixed" where sizes that its Python reads had to be fixed.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.ao.quantization.quantize_fx as fx
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.ao.quantization import get_default_qconfig_mapping

import torchq_compat as tc
from tests.zoo.libraries import prepare_imports
from torchq_compat.capture import checked as checked_capture
from torchq_compat.capture.sizes import shape_program

#: The models that the ratios are followed on.
MODELS = (
    "mobilenet_v2",
    "resnet18",
    "efficientnet_b0",
    "regnet_y_400mf",
    "shufflenet_v2_x1_0",
    "vit_b_32",
    "swin_t",
)
STEPS = ("FX prepare", "FX convert", "prepare", "convert")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--timm", action="store_true")
    parser.add_argument("--pixels", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = {}
    for name in options.models:
        model = load(name, from_timm=options.timm)
        rows[name] = measure(model, torch.randn(2, 3, options.pixels, options.pixels), options.rounds)
        Console(width=120).print(table({name: rows[name]}))
    Console(width=120).print(table(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


def load(name: str, *, from_timm: bool) -> nn.Module:
    if from_timm:
        import timm

        found: nn.Module = timm.create_model(name).eval()
        return found
    prepare_imports()
    import torchvision

    model: nn.Module = torchvision.models.get_model(name).eval()
    return model


def measure(model: nn.Module, x: Tensor, rounds: int) -> dict[str, Any]:
    """Return the CPU seconds of each step in its fastest round, and the ways of our captures."""
    mapping, ways = get_default_qconfig_mapping("x86"), list[str]()
    seconds: dict[str, list[float]] = {step: [] for step in STEPS}
    for _ in range(rounds):
        ways.clear()
        with recorded(ways):
            for prefix, prepare, convert in (
                ("FX ", fx.prepare_fx, fx.convert_fx),
                ("", tc.prepare_fx, tc.convert_fx),
            ):
                given = copy.deepcopy(model) if prefix else model
                shape_program.KNOWN_SHAPES.clear()
                prepared, taken = timed(lambda given=given, prepare=prepare: prepare(given, mapping, (x,)))
                seconds[f"{prefix}prepare"].append(taken)
                prepared(x)
                seconds[f"{prefix}convert"].append(timed(lambda p=prepared, convert=convert: convert(p))[1])
    fastest: dict[str, Any] = {step: min(taken) for step, taken in seconds.items()}
    ours, theirs = (fastest[f"{side}prepare"] + fastest[f"{side}convert"] for side in ("", "FX "))
    return {**fastest, "ratio": ours / theirs, "exports": list(ways)}


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    gc.collect()
    started = time.process_time()
    result = run()
    return result, time.process_time() - started


@contextmanager
def recorded(ways: list[str]) -> Iterator[None]:
    """Append the way of each export to ``ways``."""
    home: Any = checked_capture
    attempt = home.attempt

    def attempted(case: Any, reads: Any) -> Any:
        ways.append("symbols" if reads is None else "followed" if reads.follow else "fixed")
        return attempt(case, reads)

    home.attempt = attempted
    try:
        yield
    finally:
        home.attempt = attempt


def table(rows: dict[str, dict[str, Any]]) -> Table:
    made = Table(title="CPU seconds, fastest round")
    for column in ("model", *STEPS, "ratio", "exports"):
        made.add_column(column, justify="left" if column in ("model", "exports") else "right")
    for name, row in rows.items():
        numbers = (f"{row[step]:.2f}" for step in (*STEPS, "ratio"))
        made.add_row(name, *numbers, ", ".join(row["exports"]))
    return made


if __name__ == "__main__":
    main()
