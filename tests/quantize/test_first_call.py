"""Example inputs that are missing or do not run, which FX never checks: the first call is used instead."""

from __future__ import annotations

import copy
import pickle
import subprocess
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.quantization.quantize_fx as fx
from torch import Tensor, nn

from tests.helpers.oracle import sqnr
from tests.port.running.test_run_command import RUN, python
from torchq_compat import (
    convert_fx,
    convert_to_reference_fx,
    explain,
    get_default_prepare_custom_config,
    prepare_fx,
    prepare_qat_fx,
)
from torchq_compat.errors import (
    ConfigError,
    InputError,
    ModuleAttributeError,
    QuantizationNote,
    QuantizationWarning,
)
from torchq_compat.model.graph_module import QuantizationGraphModule
from torchq_compat.quantize.first_call import WaitingModel
from torchq_compat.read.example_inputs import take_by_position
from torchq_compat.support.torch_ao import (
    QConfigMapping,
    default_dynamic_qconfig,
    get_default_qat_qconfig_mapping,
    get_default_qconfig_mapping,
)

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
    with pytest.warns(QuantizationWarning, match=r"FX does not look at them.*Give a calibration batch"):
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
    waiting = waits(lambda: prepare_fx(model, mapping, examples))
    converted = convert_fx(waiting)
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
    waiting = waits(lambda: prepare_fx(model, STATIC, (torch.randn(5, 6), torch.randn(5, 4))))
    usual = prepare_fx(model, STATIC, batches[0])
    with context():
        for x, y in batches:
            torch.testing.assert_close(waiting(x, y=y), usual(x, y))
    # It is no longer a stand-in: copies, states and reports are those of a prepared model.
    assert isinstance(waiting, QuantizationGraphModule)
    assert waiting.state_dict().keys() == usual.state_dict().keys()
    ours, theirs = convert_fx(copy.deepcopy(waiting)), convert_fx(usual)
    assert torch.equal(ours(*batches[0]), theirs(*batches[0]))
    assert not torch.equal(ours(*batches[0]), model(*batches[0]))


def test_a_copy_waits_for_a_call_of_its_own() -> None:
    waiting = waits(lambda: prepare_fx(TwoInputs().eval(), STATIC, (torch.randn(1),)))
    copied = copy.deepcopy(waiting)
    waiting(torch.randn(2, 4), torch.randn(2, 6))
    assert isinstance(copied, WaitingModel)
    copied.eval()(torch.randn(2, 4), torch.randn(2, 6))
    assert isinstance(copied, QuantizationGraphModule)


def test_a_hook_of_the_script_stays() -> None:
    waiting = waits(lambda: prepare_fx(TwoInputs().eval(), STATIC, (torch.randn(1),)))
    seen = []
    waiting.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    for _ in range(2):
        waiting(torch.randn(2, 4), torch.randn(2, 6))
    assert seen == [(2, 8)] * 2


MISSING = [None, {}, "x", 3, QConfigMapping(), {"y": 1}, (torch.randn(1),)]


@pytest.mark.parametrize("examples", [*MISSING, "omitted"], ids=str)
def test_missing_and_unfit_examples_wait(examples: Any) -> None:
    model, batch = TwoInputs().eval(), (torch.randn(5, 4), torch.randn(5, 6))
    given = () if examples == "omitted" else (examples,)
    waiting = waits(lambda: prepare_fx(model, STATIC, *given))
    assert list(waiting.state_dict()) == list(model.state_dict())
    assert [path for path, _ in waiting.named_modules()] == [path for path, _ in model.named_modules()]
    assert not hasattr(waiting, "graph")
    with pytest.raises(
        ModuleAttributeError, match=r"has no graph yet: .*example_inputs.*\nHint: call it once"
    ):
        _ = waiting.graph
    usual = prepare_fx(model, STATIC, batch)
    assert torch.equal(waiting(*batch), usual(*batch))
    assert torch.equal(convert_fx(waiting)(*batch), convert_fx(usual)(*batch))
    assert waiting.graph


def test_a_custom_config_in_the_third_place_is_the_one_of_old_scripts() -> None:
    model = TwoInputs().eval()
    model.named = "kept"  # type: ignore[assignment]
    waiting = waits(lambda: prepare_fx(model, STATIC, {"preserved_attributes": ["named"]}))
    waiting(torch.randn(5, 4), torch.randn(5, 6))
    assert waiting.named == "kept"


def test_other_mistakes_are_errors_at_once() -> None:
    model = TwoInputs().eval()
    with pytest.raises(ConfigError, match="must be a QConfigMapping"):
        prepare_fx(model, "x86", None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"must be an nn\.Module"):
        prepare_fx("model", STATIC, None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="unknown key"):
        prepare_fx(model, STATIC, None, {"no_key": 1})


