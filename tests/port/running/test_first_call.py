"""Scripts whose example inputs do not run, which FX never checks: ``run`` uses the first call instead."""

from __future__ import annotations

import copy
import pickle
import subprocess
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.quantization.quantize_fx as fx
from torch import Tensor, nn

from tests.port.running.test_run_command import RUN, python
from torchq_compat import convert_fx, convert_to_reference_fx, prepare_fx, prepare_qat_fx
from torchq_compat.errors import InputError, QuantizationWarning
from torchq_compat.model.graph_module import QuantizationGraphModule
from torchq_compat.port.running.first_call import WaitingModel, waiting_for_first_call
from torchq_compat.support.torch_ao import (
    QConfigMapping,
    default_dynamic_qconfig,
    get_default_qat_qconfig_mapping,
    get_default_qconfig_mapping,
)

PREPARE, CONVERT = waiting_for_first_call(prepare_fx), waiting_for_first_call(convert_fx)
PREPARE_QAT = waiting_for_first_call(prepare_qat_fx)
STATIC = get_default_qconfig_mapping("x86")


class Digits(nn.Module):
    """A model that needs five digits; FX does not object to five numbers as its example."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.hidden, self.head = nn.Embedding(10, 8), nn.Linear(40, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.relu(self.hidden(self.embedding(x).flatten(1))))
        return out


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 8), nn.Linear(6, 8)

    def forward(self, x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
        out: Tensor = self.left(x) + self.right(y) * scale
        return out


def waits(make: Callable[[], Any]) -> WaitingModel:
    with pytest.warns(QuantizationWarning, match=r"FX does not look at them.*Give example_inputs that run"):
        waiting = make()
    assert isinstance(waiting, WaitingModel)
    return waiting


@pytest.mark.parametrize(
    "examples",
    [
        pytest.param((0, 7, 9, 2, 2), id="five for one"),
        pytest.param((torch.zeros(1, 3, dtype=torch.long),), id="another size"),
        pytest.param((torch.randn(1, 5),), id="another dtype"),
        pytest.param((torch.zeros(2, 5, dtype=torch.long), torch.zeros(2)), id="with targets"),
    ],
)
def test_a_dynamic_model_that_no_call_calibrates_is_fxs(examples: tuple[Any, ...]) -> None:
    model = Digits().eval()
    mapping = QConfigMapping().set_global(default_dynamic_qconfig)
    waiting = waits(lambda: PREPARE(model, mapping, examples))
    converted = CONVERT(waiting)
    assert isinstance(converted, WaitingModel)
    assert "captured at its first call" in repr(converted)
    x = torch.randint(0, 10, (3, 5))
    expected = fx.convert_fx(fx.prepare_fx(copy.deepcopy(model), mapping, examples))(x)
    torch.testing.assert_close(converted(x), expected)
    assert isinstance(converted, QuantizationGraphModule)
    assert not torch.equal(expected, model(x))
    one = torch.randint(0, 10, (1, 5))
    assert converted(one).shape == (1, 4)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_calibrated_model_is_the_one_that_was_given_examples(context: Callable[[], Any]) -> None:
    model = TwoInputs().eval()
    batches = [(torch.randn(5, 4), torch.randn(5, 6)) for _ in range(3)]
    waiting = waits(lambda: PREPARE(model, STATIC, (torch.randn(5, 6), torch.randn(5, 4))))
    usual = prepare_fx(model, STATIC, batches[0])
    with context():
        for x, y in batches:
            torch.testing.assert_close(waiting(x, y=y), usual(x, y))
    # It is no longer a stand-in: copies, states and reports are those of a prepared model.
    assert isinstance(waiting, QuantizationGraphModule)
    assert waiting.state_dict().keys() == usual.state_dict().keys()
    ours, theirs = CONVERT(copy.deepcopy(waiting)), convert_fx(usual)
    assert torch.equal(ours(*batches[0]), theirs(*batches[0]))
    assert not torch.equal(ours(*batches[0]), model(*batches[0]))


def test_a_copy_waits_for_a_call_of_its_own() -> None:
    waiting = waits(lambda: PREPARE(TwoInputs().eval(), STATIC, (torch.randn(1),)))
    copied = copy.deepcopy(waiting)
    waiting(torch.randn(2, 4), torch.randn(2, 6))
    assert isinstance(copied, WaitingModel)
    copied.eval()(torch.randn(2, 4), torch.randn(2, 6))
    assert isinstance(copied, QuantizationGraphModule)


def test_a_hook_of_the_script_stays() -> None:
    waiting = waits(lambda: PREPARE(TwoInputs().eval(), STATIC, (torch.randn(1),)))
    seen = []
    waiting.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    for _ in range(2):
        waiting(torch.randn(2, 4), torch.randn(2, 6))
    assert seen == [(2, 8)] * 2


@pytest.mark.parametrize(
    ("what", "use"),
    [
        ("state_dict", lambda model: model.state_dict()),
        ("load_state_dict", lambda model: model.load_state_dict({})),
        (
            "pickling|torch.jit.trace",
            lambda model: torch.jit.trace(model, torch.zeros(2, 5, dtype=torch.long)),
        ),
        ("torch.jit.script", torch.jit.script),
        ("pickling", pickle.dumps),
    ],
)
def test_what_only_a_captured_model_has_is_refused(what: str, use: Callable[[Any], Any]) -> None:
    waiting = waits(lambda: PREPARE(Digits().eval(), STATIC, (torch.randn(1, 5),)))
    with pytest.raises(InputError, match=f"({what}): Digits.forward does not run on the example_inputs"):
        use(waiting)


def test_an_optimizer_is_told_before_it_moves_weights_that_nothing_reads() -> None:
    mapping = get_default_qat_qconfig_mapping("x86")
    waiting = waits(lambda: PREPARE_QAT(TwoInputs(), mapping, (torch.randn(1),)))
    with pytest.raises(InputError, match=r"parameters: TwoInputs.forward does not run"):
        torch.optim.SGD(waiting.parameters(), lr=0.1)
    waiting(torch.randn(2, 4), torch.randn(2, 6)).sum().backward()
    assert all(parameter.grad is not None for parameter in waiting.parameters())


def test_the_library_itself_refuses_them() -> None:
    for prepare in (prepare_fx, prepare_qat_fx):
        with pytest.raises(InputError, match=r"Digits.forward does not run"):
            prepare(Digits(), STATIC, (0, 7, 9, 2, 2))


@pytest.mark.parametrize("examples", [None, {}, "x", torch.zeros(2, 5, dtype=torch.long)])
def test_nothing_else_waits(examples: Any) -> None:
    if isinstance(examples, Tensor):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", QuantizationWarning)
            assert isinstance(PREPARE(Digits().eval(), STATIC, examples), QuantizationGraphModule)
        return
    with pytest.raises(InputError) as refused:
        PREPARE(Digits().eval(), STATIC, examples)
    assert refused.value.code != "TQ902"


def test_a_call_that_does_not_fit_either_is_an_error_and_it_waits_on() -> None:
    waiting = waits(lambda: PREPARE(TwoInputs().eval(), STATIC, (torch.randn(1),)))
    with pytest.raises(InputError, match="mat1 and mat2"):
        waiting(torch.randn(2, 6), torch.randn(2, 4))
    waiting(torch.randn(2, 4), torch.randn(2, 6))
    assert isinstance(waiting, QuantizationGraphModule)


def test_conversion_to_reference_waits_too() -> None:
    waiting = waits(lambda: PREPARE(TwoInputs().eval(), STATIC, (torch.randn(1),)))
    converted = waiting_for_first_call(convert_to_reference_fx)(graph_module=waiting)
    with pytest.warns(QuantizationWarning, match="seen no data"):
        converted(torch.randn(2, 4), torch.randn(2, 6))
    assert isinstance(converted, QuantizationGraphModule)


@pytest.mark.slow
def test_a_script_runs_as_it_does_on_fx(tmp_path: Any) -> None:
    path = tmp_path / "legacy.py"
    path.write_text(
        "import torch\n"
        "from torch.ao.quantization import QConfigMapping, default_dynamic_qconfig\n"
        "from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx\n"
        "torch.manual_seed(0)\n"
        "from torch import nn\n"
        "model = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(20, 3)).eval()\n"
        "mapping = QConfigMapping().set_global(default_dynamic_qconfig)\n"
        "prepared = prepare_fx(model, mapping, (0, 7, 9, 2, 2))\n"
        "quantized = convert_fx(prepared)\n"
        "print(quantized(torch.tensor([[0, 7, 9, 2, 2]])).tolist())\n"
    )
    results: list[subprocess.CompletedProcess[str]] = [python(path), python(*RUN, path)]
    assert results[0].stdout == results[1].stdout != ""
    assert results[1].stderr.count("legacy.py:8: QuantizationWarning: Sequential.forward does not run") == 1
    assert "Sequential, converted: 1 quantized (1 Linear)" in results[1].stderr
