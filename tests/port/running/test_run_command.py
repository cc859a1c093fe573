"""``torchq-compat run``: the script runs as itself, its FX names are ours, the summary is on standard error.

``python SCRIPT`` is the oracle for everything that a script can see of how it was started. What it sees,
which signals reach it and what standard error shows is that of a command started as a person does.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import torchq_compat
from tests.helpers.warm_python import ENVIRONMENT, Ran, warm_python
from torchq_compat.cli import main
from torchq_compat.port.names import MOVED_FUNCTIONS
from torchq_compat.port.running.recorder import MAX_LINES, Recorder

ROOT = Path(torchq_compat.__file__).parents[1]
CHAR_LM = ROOT / "migration" / "legacy" / "char_lm.py"
RUN = ("-m", "torchq_compat", "run")

MODEL = """
import warnings

import torch
from torch import nn
from torch.ao.quantization import get_default_qconfig_mapping
from torch.ao.quantization.fx.custom_config import PrepareCustomConfig
from torch.ao.quantization.quantize_fx import convert_fx, fuse_fx, prepare_fx

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.gru, self.head = nn.LSTM(4, 4), nn.GRU(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.gru(self.lstm(x)[0])[0])

mapping = get_default_qconfig_mapping("x86")
config = PrepareCustomConfig().set_float_to_observed_mapping(nn.LSTM, torch.ao.nn.quantizable.LSTM)
x = torch.randn(3, 2, 4)
"""

Script = Callable[[str], Path]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    def write(source: str) -> Path:
        path = tmp_path / "legacy.py"
        path.write_text(textwrap.dedent(source))
        return path

    return write


def python(*args: object) -> Ran:
    return subprocess.run(
        [sys.executable, *map(str, args)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_every_import_style_is_redirected(script: Script) -> None:
    path = script(
        """
        import importlib
        import torch
        import torch.ao.quantization.quantize_fx
        import torch.ao.quantization.quantize_fx as aliased
        import torch.quantization.quantize_fx as old
        from torch.ao.quantization import quantize_fx as from_package
        from torch.ao.quantization.fx import custom_config, lstm_utils
        from torch.ao.quantization.quantize_fx import *
        from torch.ao.quantization.quantize_fx import prepare_fx as prepare
        from torch.quantization.quantize_fx import convert_fx as old_convert
        from torchq_compat import custom_config as ours

        def local():
            from torch.ao.quantization.quantize_fx import prepare_qat_fx
            return prepare_qat_fx

        late = importlib.import_module("torch.ao.quantization.quantize_fx")
        names = ["prepare_fx", "prepare_qat_fx", "convert_fx", "convert_to_reference_fx", "fuse_fx"]
        modules = [aliased, from_package, late, torch.ao.quantization.quantize_fx]
        functions = [getattr(module, name) for module in modules for name in names]
        functions += [getattr(old, name) for name in names if name != "convert_to_reference_fx"]
        functions += [globals()[name] for name in names]
        functions += [prepare, old_convert, local(), lstm_utils.prepare_fx]
        functions += [lstm_utils._get_lstm_with_individually_observed_parts]
        functions += [getattr(lstm_utils, "_get_reference_quantized_lstm_module")]
        print(len(functions), sorted({function.__module__ for function in functions}))
        print(custom_config.PrepareCustomConfig is ours.PrepareCustomConfig)
        """
    )
    result = warm_python(*RUN, path)
    assert result.stdout == "35 ['torchq_compat.lstm_utils', 'torchq_compat.quantize_fx']\nTrue\n"
    assert (
        result.stderr
        == "torchq-compat: legacy.py prepared no model with FX graph mode or eager mode quantization.\n"
    )
    assert result.returncode == 0


@pytest.mark.slow
def test_batch_norm_switches_work_module_by_module(script: Script) -> None:
    """Without ``run`` only ``model.apply`` handles these; a loop over the modules would have no effect."""
    path = script(
        """
        import torch
        from torch import nn
        from torch.ao.quantization import get_default_qat_qconfig_mapping
        from torch.ao.quantization.quantize_fx import prepare_qat_fx
        from torch.nn.intrinsic.qat import freeze_bn_stats, update_bn_stats

        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).train()
        x = torch.randn(2, 3, 8, 8)
        prepared = prepare_qat_fx(model, get_default_qat_qconfig_mapping("x86"), (x,))
        for switch in (freeze_bn_stats, update_bn_stats):
            for module in prepared.modules():
                switch(module)
            before = prepared.state_dict()["1.running_mean"].clone()
            prepared(x)
            print(torch.equal(before, prepared.state_dict()["1.running_mean"]))
            prepared.apply(switch)
            before = prepared.state_dict()["1.running_mean"].clone()
            prepared(x)
            print(torch.equal(before, prepared.state_dict()["1.running_mean"]))
        """
    )
    assert python(*RUN, path).stdout == "True\nTrue\nFalse\nFalse\n"


def test_the_table_names_functions_on_both_sides() -> None:
    for moved in MOVED_FUNCTIONS:
        assert moved.legacy.startswith("torch.")
        assert moved.replacement.startswith("torchq_compat.")
        assert moved.names


LOOKS_AROUND = """\
'''The docstring.'''
import atexit, inspect, os, pickle, signal, sys, time
import beside

