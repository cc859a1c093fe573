"""A converted model without Python: an AOTInductor package in a C++ program, with the operator's library."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import get_default_qconfig_mapping

import torchq_compat as tc
from tests.helpers.oracle import calibrate, sqnr
from tests.zoo.libraries import prepare_imports
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


class Signals(nn.Module):
    """Convolutions, an activation, a sum, a pool and a head, on (steps, batch, channels)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.each = nn.Conv1d(6, 8, 3, padding=1), nn.Conv1d(8, 8, 3, padding=1, groups=8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(x.permute(1, 2, 0)))
        y = F.hardswish(self.each(y)) + y
        return self.head(F.max_pool1d(y, 3, 1, 1).permute(2, 0, 1))


def recurrent(converted: Any) -> Any:
    return tc.export(converted, (example(5, 2),), recurrent="opaque")


def plain(converted: Any) -> Any:
    free = torch.export.Dim.AUTO
    return torch.export.export(converted, (example(5, 2),), dynamic_shapes=({0: free, 1: free},))


@pytest.mark.slow
@pytest.mark.parametrize(("build", "export"), [(Tagger, recurrent), (Signals, plain), (Tagger, plain)])
def test_a_package_runs_in_a_program_of_cpp_at_other_sizes(build: Any, export: Any, tmp_path: Path) -> None:
    assert shutil.which("cmake"), "cmake is needed"
    torch.manual_seed(0)
    float_model = build().eval()
    config = tc.get_default_prepare_custom_config()
    prepared = tc.prepare_fx(float_model, get_default_qconfig_mapping(), (example(5, 2),), config)
    calibrate(prepared, [(example(20, 6),)])
    program = export(tc.convert_fx(prepared))
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "tagger.pt2"))
    made = tmp_path / "build"
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    subprocess.run(["cmake", "-S", str(HERE), "-B", str(made), prefix], check=True, capture_output=True)
    subprocess.run(["cmake", "--build", str(made)], check=True, capture_output=True)
    for steps, batch in ((5, 2), (23, 4), (1, 1)):
        output = tmp_path / "output"
        command = [str(made / "run_package"), str(native_library()), str(package), str(output)]
        subprocess.run([*command, str(steps), str(batch), "6"], check=True)
        found = torch.frombuffer(bytearray(output.read_bytes()), dtype=torch.float32).view(steps, batch, 3)
        x = example(steps, batch)
        assert torch.equal(found, torch._inductor.aoti_load_package(package)(x))
        # Inductor sums floats in another order: a value midway between two integers may round to the other
        # one.
        assert sqnr(program.module()(x), found) > 40
        assert 15 < sqnr(float_model(x), found) < 60


class TextTagger(nn.Module):
    """Integers in, an embedding, a recurrent module in both directions, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(50, 16), nn.Linear(48, 9)
        self.gru = nn.GRU(16, 24, batch_first=True, bidirectional=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.gru(self.embedding(ids))[0])


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(12, 32), nn.Linear(32, 5)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(self.first(x))).log_softmax(-1)


def squeezenet() -> nn.Module:
    prepare_imports()
    import torchvision

    return torchvision.models.squeezenet1_1(num_classes=10)


def of_ids(batch: int, steps: int) -> Tensor:
    return torch.randint(0, 50, (batch, steps))


def of_floats(batch: int, steps: int) -> Tensor:
    return torch.randn(batch, steps, 12)


def of_pixels(batch: int, side: int) -> Tensor:
    return torch.randn(batch, 3, side, side)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "inputs", "sizes"),
    [
        pytest.param(TextTagger, of_ids, [(3, 7), (5, 13), (1, 2)], id="text"),
        pytest.param(Encoder, of_floats, [(3, 7), (5, 13), (1, 2)], id="transformer"),
        pytest.param(squeezenet, of_pixels, [(2, 96), (3, 128)], id="squeezenet"),
    ],
)
def test_packages_of_models_take_other_sizes(
    build: Any, inputs: Any, sizes: list[tuple[int, int]], tmp_path: Path
) -> None:
    float_model = build().eval()
    config = tc.get_default_prepare_custom_config()
    prepared = tc.prepare_fx(float_model, get_default_qconfig_mapping(), (inputs(*sizes[0]),), config)
    calibrate(prepared, [(inputs(*sizes[0]),) for _ in range(4)])
    converted = tc.convert_fx(prepared)
    program = tc.export(converted, (inputs(*sizes[0]),), recurrent="opaque")
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    package = torch._inductor.aoti_load_package(path)
    for size in sizes:
        x = inputs(*size)
        found = package(x)
        # Values midway between two integers may round to the other one.
        assert sqnr(program.module()(x), found) > 30
        assert sqnr(converted(x), found) > 30
        assert 15 < sqnr(float_model(x), found) < 60
