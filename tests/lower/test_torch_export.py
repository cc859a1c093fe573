"""torch.export.export by itself, strict or not, with gradients on: the model's bits, at other sizes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import (
    QConfigMapping,
    default_dynamic_qconfig,
    default_qconfig,
    get_default_qconfig_mapping,
)
from torch.export import Dim
from torch.nn.utils.rnn import pack_padded_sequence

import torchq_compat as tc
from tests.helpers.loop_models import LOOPS
from tests.helpers.once import made_once
from tests.helpers.oracle import calibrate, leaves
from torchq_compat.errors import CustomModuleError, ExportError, InputError, QuantizationWarning

STATIC = get_default_qconfig_mapping("x86")
DYNAMIC = QConfigMapping().set_global(default_dynamic_qconfig)
ROLLED = sorted(name for name, case in LOOPS.items() if case.loops)


class Tagger(nn.Module):
    def __init__(self, make: Callable[..., nn.RNNBase], **settings: Any) -> None:
        super().__init__()
        self.inputs = nn.Linear(6, 6)
        self.rnn = make(6, 8, batch_first=True, **settings)
        self.outputs = nn.Linear(16 if self.rnn.bidirectional else 8, 4)

    def forward(self, x: Tensor) -> Tensor:
        tags: Tensor = self.outputs(self.rnn(self.inputs(x))[0])
        return tags


class Packs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(6, 8)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        last: Tensor = self.rnn(pack_padded_sequence(x, lengths))[1]
        return last


class Greedy(nn.Module):
    """Reads its own output back, for as many steps as ``x`` has."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 6)
        self.cell = nn.GRUCell(6, 8)
        self.scores = nn.Linear(8, 20)

    def forward(self, x: Tensor) -> Tensor:
        state, word, scores = x.new_zeros(x.size(0), 8), torch.zeros(x.size(0), dtype=torch.long), []
        for _ in range(x.size(1)):
            state = self.cell(self.words(word), state)
            scores.append(self.scores(state))
            word = scores[-1].argmax(1)
        return torch.stack(scores, 1)


class Around(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Tensor) -> Any:
        return self.model(*args)


MODELS: dict[str, tuple[Callable[[], nn.Module], QConfigMapping]] = {
    "lstm": (lambda: Tagger(nn.LSTM), STATIC),
    "gru": (lambda: Tagger(nn.GRU), STATIC),
    "relu rnn": (lambda: Tagger(nn.RNN, nonlinearity="relu"), STATIC),
    "bidirectional lstm": (lambda: Tagger(nn.LSTM, bidirectional=True), STATIC),
    "dynamic lstm": (lambda: Tagger(nn.LSTM), DYNAMIC),
    "decoder": (Greedy, STATIC),
    "feed-forward": (lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)), STATIC),
    **{name: (LOOPS[name].model, STATIC) for name in ROLLED},
}


def inputs_of(name: str, steps: int, batch: int) -> tuple[Tensor, ...]:
    if name in LOOPS:
        return LOOPS[name].inputs(steps, batch, seed=steps)
    return (torch.randn(batch, steps, 6),)


@made_once
def converted(name: str) -> Any:
    torch.manual_seed(0)
    make, mapping = MODELS[name]
    settings = tc.get_default_prepare_custom_config()
    prepared = tc.prepare_fx(make().eval(), mapping, inputs_of(name, 6, 2), prepare_custom_config=settings)
    calibrate(prepared, [inputs_of(name, steps, 2) for steps in (9, 7, 5)])
    lowered = tc.convert_fx(prepared)
    assert any(each.requires_grad for each in prepared.parameters())
    return lowered


@made_once
def packs() -> tuple[Any, Any, tuple[Tensor, Tensor]]:
    """Return a model prepared, its reference, and inputs."""
    args = (torch.randn(5, 2, 6), torch.tensor([5, 3]))
    prepared = tc.prepare_fx(Packs().eval(), STATIC, args, tc.get_default_prepare_custom_config())
    calibrated = copy.deepcopy(prepared)
    calibrated(*args)
    return prepared, tc.convert_to_reference_fx(calibrated), args


