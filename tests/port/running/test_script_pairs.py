"""``migration/ported`` is the output of ``rewrite`` on ``migration/legacy``, and runs with the same results.

The legacy script on FX is the oracle. Every script prints the outputs of the float and of the quantized
model, or the scores of each.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

import torchq_compat
from tests.helpers.oracle import sqnr
from tests.helpers.parsed_once import parsed_once  # noqa: F401  # a fixture
from tests.helpers.warm_python import Ran, warm_python
from torchq_compat.port.scanner import rewrite_text, scan_paths

ROOT = Path(torchq_compat.__file__).parents[1]
LEGACY, PORTED = ROOT / "migration" / "legacy", ROOT / "migration" / "ported"
NAMES = sorted(path.name for path in LEGACY.glob("*.py"))
#: Scripts that train and print scores, in a short run; test_run_command and test_digits_qat compare with FX.
SCORES = {
    "char_lm.py": ("--steps", "30", "--hidden", "16", "--eval-chars", "4000", "--batch", "8"),
    "digits_qat.py": ("--epochs", "1", "--qat-epochs", "2", "--observer-epochs", "1", "--hidden", "8"),
}


@dataclass(frozen=True)
class Expected:
    """Bounds on the results of both engines.

    Attributes:
        difference: between their outputs, at most; quantized outputs may differ by one step of FX's.
        sqnr: the least and the largest SQNR in dB against the float model, for both.
    """

    difference: float
    sqnr: tuple[float, float]


#: The printed digits.
EQUAL = 1.5e-6
OUTPUTS = {
    "cnn_torchscript.py": Expected(EQUAL, (34, 42)),
    "dict_configs.py": Expected(EQUAL, (32, 40)),
    "eager_static.py": Expected(EQUAL, (25, 60)),
    # FX requantizes every gate to 8 bits before multiplying; see test_parts_where_fx_is_wrong.
    "lstm_16bit_parts.py": Expected(2**-7 + EQUAL, (28, 34)),
    "standalone_modules.py": Expected(EQUAL, (28, 36)),
    "user_custom_module.py": Expected(EQUAL, (27, 35)),
    "word_lm_dynamic.py": Expected(EQUAL, (42, 50)),
    "learnable_qat.py": Expected(EQUAL, (10, 60)),
    "quantize_dynamic_lm.py": Expected(EQUAL, (35, 60)),
    "selective_float.py": Expected(EQUAL, (25, 60)),
    "static_tutorial.py": Expected(EQUAL, (25, 60)),
    "torchscript_helpers.py": Expected(EQUAL, (25, 60)),
}
#: Every run has these, of different kinds; the slow run has all pairs.
DEFAULT = ("lstm_16bit_parts.py", "quantize_dynamic_lm.py")


def run(*command: object) -> Ran:
    result = warm_python(*command)
    assert result.returncode == 0, result.stderr
    return result


def outputs(result: Ran) -> dict[str, Tensor]:
    lines = re.findall(r"^(float|quantized) (.*)$", result.stdout, re.MULTILINE)
    return {name: torch.tensor([float(value) for value in values.split()]) for name, values in lines}


@pytest.mark.slow
@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_under_run_are_those_of_the_ported_script(name: str) -> None:
    by_run, ported = outputs(run("-m", "torchq_compat", "run", LEGACY / name)), outputs(run(PORTED / name))
    assert by_run.keys() == ported.keys() == {"float", "quantized"}
    for key, value in by_run.items():
        assert torch.equal(value, ported[key])


def test_thirteen_pairs() -> None:
    assert len(NAMES) >= 13
    assert sorted(path.name for path in PORTED.glob("*.py")) == NAMES
    assert sorted({*SCORES, *OUTPUTS}) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_ported_is_what_rewrite_makes_of_legacy(name: str) -> None:
    """And nothing is left in it."""
    assert rewrite_text((LEGACY / name).read_bytes().decode()).encode() == (PORTED / name).read_bytes()
    legacy, ported = (scan_paths([folder / name]) for folder in (LEGACY, PORTED))
    assert legacy.findings
    # Weights read inside a converted model: views answer, and say where the values are.
    of_views = ["TQ208"] * 2 if name == "static_tutorial.py" else []
    by_hand = [finding for finding in legacy.findings if finding.by == "manual review"]
    assert [finding.construct.code for finding in by_hand] == of_views
    assert [finding.construct.code for finding in ported.findings] == of_views
    assert ported.problems == []


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in DEFAULT else [pytest.mark.slow]) for name in OUTPUTS]
)
def test_outputs_are_those_of_fx(name: str) -> None:
    expected = OUTPUTS[name]
    fx = outputs(run(LEGACY / name))
    result = run(PORTED / name)
    assert "QuantizationWarning" not in result.stderr
    ours = outputs(result)
    assert torch.equal(ours["float"], fx["float"])
    assert (ours["quantized"] - fx["quantized"]).abs().max() <= expected.difference
    low, high = expected.sqnr
    for engine in (fx, ours):
        assert low < sqnr(engine["float"], engine["quantized"]) < high


@pytest.mark.slow
@pytest.mark.parametrize("name", SCORES)
def test_scores_are_those_of_the_legacy_script_under_run(name: str) -> None:
    by_run = run("-m", "torchq_compat", "run", LEGACY / name, *SCORES[name])
    ported = run(PORTED / name, *SCORES[name])
    assert ported.stdout == by_run.stdout
    assert re.search(r"^float .*\d", ported.stdout, re.MULTILINE)
