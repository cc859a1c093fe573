"""SQNR of the ready profiles against the float model, and their time, for the table in the guide.

python -m tests.benchmarks.profile_sqnr
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.ao.quantization import QConfigMapping, default_dynamic_qconfig, get_default_qconfig
from torch.ao.quantization.fx.custom_config import PrepareCustomConfig

import torchq_compat as tc
from tests.helpers.oracle import calibrate, sqnr
from torchq_compat import profiles
from torchq_compat.lstm_utils import get_lstm_with_individually_observed_parts

SEEDS = range(5)
PROFILES: dict[str, Callable[[], dict[str, Any]]] = {
    "int8_parts": profiles.int8_parts,
    "int16_parts": profiles.int16_parts,
    "int8_with_int16_cell": profiles.int8_with_int16_cell,
    "int8_products": profiles.int8_products,
}
#: QConfigs whose activations use the whole integer range, and half of it.
WHOLE, REDUCED = get_default_qconfig("onednn"), get_default_qconfig("x86")
DYNAMIC = {"dynamic": default_dynamic_qconfig, "dynamic, whole_range": profiles.whole_range_dynamic()}
ROUNDS = 15


def float_model(seed: int) -> nn.Module:
    """A bidirectional LSTM of two layers with large weights."""
    torch.manual_seed(seed)
    lstm = nn.LSTM(32, 64, 2, bidirectional=True)
    for parameter in lstm.parameters():
        parameter.data *= 2
    return nn.Sequential(lstm).eval()


def prepared(model: nn.Module, qconfig: Any, profile: Callable[[], dict[str, Any]]) -> Any:
    """Return ``model`` prepared and calibrated with six batches."""

    class Observed(torch.ao.nn.quantizable.LSTM):
        @classmethod
        def from_float(cls, other: nn.LSTM) -> nn.Module:
            return get_lstm_with_individually_observed_parts(other, **profile())

    batches = [(torch.randn(24, 8, 32),) for _ in range(6)]
    config = PrepareCustomConfig().set_float_to_observed_mapping(nn.LSTM, Observed)
    made = tc.prepare_fx(model, QConfigMapping().set_global(qconfig), batches[0], config)
    calibrate(made, batches)
    return made


def measure(qconfig: Any, profile: Callable[[], dict[str, Any]], seed: int) -> tuple[float, ...]:
    """Return the SQNR in dB of output, h_n and c_n."""
    model = float_model(seed)
    converted = tc.convert_to_reference_fx(prepared(model, qconfig, profile))
    x = torch.randn(40, 8, 32)
    with torch.no_grad():
        (exact, (h, c)), (output, (h_n, c_n)) = model(x), converted(x)
    return sqnr(exact, output), sqnr(h, h_n), sqnr(c, c_n)


def times() -> dict[str, float]:
    """Return the time of each lowered model relative to ``int8_parts``: interleaved, the minimum of several
    rounds."""
    model, x = float_model(0), torch.randn(40, 8, 32)
    lowered = {name: tc.convert_fx(prepared(model, WHOLE, each)) for name, each in PROFILES.items()}
    for name, qconfig in DYNAMIC.items():
        lowered[name] = tc.convert_fx(prepared(model, qconfig, profiles.int8_parts))
    least = dict.fromkeys(lowered, float("inf"))
    with torch.no_grad():
        for _ in range(ROUNDS):
            for name, each in lowered.items():
                start = time.perf_counter()
                each(x)
                least[name] = min(least[name], time.perf_counter() - start)
    return {name: each / least["int8_parts"] for name, each in least.items()}


def main() -> None:
    settings: dict[str, tuple[Any, Any, Callable[[], dict[str, Any]]]] = {
        **{name: (WHOLE, REDUCED, profile) for name, profile in PROFILES.items()},
        **{name: (qconfig, None, profiles.int8_parts) for name, qconfig in DYNAMIC.items()},
    }
    taken = times()
    print("| profile | output | h_n | c_n | output, reduced range | time |\n|---|---|---|---|---|---|")
    for name, (qconfig, reduced, profile) in settings.items():
        columns = list(zip(*(measure(qconfig, profile, seed) for seed in SEEDS), strict=True))
        if reduced is not None:
            columns.append(tuple(measure(reduced, profile, seed)[0] for seed in SEEDS))
        cells = [f"{min(column):.1f} to {max(column):.1f}" for column in columns]
        cells += [""] * (4 - len(cells))
        print(f"| `{name}` | {' | '.join(cells)} | {taken[name]:.2f} |")


if __name__ == "__main__":
    main()
