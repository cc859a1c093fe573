"""``torchq-compat compare``: scripts and functions, output on both streams, and failures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.quantization import get_default_qconfig_mapping

import torchq_compat as tc
from tests.helpers.oracle import MAP_LSTM
from tests.helpers.warm_python import ENVIRONMENT, Ran, warm_python
from torchq_compat.cli import main
from torchq_compat.comparison.cases import Case, _take_trained
from torchq_compat.comparison.compare_command import case_of_function
from torchq_compat.comparison.results import Target
from torchq_compat.errors import ScriptError

ROOT = Path(tc.__file__).parents[1]

MODEL = """
import sys
import torch
from torch import nn
from torch.ao.quantization import get_default_qconfig_mapping

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 16), nn.Linear(16, 4)

    def forward(self, x, h, c):
        return self.head(self.lstm(x, (h, c))[0])

torch.manual_seed(0)
model = Model().eval()
batches = [(torch.randn(6, 4, 8), torch.zeros(1, 4, 16), torch.zeros(1, 4, 16)) for _ in range(3)]
mapping = get_default_qconfig_mapping("x86")
"""
QUANTIZE = """
import copy
import torch.ao.quantization.quantize_fx as quantize_fx
from torch.ao.quantization.fx.custom_config import PrepareCustomConfig

config = PrepareCustomConfig().set_float_to_observed_mapping(nn.LSTM, torch.ao.nn.quantizable.LSTM)
prepared = quantize_fx.prepare_fx(model, mapping, batches[0], config)
buffer = tuple(torch.empty_like(each) for each in batches[0])
calibrated = copy.deepcopy(prepared)
for batch in batches:
    for each, values in zip(buffer, batch):
        each.copy_(values)
    calibrated(*buffer)
print("calibrated")
quantized = quantize_fx.convert_fx(calibrated)
quantized(*batches[0])
"""
PARTS = """
import torch.ao.quantization.quantize_fx as quantize_fx
from torch.ao.quantization.fx.custom_config import ConvertCustomConfig, PrepareCustomConfig
from torch.ao.quantization.fx.lstm_utils import (
    _get_lstm_with_individually_observed_parts as get_observed,
    _get_reference_quantized_lstm_module as get_quantized,
)

class Observed(torch.ao.nn.quantizable.LSTM):
    @classmethod
    def from_float(cls, other):
        return get_observed(other, (torch.rand(4, 8), (torch.rand(4, 16), torch.rand(4, 16))))

class Quantized(torch.ao.nn.quantized.LSTM):
    @classmethod
    def from_observed(cls, other):
        return get_quantized(other)

config = PrepareCustomConfig().set_float_to_observed_mapping(nn.LSTM, Observed)
prepared = quantize_fx.prepare_fx(model, mapping, batches[0], config)
for batch in batches:
    prepared(*batch)
to = ConvertCustomConfig().set_observed_to_quantized_mapping(torch.ao.nn.quantizable.LSTM, Quantized)
quantized = quantize_fx.convert_to_reference_fx(prepared, to)
"""
FUNCTION = """
from dataclasses import dataclass
from typing import Any
from torch.ao.quantization import QConfigMapping

@dataclass
class Mine:
    model: Any
    qconfig_mapping: Any
    example_inputs: Any
    calibration_data: Any

class Nested:
    @staticmethod
    def case():
        return Mine(nn.Linear(8, 4), mapping, (torch.randn(2, 8),), [torch.randn(2, 8)])

def twice():
    class Twice(Model):
        def forward(self, x, h, c):
            y, state = self.lstm(x, (h, c))
            return self.lstm(x, state)[0]

    from torch.ao.quantization.fx.custom_config import PrepareCustomConfig
    return {
        "model": Twice(), "qconfig_mapping": mapping,
        "example_inputs": batches[0], "calibration_data": batches,
        "prepare_custom_config": PrepareCustomConfig().set_float_to_observed_mapping(
            nn.LSTM, torch.ao.nn.quantizable.LSTM),
    }

