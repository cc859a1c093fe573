"""The script of the PyTorch issue on operators with several outputs (RNN, LSTM) and the blocks of the
tutorial on Quantizers: as ``rewrite`` makes them run on torch 2.13, and with their quantizers in prepare_fx.
"""

from __future__ import annotations

import importlib.util
import operator
import re
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.passes.utils.source_matcher_utils import get_source_partitions
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e

import torchq_compat as tc
from tests.helpers.oracle import by_us, leaves, sqnr
from tests.helpers.quantizers import ByHand, prepared_by_torchao
from tests.helpers.warm_python import warm_python
from torchq_compat.annotate.observed_graph import observer_nodes

ATEN, OPS = torch.ops.aten, torch.ops.quantized_decomposed
QUANTIZE, DEQUANTIZE = OPS.quantize_per_tensor.default, OPS.dequantize_per_tensor.default
REWRITTEN = Path(__file__).parents[1] / "port" / "golden" / "pt2e_sources" / "expected"


@cache
def rewritten(name: str) -> Any:
    """Import the script ``name`` as ``torchq-compat rewrite --write`` leaves it; ``test_golden`` writes that
    file."""
    spec = importlib.util.spec_from_file_location(name, REWRITTEN / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- the issue


def check_the_print(printed: str) -> None:
    """Assert that the script of the issue ``printed`` a graph with q-dq behind all three outputs."""
    calls = re.findall(r"= torch\.ops\.quantized_decomposed\.(\w+)_per_tensor\.default\((\w+)", printed)
    quantized = [value for name, value in calls if name == "quantize"]
    assert quantized == ["unsqueeze", "zeros", "zeros_1", "getitem", "getitem_1", "getitem_2"]
    assert len(calls) - len(quantized) == 10


@pytest.mark.executorch
def test_the_script_of_the_issue_as_rewritten(capsys: pytest.CaptureFixture[str]) -> None:
    rewritten("issue").test_lstm_model()
    check_the_print(capsys.readouterr().out)


@pytest.mark.executorch
@pytest.mark.slow
def test_the_script_of_the_issue_under_run(tmp_path: Path) -> None:
    source = (REWRITTEN.parent / "input" / "issue.py").read_text()
    (tmp_path / "issue.py").write_text(source + "\n\ntest_lstm_model()\n")
    ran = warm_python("-m", "torchq_compat", "run", "issue.py", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    check_the_print(ran.stdout)


def checked(quantizer: Any) -> Any:
    """Return ``quantizer`` with the one line that a plain ``prepare_pt2e`` needs."""
    quantizer.validate = tc.check_annotations
    return quantizer


def by_torchao(model: nn.Module, quantizer: Any, batches: list[Any]) -> Any:
    prepared = prepared_by_torchao(model, checked(quantizer), batches, strict=True)
    return len(list(observer_nodes(prepared))), convert_pt2e(prepared)


def by_prepare_fx(model: nn.Module, quantizer: Any, batches: list[Any]) -> Any:
    prepared, converted = by_us(model, quantizer, batches)
    return len(list(observer_nodes(prepared))), converted


@pytest.mark.executorch
@pytest.mark.parametrize("flow", [pytest.param(by_torchao, marks=pytest.mark.slow), by_prepare_fx])
def test_the_quantizer_of_the_issue(flow: Any) -> None:
    torch.manual_seed(0)
    model = nn.LSTM(64, hidden_size=16, bidirectional=False, bias=True, num_layers=1).eval()
    x = torch.randn(1, 64)

    observers, m = flow(model, rewritten("issue").CustomComposableQuantizer(), [(x,), (x,)])

    assert observers == 3 + 2 + 2 + 3  # inputs, weights, biases, outputs
    targets = [node.target for node in m.graph.nodes]
    assert targets.count(QUANTIZE) == 3 + 3  # weights and biases are folded
    assert targets.count(DEQUANTIZE) == 3 + 2 + 2 + 3
    assert targets.count(operator.getitem) == 3
    (lstm,) = [node for node in m.graph.nodes if node.target is ATEN.lstm.input]
    for getitem in lstm.users:
        assert [user.target for user in getitem.users] == [QUANTIZE]
    for expected, result in zip(leaves(model(x)), leaves(m(x)), strict=True):
        assert 25 < sqnr(expected, result) < 60


# -- the tutorial


class Block(nn.Module):
    """Additions in the six spellings that a ResNet-like block may have."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.bn1, self.bn2 = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.relu, self.gate = nn.ReLU(), nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        out = self.relu(out) + x
        out = torch.add(out, identity)
        out = out.add(x)
        out = 1 + out
        return self.gate(out) + x


def by_its_own_flow(model: nn.Module, batches: list[Any]) -> tuple[Any, Any]:
    return rewritten("tutorial").quantize(model, batches)


def by_ours(model: nn.Module, batches: list[Any]) -> tuple[Any, Any]:
    quantizer = rewritten("tutorial").BackendQuantizer()
    return quantizer, by_us(model, quantizer, batches)[1]


@pytest.mark.parametrize(("flow", "additions"), [(by_its_own_flow, 4), (by_ours, 6)])
def test_the_backend_quantizer_of_the_tutorial(flow: Any, additions: int) -> None:
    """In a graph of torch.export ``+=`` and ``x.add(y)`` have sources that the tutorial does not match."""
    torch.manual_seed(0)
    model = Block().eval()
    batches = [(torch.randn(2, 4, 8, 8),) for _ in range(3)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*add_.* stay float.*\[TQ423\]")
        quantizer, converted = flow(model, batches)
    assert quantizer.additions == additions
    found = [n for n in converted.graph.nodes if n.target is ATEN.add.Tensor]
    for node in found if flow is by_ours else ():
        inputs = [each for each in node.args if isinstance(each, fx.Node)]
        assert {each.target for each in inputs} == {DEQUANTIZE}
        assert len({each.args[1:] for each in inputs}) == 1  # the second input shares with the first
        assert [user.target for user in node.users] == [QUANTIZE]
    (sigmoid,) = [n for n in converted.graph.nodes if n.target is ATEN.sigmoid.default]
    assert sigmoid.args[0].args[1:3] == (1 / 256, 0)
    for node in [n for n in converted.graph.nodes if n.target is ATEN.conv2d.default]:
        x, weight, bias = node.args[:3]
        assert (weight.args[5], bias.args[5]) == (torch.int8, torch.int32)
        assert bias.args[1] == pytest.approx(x.args[1] * weight.args[1], rel=1e-6)
    assert 10 < sqnr(model(*batches[0]), converted(*batches[0])) < 50
    if flow is by_ours:
        labels = {decision.kind: decision.action for decision in tc.explain(converted)}
        assert labels["add.Tensor"] == labels["Conv2d"] == labels["Sigmoid"] == "quantized"


def test_partitions_of_modules_are_found_as_before() -> None:
    found: dict[Any, int] = {}

    def look(node: fx.Node) -> None:
        wanted = [nn.Conv2d, nn.ReLU, nn.Sigmoid]
        found.update({key: len(each) for key, each in get_source_partitions(node.graph, wanted).items()})

    tc.prepare_fx(Block().eval(), ByHand(look), (torch.randn(2, 4, 8, 8),))
    assert found == {nn.Conv2d: 2, nn.ReLU: 2, nn.Sigmoid: 1}  # as called, like in a strict export


def test_additions_of_a_class_inside_a_function_are_found() -> None:
    """The class cannot be found by its qualified name."""

    class Local(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x = x + y
            x += 1
            return torch.add(x, y)

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Local()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.inner(x, y)

    found: list[int] = []

    def look(node: fx.Node) -> None:
        partitions = get_source_partitions(node.graph, [operator.add, torch.add])
        found.append(sum(len(each) for each in partitions.values()))

    tc.prepare_fx(Around().eval(), ByHand(look), (torch.randn(2, 3), torch.randn(2, 3)))
    assert set(found) == {3}


def test_additions_are_found_in_graphs_of_a_mapping() -> None:
    mapping = torch.ao.quantization.get_default_qconfig_mapping("x86")
    prepared = tc.prepare_fx(Block().eval(), mapping, (torch.randn(2, 4, 8, 8),))
    partitions = get_source_partitions(prepared.graph, [operator.add, torch.add])
    assert sum(len(each) for each in partitions.values()) == 6
