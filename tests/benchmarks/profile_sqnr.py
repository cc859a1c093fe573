"""SQNR of the ready profiles against the float model, for the table in the guide.

python -m tests.benchmarks.profile_sqnr
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.ao.quantization import get_default_qconfig_mapping
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
}


def measure(profile: Callable[[], dict[str, Any]], seed: int) -> tuple[float, ...]:
    """SQNR in dB of output, h_n and c_n."""
    torch.manual_seed(seed)
    lstm = nn.LSTM(32, 64, 2, bidirectional=True)
    for parameter in lstm.parameters():
        parameter.data *= 2

    class Observed(torch.ao.nn.quantizable.LSTM):
        @classmethod
        def from_float(cls, other: nn.LSTM) -> nn.Module:
            return get_lstm_with_individually_observed_parts(other, **profile())

    model = nn.Sequential(lstm).eval()
    batches = [(torch.randn(24, 8, 32),) for _ in range(6)]
    config = PrepareCustomConfig().set_float_to_observed_mapping(nn.LSTM, Observed)
    prepared = tc.prepare_fx(model, get_default_qconfig_mapping("qnnpack"), batches[0], config)
    calibrate(prepared, batches)
    converted = tc.convert_to_reference_fx(prepared)
    x = torch.randn(40, 8, 32)
    with torch.no_grad():
        (exact, (h, c)), (output, (h_n, c_n)) = model(x), converted(x)
    return sqnr(exact, output), sqnr(h, h_n), sqnr(c, c_n)


def main() -> None:
    print("| profile | output | h_n | c_n |\n|---|---|---|---|")
    for name, profile in PROFILES.items():
        columns = zip(*(measure(profile, seed) for seed in SEEDS), strict=True)
        cells = [f"{min(column):.1f} to {max(column):.1f}" for column in columns]
        print(f"| `{name}` | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
