"""Calls of other ranks than the example's, beside the float model and FX, which takes every rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.quantization.quantize_fx as fx
from torch import Tensor, nn
from torch.ao.quantization import get_default_qat_qconfig_mapping, get_default_qconfig_mapping

import torchq_compat as tc
from tests.helpers.once import made_once
from torchq_compat.custom_config import PrepareCustomConfig
from torchq_compat.errors import CallError, InputError

MAPPING = get_default_qconfig_mapping("x86")


class Tagger(nn.Module):
    """An LSTM with initial states, whose batch is the second dimension of these."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.lstm, self.fc = nn.LSTM(4, 8, batch_first=batch_first), nn.Linear(8, 3)

    def forward(self, x: Tensor, states: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        out, states = self.lstm(x, states)
        return self.fc(out), states


class Centered(nn.Module):
    """Takes a row alone, and computes something else than in a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        return y - y.mean(0)


class Pair(nn.Module):
    """One input with a batch, one without; a result of each."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.table = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, shared: Tensor) -> dict[str, Tensor]:
        return {"rows": self.fc(x), "shared": self.table(shared)}


def converted(model: nn.Module, args: tuple[Any, ...], custom: PrepareCustomConfig | None = None) -> Any:
    prepared = tc.prepare_fx(model, MAPPING, args, prepare_custom_config=custom)
    prepared(*args)
    return tc.convert_fx(prepared)


@made_once
def converted_mlp(example: tuple[int, ...]) -> tuple[nn.Module, Tensor, Any]:
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval(), torch.rand(example)
    prepared = tc.prepare_fx(model, MAPPING, (x,))
    seen = torch.rand(200, 4)
    prepared(seen)
    return model, seen, tc.convert_fx(prepared)


@pytest.mark.parametrize("example", [(3, 4), (1, 4)])
def test_rows_of_any_rank_have_fxs_numbers(example: tuple[int, ...]) -> None:
    model, x, ours = converted_mlp(example)
    prepared = fx.prepare_fx(copy.deepcopy(model), MAPPING, (x,))
    prepared(x)
    theirs = fx.convert_fx(prepared)
    # A tie is a step of the hidden layer, too.
    hidden, step = (float(theirs.get_submodule(name).scale) for name in ("0", "2"))
    most = 1.01 * (step + hidden * float(model[2].weight.abs().max()))
    for shape in ((4,), (2, 5, 4), (1, 2, 3, 4), (0, 2, 4)):
        y = torch.rand(shape)  # FX's kernels take values beyond the range that was seen otherwise.
        for form in (ours, copy.deepcopy(ours), ours.reference):
            result = form(y)
            assert result.shape == (*shape[:-1], 2)
            assert torch.equal(result, form(y.reshape(-1, 4)).reshape(result.shape))
        if y.numel():
            difference = ours(y) - theirs(y.reshape(-1, 4)).reshape(*shape[:-1], 2)
            assert difference.abs().max() <= most
            assert difference.abs().mean() < 0.1 * most
            assert (ours(y) - model(y)).abs().max() > 0


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("is_mapped", [True, False])
@pytest.mark.filterwarnings("ignore:LSTM at")
def test_a_sequence_without_a_batch_is_a_batch_of_one(*, batch_first: bool, is_mapped: bool) -> None:
    torch.manual_seed(0)
    model = Tagger(batch_first=batch_first).eval()
    batch = 0 if batch_first else 1
    states = torch.randn(1, 3, 8), torch.randn(1, 3, 8)
    x = torch.randn(3, 7, 4) if batch_first else torch.randn(7, 3, 4)
    ours = converted(model, (x, states), tc.get_default_prepare_custom_config() if is_mapped else None)
    alone, one = torch.randn(9, 4), (states[0][:, 0], states[1][:, 0])
    result = ours(alone, one)
    batched = ours(alone.unsqueeze(batch), (one[0].unsqueeze(1), one[1].unsqueeze(1)))
    expected = model(alone, one)
    assert torch.equal(result[0], batched[0].squeeze(batch))
    for value, other, known in zip(result[1], batched[1], expected[1], strict=True):
        assert torch.equal(value, other.squeeze(1))
        assert value.shape == known.shape
    assert result[0].shape == expected[0].shape
    noise = (result[0] - expected[0]).square().sum()
    assert 20 < 10 * torch.log10(expected[0].square().sum() / noise) < 70
    with pytest.raises(InputError, match=r"'states\[0\]' has 3 dimensions|'x' has 2 dimensions"):
        ours(alone, states)  # Of a batch and of none.


def test_what_is_not_row_by_row_is_refused() -> None:
    torch.manual_seed(0)
    model = Centered().eval()
    for example in (torch.randn(3, 4), torch.ones(3, 4), torch.zeros(1, 4)):
        ours = converted(model, (example,))
        for shape in ((4,), (2, 3, 4)):
            model(torch.randn(shape))
            with pytest.raises(InputError, match=r"Hint: capture the model with an example of that rank"):
                ours(torch.randn(shape))


def test_explain_says_which_ranks_are_taken() -> None:
    ours = converted(Pair().eval(), (torch.randn(3, 4), torch.randn(5, 4)))
    ranks = [item for item in tc.explain(ours).decisions if item.kind == "rank"]
    assert [(item.path, item.reason) for item in ranks] == [
        ("input x", "also without dimension 0, or with several in its place")
    ]


def test_two_dimensions_fewer_are_refused() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.AvgPool2d(2), nn.ReLU()).eval()
    ours, x = converted(model, (torch.randn(2, 3, 4, 6),)), torch.randn(5, 4, 6)
    assert torch.equal(ours(x), ours(x[None])[0])
    with pytest.raises((RuntimeError, IndexError)):
        model(x[0])
    with pytest.raises((InputError, CallError)):
        ours(x[0])