def nothing():
    return {**vars(Nested.case()), "qconfig_mapping": QConfigMapping()}

def wrong():
    return {"model": model}

def raises():
    raise ValueError("no data today")

value = 3
"""


def python(*args: str, cwd: Path) -> Ran:
    return subprocess.run(
        [sys.executable, *args],
        cwd=cwd,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def compare(folder: Path, *args: str, start: Callable[..., Ran] = warm_python, **files: str) -> Ran:
    """Run the command in ``folder``, which contains ``files`` (name without suffix -> source)."""
    for name, source in files.items():
        (folder / f"{name}.py").write_text(source)
    return start("-m", "torchq_compat", "compare", *args, cwd=folder)


def assert_error(result: Ran, message: str) -> None:
    """Assert one line on standard error, with a hint, and nothing on standard output."""
    last = result.stderr.splitlines()[-1]
    assert last.startswith("torchq-compat: error: ")
    assert message in last
    assert " Hint: " in last
    assert (result.returncode, result.stdout) == (2, "")


def comparisons(result: Ran) -> list[dict[str, Any]]:
    data = json.loads(result.stdout)
    assert data.keys() == {"version", "comparisons"}
    assert data["version"] == 1
    found: list[dict[str, Any]] = data["comparisons"]
    return found


@pytest.mark.slow
def test_a_script_gives_what_the_function_gives(tmp_path: Path) -> None:
    """The batches are those that the script fed to a copy of the model, through a buffer it overwrites."""
    result = compare(tmp_path, "--json", "quantize.py", quantize=MODEL + QUANTIZE)
    assert result.returncode == 0
    assert "calibrated" in result.stderr
    (found,) = comparisons(result)
    namespace: dict[str, Any] = {"__name__": "script"}
    exec(MODEL, namespace)
    mapping, batches = namespace["mapping"], namespace["batches"]
    here = tc.compare(namespace["model"], mapping, batches[0], batches, prepare_custom_config=MAP_LSTM)
    expected = here.as_dict()
    assert found["fx"]["outcome"] == "ran"
    assert found["outputs"] == expected["outputs"]
    assert found["points"] == expected["points"]
    assert found["verdict"] == "same"


@pytest.mark.slow
def test_a_ported_script_is_compared_too(tmp_path: Path) -> None:
    source = (MODEL + PARTS).replace("torch.ao.quantization.quantize_fx", "torchq_compat.quantize_fx")
    source = source.replace("torch.ao.quantization.fx.lstm_utils", "torchq_compat.lstm_utils")
    source = source.replace("torch.ao.quantization.fx.custom_config", "torchq_compat.custom_config")
    assert source.count("torchq_compat") == 3
    (found,) = comparisons(compare(tmp_path, "--json", "--fx", "yes", "ported.py", ported=source))
    assert found["fx"]["outcome"] == "ran"
    assert found["verdict"] in ("same", "similar")


@pytest.mark.slow
def test_every_model_of_a_script_on_one_page(tmp_path: Path) -> None:
    """A second model's class calls FX's helpers, which are FX's own again while FX runs."""
    source = MODEL + QUANTIZE + PARTS + "sys.exit(0)\n"
    result = compare(tmp_path, "--html", "page.html", "two.py", "argument", two=source)
    assert result.returncode == 0, result.stderr
    verdicts = [line for line in result.stdout.splitlines() if line.startswith("Model: ")]
    assert len(verdicts) == 2
    assert set(verdicts) <= {"Model: same", "Model: similar"}
    assert (tmp_path / "page.html").read_text().count("data-verdict=") == 2
    assert [path.name for path in tmp_path.iterdir() if path.name[0] == "."] == []


@pytest.mark.slow
def test_a_function_that_returns_an_object(tmp_path: Path) -> None:
    result = compare(tmp_path, "--json", "cases:Nested.case", cases=MODEL + FUNCTION)
    (found,) = comparisons(result)
    assert (result.returncode, found["model"], found["verdict"]) == (0, "Linear", "same")