class Local:
    pass

@atexit.register
def at_exit():
    print("exit", sys.modules["__main__"].Local.__module__)

def on_signal(signum, frame):
    print("cleaned up", signum, flush=True)
    sys.exit(3)

print(sys.argv, sys.path[0], os.getcwd(), beside.VALUE)
print(__name__, __doc__, __file__, __spec__, __package__, __loader__.name, __loader__.path)
print(sorted(name for name in globals() if name not in ("__annotations__", "__cached__")))
print(sys.stdin.read(), type(pickle.loads(pickle.dumps(Local()))).__name__)
print(inspect.getsource(at_exit), os.environ.get("PYTHONSTARTUP"), sys.flags.optimize)
signal.signal(signal.SIGINT, on_signal)
signal.signal(signal.SIGTERM, on_signal)
beside.quantize()
print("ready", flush=True)
time.sleep(60)
"""
#: The module beside that script; Python itself runs one that only prints the same.
QUANTIZES = f"""
{MODEL}
VALUE = 5

def quantize():
    prepared = prepare_fx(fuse_fx(Model().eval()), mapping, (x,), config)
    prepared(x)
    print(tuple(convert_fx(prepared)(x).shape))
    warnings.warn("of the script")
"""
PRINTS = "VALUE = 5\ndef quantize():\n    print((3, 2, 2))\n"


@functools.cache
def by_python_and_by_run(signum: signal.Signals) -> tuple[Ran, Ran]:
    """Return what ``LOOKS_AROUND`` does, with a line typed and a signal in the end, in both."""
    args = ["../legacy.py", "--steps", "3", "-h", "--", "-x", ""]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "legacy.py").write_text(LOOKS_AROUND)
        # torch's imports must not come from the folder in which the tool is started.
        Path(folder, "cwd").mkdir()
        Path(folder, "cwd", "typing_extensions.py").write_text("raise ImportError('shadowed')\n")
        results = []
        for command, module in (((), PRINTS), (("-P", *RUN), QUANTIZES)):
            Path(folder, "beside.py").write_text(module)
            results.append(signalled(signum, "-B", *command, *args, cwd=Path(folder, "cwd")))
    expected, by_us = results
    return expected, by_us


def signalled(signum: signal.Signals, *args: str, cwd: Path) -> Ran:
    command, pipe = [sys.executable, *args], subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=cwd, env=ENVIRONMENT
    ) as process:
        assert process.stdin
        assert process.stdout
        process.stdin.write("typed")
        process.stdin.close()
        printed = "".join(itertools.takewhile("ready\n".__ne__, process.stdout))
        process.send_signal(signum)
        printed += process.stdout.read()
        assert process.stderr
        told = process.stderr.read()
    return subprocess.CompletedProcess(command, process.returncode, printed, told)


def test_a_script_sees_what_python_shows_it() -> None:
    expected, by_us = by_python_and_by_run(signal.SIGTERM)
    assert "typed Local" in expected.stdout, expected.stderr
    assert by_us.stdout == expected.stdout


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("sys.exit(7)", 7),
        pytest.param("sys.exit('gone')", 1, marks=pytest.mark.slow),
        pytest.param("raise ValueError('gone')", 1, marks=pytest.mark.slow),
        pytest.param("1 +", 1, marks=pytest.mark.slow),
    ],
)
def test_exit_code_and_traceback_are_the_scripts_own(script: Script, ending: str, code: int) -> None:
    path = script(f"import sys\nprint('started')\n{ending}\n")
    expected, result = python(path), warm_python(*RUN, path)
    assert result.returncode == expected.returncode == code
    assert result.stdout == expected.stdout
    *lines, last = result.stderr.splitlines()
    assert lines == expected.stderr.splitlines()
    assert last.startswith("torchq-compat: legacy.py")


@pytest.mark.parametrize("signum", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_a_signal_reaches_the_script(signum: signal.Signals) -> None:
    expected, by_us = by_python_and_by_run(signum)
    assert by_us.stdout.splitlines()[-2:] == [f"cleaned up {signum.value}", "exit __main__"]
    assert by_us.returncode == expected.returncode == 3
    assert expected.stderr == ""


@pytest.mark.slow
def test_a_signal_while_the_explanation_is_written_leaves_the_old_one(script: Script) -> None:
    path = script(
        """
        import os, time

        def slow(descriptor):
            print("writing", flush=True)
            time.sleep(60)

        os.fsync = slow
        """
    )
    explained = path.with_name("decisions.json")
    explained.write_text("old")
    command = [sys.executable, *RUN, "--explain", str(explained), str(path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        process.terminate()
        assert "Traceback" not in process.communicate(timeout=60)[1]
    assert process.returncode == 128 + signal.SIGTERM
    assert explained.read_text() == "old"
    assert sorted(os.listdir(path.parent)) == ["decisions.json", "legacy.py"]


@pytest.mark.slow
def test_a_script_killed_by_a_signal_exits_as_a_shell_says_it(script: Script) -> None:
    path = script("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    assert python(*RUN, path).returncode == 128 + signal.SIGKILL


def test_summary_and_warnings_on_standard_error() -> None:
    _, result = by_python_and_by_run(signal.SIGTERM)
    assert "(3, 2, 2)\n" in result.stdout
    head, model, *float_lines = result.stderr[result.stderr.index("torchq-compat:") :].splitlines()
    assert head == "torchq-compat: legacy.py on torch.export and torchao (PT2E)"
    assert model == "  Model, converted: 2 quantized (1 LSTM, 1 Linear), 1 float"
    assert len(float_lines) == 1
    assert float_lines[0].startswith("    float: GRU gru: ")
    assert "QuantizationWarning: GRU at 'gru' stays float" in result.stderr
    assert "UserWarning: of the script" in result.stderr
    assert "Failed to load" not in result.stderr
    assert "register_constant" not in result.stderr
    assert "torch.ao.quantization is deprecated" not in result.stderr


def test_an_error_of_ours_in_the_script_is_an_ordinary_traceback(script: Script) -> None:
    result = warm_python(*RUN, script(MODEL + "prepare_fx(Model(), 'x86', None)\n"))
    assert result.returncode == 1
    assert "Traceback (most recent call last):" in result.stderr
    assert "prepare_fx(Model(), 'x86', None)" in result.stderr
    assert re.search(r"^torchq_compat\.errors\.ConfigError: .*\nHint: ", result.stderr, re.MULTILINE)
    assert "port/running/script_process.py" not in result.stderr


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("missing.py", None, "there is no script"),
        ("folder", "", "is a directory"),
        ("notes.txt", "Not a script at all.", "is not a Python script"),
        ("data.bin", "\0\1", "is not a Python script"),
    ],
)
def test_what_is_not_a_script_is_refused_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, content: str | None, problem: str
) -> None:
    path = tmp_path / name
    if name == "folder":
        path.mkdir()
    elif content is not None:
        path.write_text(content)
    assert main(["run", str(path), "--flag"]) == 2
    stdout, stderr = capfd.readouterr()
    assert stdout == ""
    (line,) = stderr.splitlines()
    assert re.match(r"torchq-compat: error: .*" + problem + r".* Hint: \w+", line)
    assert str(path) in line


@pytest.mark.slow
def test_a_script_needs_no_suffix(script: Script, tmp_path: Path) -> None:
    path = script("print('ran')\n").rename(tmp_path / "legacy")
    assert python(*RUN, path).stdout == "ran\n"


def test_the_tool_itself_does_not_wait_for_torch() -> None:
    code = "import sys; from torchq_compat.cli import main; main(['run', 'missing.py'])\n"
    result = python("-c", code + "print('torch' in sys.modules)")
    assert result.stdout == "False\n"


def test_the_package_does_not_redirect_by_itself() -> None:
    from torch.ao.quantization import quantize_fx

    assert quantize_fx.prepare_fx.__module__ == "torch.ao.quantization.quantize_fx"


def prepare_fx(model: nn.Module) -> nn.Module:
    """Replaces the entry point of the same name; ``explain`` sees its result as a float model."""
    return model


def test_summary_joins_what_stayed_float_for_the_same_reason() -> None:
    recorder = Recorder()
    recorder.wrap(prepare_fx)(nn.Sequential(*(nn.Linear(2, 2) for _ in range(5))))
    assert recorder.summary("s.py").splitlines()[1:] == [
        "  Sequential, prepared: 0 quantized, 5 float",
        "    float: Linear 0, 1, 2 and 2 more: the model has not been prepared",
    ]


def test_summary_is_short_whatever_the_model() -> None:
    recorder = Recorder()
    kinds = (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.ELU, nn.CELU, nn.SELU, nn.Mish, nn.ReLU6, nn.Softsign)
    model = nn.Sequential(*(kind() for kind in (*kinds, nn.Sigmoid, nn.Hardtanh, nn.LogSigmoid)))
    recorder.wrap(prepare_fx)(model=model)
    lines = recorder.summary("s.py").splitlines()
    assert len(lines) == MAX_LINES
    assert lines[-1] == "  ... 4 more lines; torchq_compat.explain(model) has them all"


def test_recording_keeps_no_model_alive() -> None:
    destroyed: list[str] = []

    class Model(nn.Linear):
        def __del__(self) -> None:
            destroyed.append(type(self).__name__)

    recorder = Recorder()
    wrapped = recorder.wrap(prepare_fx)
    assert wrapped(Model(2, 2)).weight.dtype is torch.float32
    assert destroyed == ["Model"]
    assert wrapped.__name__ == "prepare_fx"


@pytest.mark.slow
def test_char_lm_gives_the_bits_per_character_of_fx() -> None:
    """The legacy script, unmodified, in a short run; the float model is the same in both runs."""
    args = (CHAR_LM, "--steps", "40", "--hidden", "48", "--eval-chars", "20000", "--seed", "3")
    by_fx, by_us = python(*args), python(*RUN, *args)
    assert by_us.returncode == by_fx.returncode == 0, by_us.stderr
    fx, ours = _results(by_fx.stdout), _results(by_us.stdout)
    assert ours["float"] == fx["float"]
    assert abs(ours["quantized"][0] - fx["quantized"][0]) < 0.01
    assert abs(ours["quantized"][0] - ours["float"][0]) < 0.05
    assert ours["quantized"][1] < ours["float"][1] / 2
    assert "CharLM, converted: 3 quantized" in by_us.stderr


def _results(stdout: str) -> dict[str, tuple[float, int]]:
    found = re.findall(r"^(float|quantized) +([\d.]+) bits/char +(\d+) bytes$", stdout, re.MULTILINE)
    return {name: (float(bits), int(size)) for name, bits, size in found}
