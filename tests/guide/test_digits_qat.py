"""The legacy QAT script, unmodified: on FX it is its own oracle, on this package it must lose no accuracy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import torchq_compat
from tests.helpers.warm_python import warm_python

ROOT = Path(torchq_compat.__file__).parents[1]
SCRIPT = ROOT / "migration" / "legacy" / "digits_qat.py"
RUN = ("-m", "torchq_compat", "run")
QUICK = (
    *("--epochs", "2", "--qat-epochs", "3", "--observer-epochs", "1", "--bn-epochs", "2"),
    *("--hidden", "16", "--batch", "128"),
)
HELD_OUT = 599
#: Three decimals are printed; training again in another order of float operations changes an image or two.
ONE_IMAGE = 1 / HELD_OUT + 0.001
HALF_A_POINT = 0.005
SEEDS = (0, 1, 2)


def accuracies(*command: object) -> tuple[dict[str, float], str]:
    """Return what the script prints, by model, and its standard error."""
    result = warm_python(*command)
    assert result.returncode == 0, result.stderr
    found = re.findall(r"^(\w+) +([01]\.\d{3}) accuracy$", result.stdout, re.MULTILINE)
    return {name: float(accuracy) for name, accuracy in found}, result.stderr


def test_the_script_runs_unmodified() -> None:
    ours, stderr = accuracies(*RUN, SCRIPT, *QUICK)
    assert list(ours) == ["float", "ptq", "qat"]
    assert "RowReader, converted: 3 quantized (1 Conv2d + ReLU, 1 LSTM, 1 Linear)" in stderr
    assert "RowReader, converted: 3 quantized (1 Conv2d + BatchNorm2d + ReLU, 1 LSTM, 1 Linear)" in stderr


@pytest.mark.slow
def test_accuracy_is_that_of_fx_and_of_the_float_model() -> None:
    by_fx = [accuracies(SCRIPT, "--seed", seed)[0] for seed in SEEDS]
    by_us = [accuracies(*RUN, SCRIPT, "--seed", seed)[0] for seed in SEEDS]
    for seed, fx, ours in zip(SEEDS, by_fx, by_us, strict=True):
        assert ours["float"] == fx["float"] > 0.98, seed
        assert ours["ptq"] >= fx["ptq"] - ONE_IMAGE, seed
        assert ours["qat"] >= fx["qat"], seed
        assert ours["qat"] >= ours["float"] - HALF_A_POINT, seed
    for model in ("ptq", "qat"):
        assert mean(by_us, model) >= mean(by_fx, model) - ONE_IMAGE


def mean(runs: list[dict[str, float]], model: str) -> float:
    return sum(run[model] for run in runs) / len(runs)