def test_inputs_and_results_without_the_dimension_stay() -> None:
    torch.manual_seed(0)
    model, example = Pair().eval(), (torch.randn(3, 4), torch.randn(5, 4))
    ours = converted(model, example)
    shared = ours(*example)["shared"]
    for x in (torch.randn(4), torch.randn(2, 3, 4)):
        result = ours(x, shared=example[1])
        assert list(result) == ["rows", "shared"]
        assert torch.equal(result["shared"], shared)
        assert torch.equal(result["rows"], ours(x.reshape(-1, 4), example[1])["rows"].reshape(x.shape))


class Best(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.fc(x)
        return y.argmax(-1), y.amax(-1)


def test_results_of_a_row_may_have_no_dimension() -> None:
    torch.manual_seed(0)
    ours, x = converted(Best().eval(), (torch.randn(3, 4),)), torch.randn(2, 3, 4)
    for given in (x[0, 0], x):
        index, value = ours(given)
        assert index.shape == value.shape == given.shape[:-1]
        assert torch.equal(index.reshape(-1), ours(given.reshape(-1, 4))[0])
        assert torch.equal(value.reshape(-1), ours(given.reshape(-1, 4))[1])


def traced(model: Any, x: Tensor) -> Any:
    return torch.jit.trace(model, (x,), check_trace=False)


def exported(model: Any, x: Tensor) -> Any:
    return torch.export.export(model, (x,)).module()


@pytest.mark.parametrize(
    "form", [lambda model, x: torch.compile(model, backend="eager", fullgraph=True), traced, exported]
)
def test_other_forms_of_such_a_call_have_its_bits(form: Callable[[Any, Tensor], Any]) -> None:
    _, _, ours = converted_mlp((3, 4))
    for shape in ((4,), (2, 5, 4)):
        y = torch.randn(shape)
        assert torch.equal(form(ours, y)(y), ours(y))


def test_integers_as_asked_are_taken_and_returned_at_any_rank() -> None:
    model, x, _ = converted_mlp((3, 4))
    custom = PrepareCustomConfig().set_input_quantized_indexes([0]).set_output_quantized_indexes([0])
    prepared = tc.prepare_fx(model, MAPPING, (x,), prepare_custom_config=custom)
    prepared(x)
    ours = tc.convert_fx(prepared)
    (qparams,) = ours.input_qparams()
    integers = torch.randint(0, 100, (2, 5, 4), dtype=qparams.dtype)
    result = ours(integers)
    assert result.shape == (2, 5, 2)
    assert result.dtype == ours(integers.flatten(0, 1)).dtype != torch.float32
    assert torch.equal(result.flatten(0, 1), ours(integers.flatten(0, 1)))


def test_a_model_trains_at_other_ranks() -> None:
    model, x = converted_mlp((3, 4))[0], torch.randn(2, 3, 4)
    prepared = [
        tc.prepare_qat_fx(copy.deepcopy(model).train(), get_default_qat_qconfig_mapping("x86"), (x[0],))
        for _ in range(2)
    ]
    prepared[0](x).square().sum().backward()
    prepared[1](x.flatten(0, 1)).square().sum().backward()
    for one, other in zip(*(item.parameters() for item in prepared), strict=True):
        assert one.grad.abs().max() > 0
        assert torch.equal(one.grad, other.grad)