@pytest.mark.slow
def test_a_model_fx_cannot_run(tmp_path: Path) -> None:
    result = compare(tmp_path, "cases:twice", cases=MODEL + FUNCTION)
    assert result.returncode == 0
    assert result.stdout.startswith("Twice: without FX\nFX cannot run this model. Against the float model: ")
    assert "raised AttributeError: 'tuple' object has no attribute 'numel'" in result.stdout
    assert "\x1b" not in result.stdout
    assert_error(compare(tmp_path, "--fx", "yes", "cases:twice"), "FX cannot run this model: AttributeError")
    assert "FX was not run" in compare(tmp_path, "--fx", "no", "cases:Nested.case").stdout


@pytest.mark.slow
def test_nothing_quantized_needs_attention(tmp_path: Path) -> None:
    result = compare(tmp_path, "cases:nothing", cases=MODEL + FUNCTION)
    assert result.returncode == 1
    assert "Nothing in Linear is quantized here." in result.stdout


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("cases:wrong", "what cases:wrong() returned is no case: it has no 'qconfig_mapping'."),
        ("cases:raises", "cases:raises() raised ValueError: no data today"),
        ("cases:value", "the module 'cases' has no function 'value'."),
        ("cases:absent.deeper", "the module 'cases' has no function 'absent.deeper'."),
        ("nowhere:case", "the module 'nowhere' cannot be imported: ModuleNotFoundError"),
    ],
)
def test_bad_functions(tmp_path: Path, target: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, where torch is already imported."""
    (tmp_path / "cases.py").write_text(MODEL + FUNCTION)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.delitem(sys.modules, "cases", raising=False)
    with pytest.raises(ScriptError) as error:
        case_of_function(Target(target, is_function=True))
    monkeypatch.delitem(sys.modules, "cases", raising=False)
    assert error.value.message.startswith(message)
    assert error.value.hint


@pytest.mark.slow
def test_a_bad_function_from_the_command_line(tmp_path: Path) -> None:
    assert_error(compare(tmp_path, "cases:raises", cases=FUNCTION), "cases:raises() raised ValueError")


QAT = """
from torch.ao.quantization import get_default_qat_qconfig_mapping
from torch.ao.quantization.quantize_fx import convert_fx, prepare_qat_fx
net = nn.Sequential(nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4))
prepared = prepare_qat_fx(net, get_default_qat_qconfig_mapping("x86"), (torch.randn(2, 3, 8),))
optimizer = torch.optim.SGD(prepared.parameters(), lr=0.1)
for _ in range(20):
    optimizer.zero_grad()
    prepared(torch.randn(16, 3, 8)).square().sum().backward()
    optimizer.step()