def test_it_can_be_pickled_and_loads_states() -> None:
    batch = (torch.randn(5, 4), torch.randn(5, 6))
    other = TwoInputs().eval()
    usual = prepare_fx(other, STATIC, batch)
    usual(*batch)
    expected = convert_fx(usual)
    # A float state is loaded at once, any other at the first call.
    for state in (other.state_dict(), usual.state_dict()):
        waiting = waits(lambda: prepare_fx(TwoInputs().eval(), STATIC, None))
        assert not waiting.load_state_dict(state).missing_keys
        loaded = pickle.loads(pickle.dumps(waiting))
        assert isinstance(loaded, WaitingModel)
        for each in (loaded, copy.deepcopy(waiting), waiting):
            each(*batch)
            assert torch.equal(convert_fx(each)(*batch), expected(*batch))
    waiting = waits(lambda: prepare_fx(TwoInputs().eval(), STATIC, None))
    with pytest.warns(QuantizationNote, match="was not called"):
        converted = convert_fx(waiting)
    with pytest.raises(InputError, match="state_dict: example_inputs is missing"):
        converted.state_dict()
    converted.load_state_dict(expected.state_dict())
    converted = pickle.loads(pickle.dumps(converted))
    with pytest.warns(QuantizationWarning, match="seen no data"):
        assert torch.equal(converted(*batch), expected(*batch))


def test_hooks_at_modules_are_called_and_removed() -> None:
    waiting, batch = waits(lambda: prepare_fx(Digits().eval(), STATIC, None)), torch.randint(0, 10, (3, 5))
    seen: list[Any] = []
    handle = waiting.hidden.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    copied = copy.deepcopy(waiting)
    for model in (waiting, waiting, copied):
        model(batch)
    assert seen == [(3, 16)] * 3
    handle.remove()
    waiting(batch)
    assert seen == [(3, 16)] * 3


def test_a_hook_where_nothing_is_captured_is_told() -> None:
    model = nn.Sequential(OrderedDict(inner=nn.Sequential(nn.Linear(4, 4)), relu=nn.ReLU())).eval()
    waiting = waits(lambda: prepare_fx(model, STATIC, None))
    waiting.inner.register_forward_hook(lambda module, args, out: None)
    with pytest.warns(QuantizationWarning, match=r"a hook at 'inner', set before .*, is not called"):
        waiting(torch.randn(2, 4))


@pytest.mark.parametrize("use", [torch.jit.script, lambda m: torch.jit.trace(m, torch.zeros(2, 5).long())])
def test_what_only_a_captured_model_has_is_refused(use: Callable[[Any], Any]) -> None:
    waiting = waits(lambda: prepare_fx(Digits().eval(), STATIC, (torch.randn(1, 5),)))
    with pytest.raises(InputError, match=r"Digits.forward does not run on the example_inputs"):
        use(waiting)
    with pytest.raises(InputError, match=r"explain: Digits.forward does not run"):
        explain(waiting)


@pytest.mark.parametrize("training", [True, False])
def test_training_is_that_of_a_model_with_examples(training: bool) -> None:
    torch.manual_seed(0)
    mapping, batch = get_default_qat_qconfig_mapping("x86"), torch.randn(8, 3, 8, 8)
    float_model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(144, 2)
    ).train(training)
    losses = []
    for prepared in (
        waits(lambda: prepare_qat_fx(float_model, mapping, None)),
        prepare_qat_fx(float_model, mapping, (batch,)),
    ):
        assert prepared.training is training
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(prepared.parameters(), lr=0.1, momentum=0.9)
        for step in range(4):
            if step == 2:
                prepared.train()
            optimizer.zero_grad()
            loss = prepared(batch).square().sum()
            loss.backward()
            optimizer.step()
        losses.append((loss.item(), convert_fx(prepared.eval())(batch).sum().item()))
    assert losses[0] == losses[1]


def test_parameters_that_a_mapped_module_makes_anew_are_told() -> None:
    waiting = waits(
        lambda: prepare_qat_fx(
            nn.Sequential(nn.LSTM(4, 4)),
            get_default_qat_qconfig_mapping("x86"),
            None,
            get_default_prepare_custom_config(),
        )
    )
    torch.optim.SGD(waiting.parameters(), lr=0.1)
    with pytest.warns(QuantizationWarning, match=r"no parameters by the names 0\.weight_ih_l0, .* and more"):
        waiting(torch.randn(5, 2, 4))


def test_a_call_that_does_not_fit_either_is_an_error_and_it_waits_on() -> None:
    waiting = waits(lambda: prepare_fx(TwoInputs().eval(), STATIC, (torch.randn(1),)))
    with pytest.raises(InputError, match="mat1 and mat2"):
        waiting(torch.randn(2, 6), torch.randn(2, 4))
    waiting(torch.randn(2, 4), torch.randn(2, 6))
    assert isinstance(waiting, QuantizationGraphModule)


