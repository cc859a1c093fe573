"""Prepare, calibrate and convert two bidirectional LSTM layers: FX, PT2E unrolled, and this package.

    python -m tests.benchmarks.flows FLOW LENGTH REPEATS

runs one flow at one sequence length in its own process, since peak memory is that of a process, and prints
the measurements as one line of JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.ao.quantization.quantize_fx as fx
from torch import Tensor, nn
from torch.ao.quantization import get_default_qconfig_mapping
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

import torchq_compat as tc
from tests.benchmarks.cases import ENGINE, RecurrentModel, random_inputs
from tests.helpers.oracle import CONVERT_LSTM, MAP_LSTM, count_nodes

__all__ = ["FLOWS", "STAGES", "run_flow"]

STAGES = ("prepare", "calibrate", "convert")
#: Several batches, because the first one also sets up the observers.
BATCHES, BATCH = 3, 4
WIDTH = 64
#: In seconds: a longer run is not repeated.
LONG_SECONDS = 30.0

Inputs = tuple[Tensor, ...]
Step = Callable[..., Any]


def _prepare_by_fx(model: nn.Module, inputs: Inputs) -> nn.Module:
    return fx.prepare_fx(model, get_default_qconfig_mapping(ENGINE), inputs, MAP_LSTM)


def _convert_by_fx(prepared: nn.Module) -> nn.Module:
    return fx.convert_to_reference_fx(prepared, CONVERT_LSTM)


def _prepare_unrolled(model: nn.Module, inputs: Inputs) -> nn.Module:
    quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
    return prepare_pt2e(torch.export.export(model, inputs).module(), quantizer)


def _prepare_by_us(model: nn.Module, inputs: Inputs) -> nn.Module:
    return tc.prepare_fx(model, get_default_qconfig_mapping(ENGINE), inputs, MAP_LSTM)


def _unrollable(lstm: nn.LSTM) -> nn.Module:
    """Return the LSTM of nn.Linear and additions that torch.export unrolls."""
    lstm.qconfig = None
    return torch.ao.nn.quantizable.LSTM.from_float(lstm)


#: Name -> (replacement of the LSTM, prepare, convert). FX observes the model it is given, so each run has its
#: own model.
FLOWS: dict[str, tuple[Callable[[nn.LSTM], nn.Module], Step, Step]] = {
    "FX": (lambda lstm: lstm, _prepare_by_fx, _convert_by_fx),
    "PT2E, unrolled": (_unrollable, _prepare_unrolled, convert_pt2e),
    "ours": (lambda lstm: lstm, _prepare_by_us, tc.convert_to_reference_fx),
}


def run_flow(flow: str, length: int, width: int = WIDTH) -> dict[str, float]:
    """Return the seconds of each stage and the number of nodes of the converted graph."""
    lstm, prepare, convert = FLOWS[flow]
    torch.manual_seed(0)
    floats = nn.LSTM(width, width, 2, bidirectional=True)
    batches = [random_inputs(floats, length, BATCH) for _ in range(BATCHES)]
    model = RecurrentModel(lstm(floats), nn.Linear(2 * width, 16)).eval()
    clock = [time.perf_counter()]
    with torch.no_grad():
        prepared = prepare(model, batches[0])
        clock.append(time.perf_counter())
        for batch in batches:
            prepared(*batch)
        clock.append(time.perf_counter())
        converted = convert(prepared)
        clock.append(time.perf_counter())
    seconds = (end - start for start, end in itertools.pairwise(clock))
    return {**dict(zip(STAGES, seconds, strict=True)), "nodes": count_nodes(converted)}


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("flow", choices=FLOWS)
    parser.add_argument("length", type=int)
    parser.add_argument("repeats", type=int)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    started = time.perf_counter()
    run_flow(options.flow, length=2, width=8)
    first_use, before = time.perf_counter() - started, _peak_mib()
    runs = [run_flow(options.flow, options.length)]
    peak = _peak_mib()
    if sum(runs[0][stage] for stage in STAGES) < LONG_SECONDS:
        runs += [run_flow(options.flow, options.length) for _ in range(options.repeats - 1)]
    print(json.dumps({"first_use": first_use, "before_mib": before, "peak_mib": peak, "runs": runs}))


if __name__ == "__main__":
    main()
