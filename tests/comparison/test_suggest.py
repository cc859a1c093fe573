"""suggest: the modules that cost the most accuracy."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import get_default_qconfig_mapping
from torch.ao.quantization.backend_config import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    ObservationType,
)

import torchq_compat as tc
from tests.helpers.oracle import sqnr
from torchq_compat.cli import main
from torchq_compat.comparison.suggesting import QCONFIG_16, _best_together, _Measurement, _sensitivities
from torchq_compat.errors import ArgumentError, ConfigError, QuantizationWarning


class Outlier(nn.Module):
    """One channel between ``bad`` and ``last`` takes up the whole range, and has no effect on the result."""

    def __init__(self) -> None:
        super().__init__()
        self.good = nn.Linear(8, 8)
        self.bad = nn.Linear(8, 8)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.bad(self.good(x)))


def case() -> dict[str, object]:
    torch.manual_seed(0)
    model = Outlier().eval()
    with torch.no_grad():
        model.bad.bias[0] = 400
        model.last.weight[:, 0] = 0
    batches = [(torch.randn(16, 8),) for _ in range(2)]
    return {
        "model": model,
        "qconfig_mapping": get_default_qconfig_mapping("x86"),
        "example_inputs": batches[0],
        "calibration_data": batches,
    }


def test_the_worst_module_is_left_float() -> None:
    given = case()
    mapping = tc.suggest(**given, n=2)  # type: ignore[arg-type]
    assert sorted(mapping.chosen) == ["bad", "last"]
    assert mapping.sqnr_before < 15 < 25 < mapping.sqnr_after < 60
    worst, second, best = mapping.sensitivities
    assert best.path == "good"
    assert max(worst.sqnr, second.sqnr) < 15 < 25 < best.sqnr < 60
    assert f"* {worst.path}  Linear" in str(mapping)
    assert mapping.module_name_qconfigs["bad"] is None
    assert "bad" not in given["qconfig_mapping"].module_name_qconfigs  # type: ignore[attr-defined]
    prepared = tc.prepare_fx(given["model"], mapping, given["example_inputs"])  # type: ignore[arg-type]
    assert any(each.path == "bad" for each in tc.explain(prepared).left_float())
    with pytest.raises(ArgumentError, match="at least 1"):
        tc.suggest(**given, n=0)  # type: ignore[arg-type]


def in_8_and_16_bits() -> BackendConfig:
    integers = {"weight_dtype": torch.qint8, "bias_dtype": torch.float}
    linear = BackendPatternConfig(nn.Linear).set_observation_type(
        ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT
    )
    for dtype in (torch.quint8, torch.int16):
        linear.add_dtype_config(DTypeConfig(input_dtype=dtype, output_dtype=dtype, **integers))  # type: ignore[arg-type]
    return BackendConfig("8 and 16 bits").set_backend_pattern_config(linear)


def test_16_bits_are_measured_as_the_mapping_gives_them() -> None:
    given, backend = case(), in_8_and_16_bits()
    mapping = tc.suggest(**given, n=2, instead="16-bit", backend_config=backend)  # type: ignore[arg-type]
    assert sorted(mapping.chosen) == ["bad", "last"]
    assert mapping.sqnr_before < 15 < 25 < mapping.sqnr_after < 60
    assert "dB with the chosen modules in 16 bits" in str(mapping)
    model, example, batches = (given[name] for name in ("model", "example_inputs", "calibration_data"))
    prepared = tc.prepare_fx(model, mapping, example, backend_config=backend)  # type: ignore[arg-type]
    for batch in batches:  # type: ignore[attr-defined]
        prepared(*batch)
    converted = tc.convert_to_reference_fx(prepared)
    assert not tc.explain(prepared).left_float()
    dtypes = [n.args[-1] for n in converted.graph.nodes if "quantize_per_tensor" in str(n.target)]
    assert dtypes.count(torch.int16) == 6
    measured = [sqnr(model(*batch), converted(*batch)) for batch in batches]  # type: ignore[operator,attr-defined]
    assert mapping.sqnr_after == pytest.approx(sum(measured) / len(measured), abs=0.1)


def test_16_bits_that_the_backend_does_not_list_are_told() -> None:
    with pytest.warns(
        QuantizationWarning, match="the backend has no 16 bits for .*'bad'.* left float instead"
    ):
        mapping = tc.suggest(**case(), n=2, instead="16-bit")  # type: ignore[arg-type]
    assert 25 < mapping.sqnr_after < 60


def test_one_module_that_only_prepare_can_leave_out_is_passed_over() -> None:
    """Modules are tried together first: one conversion, and one for each module if that fails."""
    calls = []

    class Counting(_Measurement):
        def sqnr(self, switched_off: tuple[str, ...]) -> float:
            calls.append(switched_off)
            if "bad" in switched_off:
                raise ConfigError("not at convert")
            return super().sqnr(switched_off)

    given = case()
    prepared = tc.prepare_fx(given["model"], given["qconfig_mapping"], given["example_inputs"])  # type: ignore[arg-type]
    prepared(*given["example_inputs"])  # type: ignore[misc]
    arguments = (given["model"], prepared, given["qconfig_mapping"], None, given["calibration_data"])
    found = [each.path for each in _sensitivities(given["model"], Counting(*arguments))]  # type: ignore[arg-type]
    assert found == ["good", "last"]
    assert calls[0] == ("good", "bad", "last")


def test_where_the_worst_together_help_nothing_others_are_tried() -> None:
    """Leaving a module float can lower the accuracy, if its rounding errors cancel later ones."""
    gains = {"a": -1.0, "b": -1.0, "c": 2.0, "d": 0.5, "e": 1.0, "f": 3.0}

    class Told(_Measurement):
        def sqnr(self, switched_off: tuple[str, ...]) -> float:
            return 10 + sum(gains[path] for path in switched_off)

    trial = Told(*(None,) * 5)  # type: ignore[arg-type]
    assert _best_together(trial, [*gains], 2, 10.0) == (("c", "d"), 12.5)
    assert _best_together(trial, [*reversed(gains)], 2, 10.0) == (("f", "e"), 14.0)
    assert _best_together(trial, ["a", "b"], 2, 10.0) == ((), 10.0)
    assert _best_together(trial, [], 2, 10.0) == ((), 10.0)


def test_where_leaving_out_helps_nothing_the_mapping_stays() -> None:
    batch = (torch.rand(20, 2),)
    with pytest.warns(QuantizationWarning, match="makes the model no better"):
        mapping = tc.suggest(
            nn.Sequential(nn.ReLU()).eval(), get_default_qconfig_mapping("x86"), batch, [batch]
        )
    assert mapping.chosen == ()
    assert 30 < mapping.sqnr_before == mapping.sqnr_after < 60


def test_the_command_prints_what_can_be_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.warns(QuantizationWarning, match="no 16 bits"):
        assert main(["suggest", "-n", "2", "--instead", "16-bit", f"{__name__}:case"]) == 0
    out = capsys.readouterr().out
    code = out[out.index("sixteen_bits =") :]
    names = {"torch": torch, "qconfig_mapping": get_default_qconfig_mapping("x86")}
    exec(code, names)
    assert repr(names["sixteen_bits"].activation()) == repr(QCONFIG_16.activation())
    assert set(names["qconfig_mapping"].module_name_qconfigs) == {"bad", "last"}


def test_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(["suggest", "-n", "2", f"{__name__}:case"]) == 0
    assert "qconfig_mapping.set_module_name('bad', None)" in capsys.readouterr().out
    assert main(["suggest", "nothing"]) == 2


#: Suggests for a model of the zoo; in a process of its own, where torchvision can be imported.
OF_THE_ZOO = """
import sys
from tests.zoo.libraries import prepare_imports
prepare_imports()
import torch
from torch.ao.quantization import get_default_qconfig_mapping
from tests.zoo.registry import ZOO
from tests.zoo.sane_statistics import settle
from torchq_compat import suggest
torch.manual_seed(0)
entry = ZOO[sys.argv[1]]
batches = [entry.batch() for _ in range(3)]
model = settle(entry.make(), [entry.large_batch() for _ in range(3)])
unseen = [entry.batch() for _ in range(3)]
mapping = suggest(model, get_default_qconfig_mapping("x86"), batches[0], batches, evaluation_data=unseen)
print(len(mapping.chosen), mapping.sqnr_before, mapping.sqnr_after)
"""


#: Those below 15 dB whose library is there; the extra ``zoo`` brings it.
BELOW_15 = ["nf_resnet26", "poolformer_s12"] if importlib.util.find_spec("timm") else []


@pytest.mark.slow
@pytest.mark.parametrize("name", BELOW_15)
def test_models_of_the_zoo_get_better(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OF_THE_ZOO, name], capture_output=True, text=True, check=True
    )
    chosen, before, after = map(float, done.stdout.split()[-3:])
    assert 0 < chosen <= 3
    assert before < 15
    assert before + 1 < after < 60
