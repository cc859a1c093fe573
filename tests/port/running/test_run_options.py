"""``torchq-compat run`` with options: the kind of conversion, explanations, refusals."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
from pathlib import Path

import pytest

from tests.helpers.warm_python import Ran, warm_python
from torchq_compat.cli import main
from torchq_compat.comparison import compare_command as compare
from torchq_compat.port import run_command as run_command
from torchq_compat.port.run_command import tell_misplaced_options

SCRIPT = """
import torch
from torch import nn
from torch.ao.quantization import get_default_qconfig_mapping
from torch.ao.quantization.quantize_fx import convert_fx, convert_to_reference_fx, prepare_fx

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.{name}, self.head = {module}, nn.Linear(4, 2)

    def forward(self, x):
        x = self.{name}(x)
        x = x[0] if isinstance(x, tuple) else x
        return self.head(x.flatten(0, 1)) + x.new_zeros(1)

def prepare(model, x):
    return prepare_fx(model, get_default_qconfig_mapping("x86"), (x,))

x = torch.randn(3, 2, 4)
prepared = prepare(Model().eval(), x)
prepared(x)
print(convert_fx.__name__, convert_to_reference_fx.__name__)
convert_fx(prepared, keep_original_weights=True)
print("done")
"""


def run(tmp_path: Path, *options: str, module: str = "nn.Linear(4, 4)") -> Ran:
    path = tmp_path / "legacy.py"
    path.write_text(SCRIPT.format(name="gru" if "GRU" in module else "fc", module=module))
    return warm_python("-m", "torchq_compat", "run", *options, path.name, cwd=tmp_path)


@pytest.mark.parametrize(
    ("options", "called", "stage"),
    [
        ((), "convert_fx convert_to_reference_fx", "converted"),
        pytest.param(("--lower",), "convert_fx convert_fx", "converted", marks=pytest.mark.slow),
        (("--reference",), "convert_to_reference_fx convert_to_reference_fx", "converted to reference"),
    ],
)
def test_which_conversion(tmp_path: Path, options: tuple[str, ...], called: str, stage: str) -> None:
    result = run(tmp_path, *options)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [called, "done"]
    assert f"  Model, {stage}: " in result.stderr


@pytest.mark.slow
def test_ops_that_compute_nothing_are_counted_apart(tmp_path: Path) -> None:
    (line,) = [line for line in run(tmp_path).stderr.splitlines() if line.startswith("  Model, ")]
    assert line.startswith("  Model, converted: 3 quantized (")
    assert ", 0 float" in line
    assert line.endswith(" that only move values")


@pytest.mark.slow
def test_explain_as_json(tmp_path: Path) -> None:
    result = run(tmp_path, "--explain", "why.json", module="nn.GRU(4, 4)")
    assert result.returncode == 0, result.stderr
    (model,) = json.loads((tmp_path / "why.json").read_text())
    assert (model["model"], model["stage"]) == (["Model"], "converted")
    by_path = {decision["path"]: decision for decision in model["decisions"]}
    assert by_path["head"]["action"] == "quantized"
    assert by_path["head"]["details"]["dtype"] == "torch.uint8"
    assert by_path["gru"]["action"] == "float"
    severities = {warning["code"]: warning["severity"] for warning in model["warnings"]}
    assert severities == {"TQ304": "note", "TQ401": "warning"}


def test_explain_as_text(tmp_path: Path) -> None:
    assert run(tmp_path, "--explain", "why.txt").returncode == 0
    text = (tmp_path / "why.txt").read_text()
    title, summary, header, *rows = re.split(r"\n+", text)
    assert title == "Model, converted"
    assert re.match(r"\d+ quantized.*\d+ float", summary)
    assert header.split()[:5] == ["where", "what", "as", "scale", "zero"]
    assert any(re.match(r"head +Linear +uint8 +\d\.\d+ +\d+", row) for row in rows), text
    assert rows[-2].startswith("keep_original_weights=True"), "a warning that is no decision"
    assert rows[-2].endswith("[TQ304]")


@pytest.mark.parametrize("place", [".", "missing/why.json"])
def test_explain_without_a_place_is_refused_before_the_script_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit('it ran')\n")
    assert main(["run", "--explain", str(tmp_path / place), str(script)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("torchq-compat: error: ")
    assert "--explain" in line


def test_strict_refuses_a_module_left_float(tmp_path: Path) -> None:
    result = run(tmp_path, "--strict", module="nn.GRU(4, 4)")
    assert result.returncode == 1
    assert "done" not in result.stdout
    assert "Traceback" not in result.stderr
    told = r"torchq-compat: (.*\.py):(\d+): 1 module of Model left float: GRU 'gru': .* Hint: .*\[TQ971\]"
    found = re.search(told, result.stderr)
    assert found, result.stderr
    assert "  Model, prepared: " in result.stderr
    assert "    float: " not in result.stderr  # The error says so.
    # The line of the call itself, not of the call of the function around it.
    assert "return prepare_fx(" in (tmp_path / found[1]).read_text().splitlines()[int(found[2]) - 1]


@pytest.mark.slow
def test_strict_has_nothing_against_ops_that_compute_nothing(tmp_path: Path) -> None:
    result = run(tmp_path, "--strict")
    assert (result.returncode, result.stdout.splitlines()[-1]) == (0, "done"), result.stderr


@pytest.mark.slow
def test_options_behind_the_script_are_its_own(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint(sys.argv[1:])\n")
    result = warm_python("-m", "torchq_compat", "run", script, "--strict", "--explain")
    assert result.returncode == 0
    assert result.stdout == "['--strict', '--explain']\n"


def test_an_option_behind_a_script_that_does_not_know_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text("parser.add_argument('--json')\n")
    tell_misplaced_options(str(script), ["--html=page.html", "--json", "--epochs", "--htm"], compare.OPTIONS)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"torchq-compat: --html comes after {script} and is the script's own argument")
    for command in (compare, run_command):
        parser = argparse.ArgumentParser()
        command.add_parser(parser.add_subparsers())
        shown = io.StringIO()
        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(shown):
            parser.parse_args([command.__name__.rpartition(".")[2].removesuffix("_command"), "--help"])
        assert set(command.OPTIONS) == set(re.findall(r"(?m)^  (--[a-z-]+)", shown.getvalue()))