def check(name: str, model: nn.Module, *, strict: bool, decomposed: bool, reference: nn.Module) -> None:
    args = inputs_of(name, 6, 3)
    shapes: Any = tuple(dict.fromkeys((0, 1), Dim.DYNAMIC) for _ in args)
    shapes = (shapes,) if isinstance(model, Around) else shapes
    assert torch.is_grad_enabled()
    program = torch.export.export(model, args, dynamic_shapes=shapes, strict=strict)
    if decomposed:
        program = program.run_decompositions()
    module = program.module()
    for steps, batch in ((6, 3), (11, 2)):
        given = inputs_of(name, steps, batch)
        # A dynamic module returns float sums, which the reference sums in another order when exported.
        atol = 1e-6 if name == "dynamic lstm" else 0.0
        for one, other in zip(leaves(reference(*given)), leaves(module(*given)), strict=True):
            torch.testing.assert_close(other, one, rtol=0.0, atol=atol)


@pytest.mark.parametrize("strict", [False, True])
def test_a_greedy_decoder(strict: bool) -> None:
    model = converted("decoder")
    check("decoder", model, strict=strict, decomposed=not strict, reference=model.reference)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*its values grow with")  # What "counts" returns are sums over time.
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_every_kind(name: str, strict: bool) -> None:
    lowered = converted(name)
    for model in (lowered.reference, lowered, Around(lowered)):
        decomposed = isinstance(model, Around)
        eager = model if model is lowered.reference else lowered
        check(name, model, strict=strict, decomposed=decomposed, reference=eager)


@pytest.mark.parametrize("strict", [False, True])
def test_what_cannot_be_exported_is_said_in_words(strict: bool) -> None:
    prepared, packed, args = packs()
    with pytest.raises(ExportError, match=r"HistogramObserver asks.*\nHint: export what convert_fx"):
        torch.export.export(prepared, args, strict=strict)
    with pytest.raises(CustomModuleError, match=r"'rnn' is called with a PackedSequence.*\nHint: torchq_c"):
        torch.export.export(packed, args, strict=strict)


class Weighted(nn.Module):
    """Two inputs that are not exchangeable."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        return self.linear(x) * weights


def test_arguments_are_given_by_name() -> None:
    x, weights = torch.randn(3, 6), torch.randn(3, 1)
    prepared = tc.prepare_fx(Weighted().eval(), STATIC, (x, weights))
    prepared(x, weights)
    converted = tc.convert_fx(prepared)
    for form in (prepared, converted.reference, converted):
        assert torch.equal(form.forward(weights=weights, x=x), form(x, weights))
    for strict in (False, True):
        program = torch.export.export(converted, (x,), {"weights": weights}, strict=strict).module()
        assert torch.equal(program(x, weights=weights), converted(x, weights))


class Flipping(nn.Module):
    """What Python decides by a size."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return -y if x.shape[0] > 5 else y


def test_forward_called_itself_takes_the_sizes_that_a_call_takes() -> None:
    x, large = torch.randn(3, 6), torch.randn(7, 6)
    # The compiler breaks the graph at each decision of an observer, of which a histogram's has many.
    mapping = QConfigMapping().set_global(default_qconfig)
    with pytest.warns(QuantizationWarning, match="TQ602"):
        prepared = tc.prepare_fx(Flipping().eval(), mapping, (x,))
    prepared(x)
    converted = tc.convert_fx(prepared)
    for form in (prepared, converted.reference, converted):
        compiled = torch.compile(lambda given, form=form: form.forward(given), backend="eager")
        for forward in (form.forward, compiled):
            assert torch.equal(forward(x[:2]), form(x[:2]))
            with pytest.raises(InputError, match=r"'x' has size 7 in dimension 0"):
                forward(large)
    original = converted.forward
    expected = 2 * converted(x)
    converted.forward = lambda given: 2 * original(given)  # as those do who wrap it
    assert torch.equal(converted(x), expected)
    del converted.forward
    with torch.no_grad():
        converted.reference.get_parameter("linear.bias").add_(1.0)
    assert torch.equal(converted.forward(x), converted(x))
