"""The random generator behind the functions under ``run``: where FX's functions leave it."""

from __future__ import annotations

import copy
import io
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.ao.quantization.quantize_fx as fx
from torch import Tensor, nn
from torch.ao.quantization import (
    QConfigMapping,
    default_dynamic_qconfig,
    get_default_qat_qconfig_mapping,
    get_default_qconfig_mapping,
    quantize_dynamic,
)

import torchq_compat as tc
from torchq_compat.port.running.fx_draws import drawing_as_fx
from torchq_compat.port.running.redirections import calling_fx
from torchq_compat.support import metadata

ROOT = Path(tc.__file__).parents[1]
X = torch.linspace(-1, 1, 216).view(2, 3, 6, 6)


class Net(nn.Module):
    """Convolution, batch norm, relu and linear; its forward prints."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.fc = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn(self.conv(x)))
        if isinstance(x, torch.fx.Proxy):
            print("FX traces")
            warnings.warn("FX traces", UserWarning, stacklevel=2)
        result: Tensor = self.fc(x.mean((2, 3)))
        return result


class Untraceable(Net):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = super().forward(x if isinstance(x, Tensor) else [x][int(x.sum())])
        return result


def through(*functions: Callable[..., Any], model: nn.Module, mapping: QConfigMapping) -> list[Tensor]:
    """Return the numbers drawn after each of the functions, from one seed."""
    torch.manual_seed(5)
    prepare, *convert = functions
    prepared = prepare(model, mapping, (X,))
    drawn = [torch.randn(3)]
    prepared(X)
    for function in convert:
        function(copy.deepcopy(prepared).eval())
        drawn.append(torch.randn(3))
    return drawn


DYNAMIC = QConfigMapping().set_object_type(nn.Linear, default_dynamic_qconfig)
CASES = {
    "qat": ("prepare_qat_fx", get_default_qat_qconfig_mapping("x86")),
    "calibration": ("prepare_fx", get_default_qconfig_mapping("x86")),
    "dynamic": ("prepare_fx", DYNAMIC),
}


@pytest.mark.parametrize("name", CASES)
def test_later_numbers_are_those_of_fx(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    prepare, mapping = CASES[name]
    names = (prepare, "convert_fx", "convert_to_reference_fx")
    model = Net().train(name == "qat")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = through(*(getattr(fx, n) for n in names), model=copy.deepcopy(model), mapping=mapping)
    capsys.readouterr()
    before = copy.deepcopy(model.state_dict())
    wrapped = [drawing_as_fx(getattr(tc, n), getattr(fx, n)) for n in names]
    found = through(*wrapped, model=model, mapping=mapping)
    assert all(map(torch.equal, found, expected))
    assert "FX traces" not in "".join(capsys.readouterr())
    without = through(*(getattr(tc, n) for n in names), model=model, mapping=mapping)
    assert not torch.equal(without[-1], expected[-1])  # FX draws
    # The model is the user's.
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not hasattr(model.fc, "qconfig")


def test_quantize_dynamic() -> None:
    model = nn.Sequential(nn.LSTM(4, 4))
    drawn = []
    for function in (quantize_dynamic, drawing_as_fx(tc.quantize_dynamic, quantize_dynamic)):
        torch.manual_seed(5)
        function(model, {nn.LSTM}, dtype=torch.qint8)
        drawn.append(torch.randn(3))
    assert torch.equal(*drawn)


def test_what_fx_cannot_run_draws_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    prepare = drawing_as_fx(tc.prepare_fx, fx.prepare_fx)
    with pytest.raises(TypeError, match="Proxy"):
        fx.prepare_fx(Untraceable().eval(), get_default_qconfig_mapping("x86"), (X,))
    capsys.readouterr()
    model = Untraceable().eval()
    state = torch.get_rng_state()
    prepared = prepare(model, get_default_qconfig_mapping("x86"), (X,))
    prepared(X)
    drawing_as_fx(tc.convert_fx, fx.convert_fx)(prepared)
    assert torch.equal(torch.get_rng_state(), state)
    assert "".join(capsys.readouterr()) == ""


def test_files_do_not_have_the_model_of_fx() -> None:
    prepared = drawing_as_fx(tc.prepare_fx, fx.prepare_fx)(
        Net().eval(), get_default_qconfig_mapping("x86"), (X,)
    )
    kept = metadata.FX_MODEL.required(prepared)
    assert metadata.FX_MODEL.of(copy.deepcopy(prepared)) is kept
    file = io.BytesIO()
    torch.save(kept, file)
    file.seek(0)
    assert torch.load(file, weights_only=False) is None


def test_while_fx_runs_it_calls_itself() -> None:
    wrapped = drawing_as_fx(tc.prepare_fx, fx.prepare_fx)
    with calling_fx(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = wrapped(Net().eval(), get_default_qconfig_mapping("x86"), (X,))
    assert not metadata.RECORD.is_on(theirs)
    assert drawing_as_fx(tc.prepare_fx, tc.prepare_fx) is tc.prepare_fx  # a torch without FX


SEEDED = """
import copy, torch
from torch import nn
from torch.ao.quantization import get_default_qat_qconfig_mapping, get_default_qconfig_mapping
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx, prepare_qat_fx

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.fc = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x):
        return self.fc(torch.relu(self.bn(self.conv(x))).mean((2, 3)))

def batch():
    return torch.randn(8, 3, 6, 6)

torch.manual_seed(3)
prepared = prepare_qat_fx(Net().train(), get_default_qat_qconfig_mapping("x86"), (batch(),))
optimizer = torch.optim.SGD(prepared.parameters(), 0.1)
for _ in range(4):
    loss = prepared(batch()).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    print(f"loss {loss:.5f}")
quantized = convert_fx(copy.deepcopy(prepared).eval())
print("trained", [f"{v:.4f}" for v in quantized(4 * batch())[0]])
print(next(iter(torch.utils.data.DataLoader(list(range(10)), shuffle=True, batch_size=10))))
prepared = prepare_fx(Net().eval(), get_default_qconfig_mapping("x86"), (batch(),))
prepared(batch())
quantized = convert_fx(prepared)
print("calibrated", [f"{v:.4f}" for v in quantized(batch())[0]])
"""


@pytest.mark.slow
def test_a_script_that_seeds_once_prints_what_it_prints_on_fx(tmp_path: Path) -> None:
    """Trained with its own draws, converted with FX's qparams; then calibrated on later draws."""
    script = tmp_path / "seeded.py"
    script.write_text(SEEDED)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def output(*command: str) -> list[str]:
        command = (sys.executable, "-W", "ignore", *command, str(script))
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return [*done.stdout.splitlines(), *(line for line in done.stderr.splitlines() if "as FX:" in line)]

    expected, found = output(), output("-m", "torchq_compat", "run")
    assert found[:-1] == expected
    assert "as FX: converted with the qparams of its observers" in found[-1]
    trained = output("-m", "torchq_compat", "run", "--trained-qparams")
    assert [a == b for a, b in zip(trained, expected, strict=True)] == [*[True] * 4, False, True, True]