@pytest.mark.parametrize("convert", [convert_fx, convert_to_reference_fx])
def test_conversion_before_any_call_is_fxs(convert: Callable[..., Any]) -> None:
    model, batch = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval(), torch.randn(5, 4) * 3
    waiting = waits(lambda: prepare_fx(model, STATIC, None))
    with pytest.warns(QuantizationNote, match=r"was not called since .* scale 1 and zero point 0"):
        converted = convert(graph_module=waiting)
    with pytest.warns(QuantizationWarning, match="seen no data"):
        ours = converted(batch)
    assert isinstance(converted, QuantizationGraphModule)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = fx.convert_fx(fx.prepare_fx(copy.deepcopy(model), STATIC, None))(batch)
    assert (ours - theirs).abs().max() <= 1
    assert float(ours.frac().abs().max()) == 0
    assert isinstance(waiting, WaitingModel)


def test_arguments_that_are_keywords_only(subtests: pytest.Subtests) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor, *, scale: Tensor, shift: Tensor | None = None) -> Tensor:
            return self.fc(x) * scale if shift is None else self.fc(x) * scale + shift

    torch.manual_seed(0)
    model = Scaled().eval()
    x, scale, shift = torch.randn(8, 4), torch.randn(1), torch.randn(4)
    keywords = {"scale": scale, "shift": shift}
    oracle = fx.prepare_fx(model, STATIC, (x,))
    oracle(x, **keywords)
    expected = fx.convert_fx(oracle)(x, **keywords)
    for form, example in {
        "named": {"x": x, **keywords},
        "first call": (x,),
        "all": (x, scale, shift),
    }.items():
        with subtests.test(form), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            prepared = prepare_fx(model, STATIC, example)
            prepared(x, **keywords)
            torch.testing.assert_close(convert_fx(prepared)(x, **keywords), expected)
    assert type(model) is Scaled


def test_a_required_keyword_behind_a_default(subtests: pytest.Subtests) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor, shift: Tensor | None = None, *, other: int = 2, scale: Tensor) -> Tensor:
            y = self.fc(x) * scale * other
            return y if shift is None else y + shift

    torch.manual_seed(0)
    model, x, scale = Scaled().eval(), torch.randn(8, 4), torch.randn(1)
    with pytest.raises(SyntaxError):
        fx.prepare_fx(model, STATIC, (x,))
    for example in {"x": x, "scale": scale}, (x, None, 2, scale), (x,):
        with subtests.test(len(example)), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            prepared = prepare_fx(model, STATIC, example)
            with pytest.raises(InputError, match="'scale'"):
                prepared(x)
            prepared(x, scale=scale)
            converted = convert_fx(prepared)
            assert 25 < sqnr(model(x, scale=scale), converted(x, scale=scale)) < 60
            assert torch.equal(converted(x, None, other=2, scale=scale), converted(x, scale=scale))
            with pytest.raises(InputError, match="'shift'"):
                converted(x, torch.ones(4), scale=scale)


def test_arguments_left_at_their_defaults_between_others() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor, state: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
            assert mask is not None
            return self.fc(x) * mask if state is None else self.fc(x) * mask + state

    x, mask = torch.randn(8, 4), torch.ones(4)
    prepared = prepare_fx(Masked().eval(), STATIC, (x, None, mask))
    prepared(x, mask=mask)
    converted = convert_fx(prepared)
    assert torch.equal(converted(x, mask=mask), converted(x, None, mask))
    with pytest.raises(InputError, match="missing argument 'mask'"):
        converted(x)


def test_keywords_beside_those_that_are_only_such() -> None:
    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor, *, scale: Tensor, **others: Any) -> Tensor:
            return (self.fc(x) * scale) if not others else self.fc(x)

    model, x, scale = Summed().eval(), torch.randn(8, 4), torch.full((4,), 2.0)
    copied = copy.deepcopy(model)
    take_by_position(copied)
    assert torch.equal(copied(x, scale), model(x, scale=scale))
    assert torch.equal(copied(x, scale=scale, more=1), model(x, scale=scale, more=1))
    with pytest.raises(TypeError, match="positional"):
        copied(x, scale, x)


def test_a_misspelled_keyword_of_the_first_call_is_refused() -> None:
    with pytest.warns(QuantizationWarning):
        prepared = prepare_fx(nn.Sequential(nn.Linear(4, 4)).eval(), STATIC, None)
    with pytest.raises(InputError, match="Hint"):
        prepared(inputs=torch.randn(8, 4))


def test_a_scripted_model_is_refused() -> None:
    x = torch.randn(8, 4)
    with pytest.warns(QuantizationWarning, match="no signature found"):
        prepared = prepare_fx(torch.jit.script(nn.Linear(4, 4).eval()), STATIC, (x,))
    with pytest.raises(InputError, match="Hint"):
        prepared(x)


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