convert_fx(prepared.eval())
trained = prepared(torch.ones(2, 3, 8))
print("trained to", *trained.flatten().tolist())
"""


@pytest.mark.parametrize(
    ("source", "message"),
    [
        pytest.param(
            "raise ValueError('late')",
            "script.py raised ValueError, so there is nothing to compare.",
            marks=pytest.mark.slow,
        ),
        ("import sys; sys.exit(3)", "script.py exited with 3, so there is nothing to compare."),
        pytest.param(
            "import sys; sys.exit('bye')",
            "script.py exited with 'bye', so there is nothing to compare.",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "import os; os._exit(7)",
            "the process that compared script.py ended with code 7 and no result.",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "def f(:",
            "script.py raised SyntaxError, so there is nothing to compare.",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "print('hello')",
            "script.py ended without preparing and converting a model",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            MODEL + QUANTIZE.partition("print(")[0],
            "script.py ended without preparing and converting a model",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_bad_scripts(tmp_path: Path, source: str, message: str) -> None:
    start = python if "exit(3)" in source else warm_python  # one of them as a person starts it
    result = compare(tmp_path, "--html", "page.html", "script.py", start=start, script=source)
    assert_error(result, message)
    assert not (tmp_path / "page.html").exists()
    if "late" in source:  # the traceback begins at the script
        assert result.stderr.splitlines()[0] == "Traceback (most recent call last):"
        assert "script.py" in result.stderr.splitlines()[1]


@pytest.mark.slow
@pytest.mark.parametrize("keeps_trained", [True, False])
def test_a_trained_model_is_compared_with_the_weights_it_was_trained_to(
    tmp_path: Path, *, keeps_trained: bool
) -> None:
    options = ("--trained-qparams",) if keeps_trained else ()
    result = compare(tmp_path, "--json", *options, "both.py", both=MODEL + QUANTIZE + QAT)
    # With what it trained with, the model is farther from float than FX's.
    assert result.returncode == keeps_trained, result.stderr
    assert (
        "torchq-compat: Sequential goes through prepare_qat_fx: both sides have the weights it was trained "
        "to, and observe the last 8 batches anew"
    ) in result.stderr
    first, trained = comparisons(result)
    assert (first["model"], trained["model"]) == ("Model", "Sequential")
    assert first["verdict"] == "same"
    # Training clamps to 0..127; FX converts to 0..255, which cuts fewer values beyond the moving average.
    assert trained["verdict"] == ("worse" if keeps_trained else "same")
    found = any(finding["link"].endswith("range-of-a-fake-quantize") for finding in trained["findings"])
    assert found is keeps_trained
    assert trained["fx"]["outcome"] == "ran"
    (output,) = trained["outputs"]
    for side in ("ours", "fx"):
        assert 20 < output[side]["sqnr"] < 60


def test_the_recorder_has_the_trained_weights_and_the_last_batches() -> None:
    """In this process, where torch is already imported."""
    case = Case(nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2)), None, None, [(1,)], is_qat=True)
    trained = {"0.weight": torch.eye(2), "0.bias": torch.ones(3), "1.layers.0.cell.weight": torch.eye(2)}
    remark = _take_trained(case, trained)
    assert torch.equal(case.model[0].weight, torch.eye(2))
    assert "; 0.bias, 1.bias_hh_l0, 1.bias_ih_l0 as before the training, and observe the last 1 b" in remark


def test_what_is_recorded_are_the_batches_of_the_script(tmp_path: Path) -> None:
    """Not those on which convert tries what it made, nor calls of the converted model, nor without it."""
    script = """
from torchq_compat.comparison.cases import ScriptRecorder
recorder = ScriptRecorder()
with recorder.recording():
    import torch
    from torch import nn
    from torch.ao.quantization import get_default_qconfig_mapping
    from torch.ao.quantization.quantize_fx import convert_fx, fuse_fx, prepare_fx
    batches = [torch.full((2, 8), float(number)) for number in range(4)]
    model = fuse_fx(nn.Sequential(nn.Linear(8, 4), nn.ReLU()).eval())
    prepared = prepare_fx(model, get_default_qconfig_mapping("x86"), (batches[0],))
    for batch in batches[:3]:
        prepared(batch)
    convert_fx(prepared)(batches[3])
    prepared(batches[3])
(case,) = recorder.cases("script.py")
print([float(batch.mean()) for (batch,) in case.calibration_data])
"""
    (tmp_path / "script.py").write_text(script)
    ran = warm_python("script.py", cwd=tmp_path)
    assert ran.stdout == "[0.0, 1.0, 2.0]\n", ran.stderr


HANGS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open("pid.part", "w") as file:
    file.write(str(child.pid))
import os
os.rename("pid.part", "pid")
time.sleep(600)
"""


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert condition()


def ended(folder: Path) -> bool:
    """Return whether the process that the script started is gone, or a zombie that nobody reaps."""
    state = Path("/proc") / (folder / "pid").read_text() / "stat"
    try:
        return state.read_text().split()[2] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.slow
def test_a_script_that_hangs_is_stopped_with_all_it_started(tmp_path: Path) -> None:
    start = time.monotonic()
    result = compare(tmp_path, "--timeout", "15", "hangs.py", start=python, hangs=HANGS)
    assert time.monotonic() - start < 100
    assert_error(result, "hangs.py did not end within 15 seconds and was stopped.")
    wait_until(lambda: ended(tmp_path), 10)


