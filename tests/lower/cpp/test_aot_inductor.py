"""A converted model without Python: an AOTInductor package in a C++ program, with the operator's library."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import get_default_qconfig_mapping

import torchq_compat as tc
from tests.helpers.oracle import calibrate, sqnr
from torchq_compat.operators import native_library

HERE = Path(__file__).parent


class Tagger(nn.Module):
    """Two kinds of recurrent modules, one of them in both directions, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8, 2, bidirectional=True)
        self.gru = nn.GRU(16, 7)
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(self.lstm(x)[0])[0])


def example(steps: int, batch: int) -> Tensor:
    """Return the inputs of ``run_package.cpp``, numbers that floats hold exactly."""
    numbers = torch.arange(steps * batch * 6, dtype=torch.float32)
    return (numbers * 7).remainder(33).div(16).sub(1).view(steps, batch, 6)


def test_the_library_has_the_operator() -> None:
    assert native_library().is_file()
    assert b"torchq_compat_native" in native_library().read_bytes()


@pytest.mark.slow
def test_a_package_runs_in_a_program_of_cpp_at_other_sizes(tmp_path: Path) -> None:
    assert shutil.which("cmake"), "cmake is needed"
    torch.manual_seed(0)
    float_model = Tagger().eval()
    config = tc.get_default_prepare_custom_config()
    prepared = tc.prepare_fx(float_model, get_default_qconfig_mapping(), (example(5, 2),), config)
    calibrate(prepared, [(example(20, 6),)])
    program = tc.export(tc.convert_fx(prepared), (example(5, 2),), recurrent="opaque")
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "tagger.pt2"))
    build = tmp_path / "build"
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    subprocess.run(["cmake", "-S", str(HERE), "-B", str(build), prefix], check=True, capture_output=True)
    subprocess.run(["cmake", "--build", str(build)], check=True, capture_output=True)
    for steps, batch in ((5, 2), (23, 4), (1, 1)):
        output = tmp_path / "output"
        command = [str(build / "run_package"), str(native_library()), str(package), str(output)]
        subprocess.run([*command, str(steps), str(batch), "6"], check=True)
        found = torch.frombuffer(bytearray(output.read_bytes()), dtype=torch.float32).view(steps, batch, 3)
        x = example(steps, batch)
        assert torch.equal(found, torch._inductor.aoti_load_package(package)(x))
        # Inductor sums floats in another order: a value midway between two integers may round to the other
        # one.
        assert sqnr(program.module()(x), found) > 40
        assert 15 < sqnr(float_model(x), found) < 60
