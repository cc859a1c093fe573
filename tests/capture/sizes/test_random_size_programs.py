"""Programs that read sizes in every way are captured once and are right, or refuse, at every size."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.ao.quantization import QConfigMapping

import torchq_compat as tc
from tests.helpers.oracle import leaves
from tests.helpers.size_programs import OTHER_SIZES, SizeProgram, each_step_twice, example
from torchq_compat.errors import InputError, QuantizationWarning


@pytest.mark.parametrize("names", each_step_twice(), ids="-".join)
def test_each_step_is_right_or_refused(names: list[str]) -> None:
    check(SizeProgram(0, names))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3_000))
def test_right_or_refused(seed: int) -> None:
    check(SizeProgram(seed))


def check(program: SizeProgram) -> None:
    program.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", QuantizationWarning)
        prepared = tc.prepare_fx(program, QConfigMapping(), (example(),))
    for shape in OTHER_SIZES:
        x = example(shape)
        try:
            expected = leaves(program(x))
        except (RuntimeError, IndexError):
            continue
        try:
            found = leaves(prepared(x))
        except InputError:
            continue
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5, msg=f"{program.names} at {shape}")