@pytest.mark.slow
def test_a_terminated_command_stops_the_script(tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text(HANGS)
    command = [sys.executable, "-m", "torchq_compat", "compare", "hangs.py"]
    with subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stderr=subprocess.DEVNULL) as running:
        wait_until((tmp_path / "pid").exists, 100)
        running.terminate()
        assert running.wait(60) == 128 + signal.SIGTERM
    wait_until(lambda: ended(tmp_path), 10)


#: A command whose write of a page without models does not end.
SLOW_PAGE = """
import os, sys, time
def slow(descriptor):
    print("writing", flush=True)
    time.sleep(60)
os.fsync = slow
from torchq_compat.comparison import compare_command as compare
from torchq_compat.cli import main
compare._compared = lambda target, timeout: ()
sys.exit(main(["compare", "--html", "page.html", "quantize.py"]))
"""


def test_a_signal_while_the_page_is_written_leaves_the_old_page(tmp_path: Path) -> None:
    (tmp_path / "quantize.py").write_text("")
    (tmp_path / "page.html").write_text("old")
    command = [sys.executable, "-c", SLOW_PAGE]
    with subprocess.Popen(
        command, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    assert (tmp_path / "page.html").read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["page.html", "quantize.py"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["absent.py"], "there is no script 'absent.py'."),
        (["a-b:c"], "'a-b:c' is neither a script nor module:function."),
        (["--html", "{folder}", "m:f"], "it is a directory"),
        (["--html", "{folder}/no/page.html", "m:f"], "its folder does not exist"),
    ],
)
def test_usage(args: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Usage errors are reported at once, before anything runs."""
    assert main(["compare", *(arg.format(folder=tmp_path) for arg in args)]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Hint: " in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("seconds", ["0", "-1", "soon", "nan"])
def test_timeouts_that_are_none(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        main(["compare", "--timeout", seconds, "m:f"])
    assert ending.value.code == 2
    assert "--timeout" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_without_the_report_extra(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == package else object())
    assert main(["compare", "--html", "page.html", "m:f"]) == 2
    error = capsys.readouterr().err
    assert f"the HTML page needs {package}, which is not installed." in error
    assert "Hint: install the extra: pip install -e '.[report]'" in error


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["compare", "--help"])
    assert "torchq-compat compare --html report.html mymodels.cases:tagger" in capsys.readouterr().out


def test_the_tool_starts_without_torch_and_matplotlib() -> None:
    code = "import sys; from torchq_compat import cli; print({'torch', 'matplotlib'} & set(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    assert result.stdout == "set()\n"


def test_only_one_module_calls_the_fx_engine() -> None:
    """The library never calls it; ``compare`` has to, and imports that module only then."""
    engine = ("torch.ao.quantization.quantize_fx", "torch.ao.quantization.fx.prepare")
    sources = {path.name: path.read_text() for path in (ROOT / "torchq_compat").rglob("*.py")}
    importing = {
        name
        for name, source in sources.items()
        for line in source.splitlines()
        if line.lstrip().startswith(("import ", "from ")) and any(module in line for module in engine)
    }
    assert importing == set()
    # support.torch_ao imports it for its callers.
    assert {name for name, source in sources.items() if "fx_engine()" in source} == {
        "torch_ao.py",
        "fx_side.py",
    }
    code = (
        "import sys; from torchq_compat.comparison import causes, collect;"
        "import torchq_compat.comparison.collect;"
        "print('torchq_compat.comparison.fx_side' in sys.modules)"
    )
    assert warm_python("-c", code).stdout == "False\n"


def test_the_model_may_be_on_any_module_path() -> None:
    """Names with digits, as in nn.Sequential, are also places."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 4), nn.ReLU())).eval()
    data = [torch.randn(4, 8)]
    comparison = tc.compare(model, get_default_qconfig_mapping("x86"), (data[0],), data)
    assert [point.name for point in comparison.capture.points] == ["0", "1.0"]
