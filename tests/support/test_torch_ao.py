"""Only one module imports torch.ao.quantization and torch.ao.nn; the rest works without an FX engine."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.helpers.hidden_engine import environment_without_engine
from tests.helpers.oracle import sqnr
from tests.helpers.package_trees import PACKAGE, package_nodes, spelled
from tests.helpers.warm_python import Ran, warm_python
from tests.port.running.test_script_pairs import LEGACY, NAMES, OUTPUTS, SCORES, outputs, run
from torchq_compat.support import torch_ao

DOOR = "support/torch_ao.py"
NAMESPACES = (
    "torch.ao",
    "torch.quantization",
    "torch.nn.quantized",
    "torch.nn.quantizable",
    "torch.nn.intrinsic",
    "torch.nn.qat",
)
#: The scripts of the default run: stand-ins for quantize_fx and the LSTM functions, QAT.
QUICK = ("learnable_qat.py", "lstm_16bit_parts.py")
LIBRARY = """\
import sys
import torch
from torch import nn
from torch.ao.quantization import get_default_qconfig_mapping
from torchq_compat import compare, convert_fx, errors, fuse_fx, prepare_fx

torch.manual_seed(0)
model = nn.Sequential(nn.Conv1d(4, 4, 1), nn.ReLU()).eval()
batch = (torch.randn(2, 4, 8),)
mapping = get_default_qconfig_mapping("x86")
prepared = prepare_fx(model, mapping, batch)
prepared(*batch)
quantized = convert_fx(prepared)
print("float", *model(*batch).flatten().tolist())
print("quantized", *quantized(*batch).flatten().tolist())
print(type(fuse_fx(model).get_submodule('0')).__name__)
found = compare(model, mapping, batch, calibration_data=[batch])
print(found.capture.fx.error)
try:
    compare(model, mapping, batch, calibration_data=[batch], fx=True)
except errors.ScriptError as error:
    print(error.message)
print([name for name in sys.modules if "quantize_fx" in name and name.startswith("torch.")])
"""
#: Functions whose first argument names a module.
IMPORTS = ("import_module", "__import__", "find_spec")


def text_of(argument: ast.AST) -> str:
    """The text of a string or of the beginning of an f-string; of a name nothing."""
    first = argument.values[0] if isinstance(argument, ast.JoinedStr) and argument.values else argument
    return str(first.value) if isinstance(first, ast.Constant) else ""


def names_of_torch_ao(nodes: Iterable[ast.AST]) -> list[str]:
    found = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            found.append(spelled(node))
        elif isinstance(node, ast.Call) and node.args and spelled(node.func).endswith(IMPORTS):
            found.append(text_of(node.args[0]))
    return [name for name in found if f"{name}.".startswith(tuple(f"{space}." for space in NAMESPACES))]


def test_one_module_imports_torch_ao() -> None:
    found = {
        path.relative_to(PACKAGE).as_posix(): names
        for path, nodes in package_nodes().items()
        if (names := names_of_torch_ao(nodes))
    }
    assert list(found) == [DOOR]
    assert len(found[DOOR]) > 30


@pytest.mark.parametrize(
    "code",
    [
        "import torch.ao.quantization as q",
        "from torch.ao import quantization",
        "from torch.quantization import QConfig",
        "import torch\nkind = torch.ao.nn.quantizable.LSTM",
        "import torch.nn.qat",
        "import importlib\nimportlib.import_module('torch.ao.nn')",
        "importlib.import_module(f'torch.ao.quantization.{name}')",
    ],
)
def test_other_imports_are_found(code: str) -> None:
    assert names_of_torch_ao(ast.walk(ast.parse(code)))


def test_names_of_the_engine_are_its_own() -> None:
    assert torch_ao.QuantizationTracer.__module__ == "torch.ao.quantization.fx.tracer"
    assert torch_ao.QuantizedGraphModule.__module__ == "torch.ao.quantization.fx.graph_module"
    assert torch_ao.fx_engine().prepare_fx.__module__ == torch_ao.FX_ENGINE


def test_what_the_engine_lacks_matches_nothing() -> None:
    absent = torch_ao._of_engine("there_is_none", "QuantizationTracer")
    assert not isinstance(torch.fx.Tracer(), absent)


Python = Callable[..., Ran]


@pytest.fixture(scope="module")
def without_engine(tmp_path_factory: pytest.TempPathFactory) -> Python:
    env = environment_without_engine(tmp_path_factory.mktemp("without_engine"))

    def python(*args: object) -> Ran:
        result = warm_python(*args, env=env)
        assert result.returncode == 0, result.stderr
        return result

    return python


def numbers(line: str) -> Tensor:
    return torch.tensor([float(value) for value in line.split()[1:]])


def test_library_without_the_engine(without_engine: Python) -> None:
    lines = without_engine("-c", LIBRARY).stdout.splitlines()
    assert 30 < sqnr(numbers(lines[0]), numbers(lines[1])) < 60
    assert lines[2] == "ConvReLU1d"
    assert "No module named 'torch.ao.quantization.quantize_fx'" in lines[3]
    assert lines[4].startswith("FX cannot run this model: ModuleNotFoundError")
    assert lines[5] == "[]"


@pytest.mark.parametrize("names", [pytest.param(QUICK), pytest.param(NAMES, marks=pytest.mark.slow)])
def test_scripts_run_without_the_engine(names: Sequence[str], without_engine: Python) -> None:
    for name in names:
        command = ("-m", "torchq_compat", "run", LEGACY / name, *SCORES.get(name, ()))
        result = without_engine(*command)
        assert "quantized" in result.stderr  # the summary of ``run``
        if name in SCORES:
            assert result.stdout == run(*command).stdout
        else:
            low, high = OUTPUTS[name].sqnr
            found = outputs(result)
            assert low < sqnr(found["float"], found["quantized"]) < high


@pytest.mark.slow
def test_a_script_that_needs_the_engine_says_what_is_missing(tmp_path: Path, without_engine: Python) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from torch.ao.quantization.quantize_fx import QConfigMapping, prepare_fx, prepare_qat_fx\n"
        "import torch.ao.quantization.quantize_fx as fx\n"
        "print(QConfigMapping.__name__, fx.prepare_fx is prepare_fx)\n"
        "try:\n    fx._swap_ff_with_fxff\nexcept AttributeError as error:\n    print(error)\n"
    )
    lines = without_engine("-m", "torchq_compat", "run", script).stdout.splitlines()
    assert lines[0] == "QConfigMapping True"
    assert "'_swap_ff_with_fxff': torch has removed the module" in lines[1]
