"""Modules that are called whole and decide by sizes: at each call, not as in the example."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import get_default_qconfig_mapping
from torch.ao.quantization.fx.custom_config import PrepareCustomConfig

import torchq_compat as tc
from tests.helpers.oracle import leaves, sqnr
from torchq_compat.capture.trial_runs import run_prepared
from torchq_compat.errors import InputError

# What the models decide by the sizes of results is warned of.
pytestmark = pytest.mark.filterwarnings("ignore:dimension 1 at:torchq_compat.errors.QuantizationWarning")
MAPPING = get_default_qconfig_mapping("x86")
EXAMPLE = (2, 6, 8)
SIZES = [EXAMPLE, (2, 3, 8), (3, 9, 8), (1, 1, 8), (4, 16, 8), (2, 5, 8)]
#: A module's computation: (linear, input) -> result.
Compute = Callable[[nn.Module, Tensor], Any]


class Whole(nn.Module):
    """What is not traced."""

    def __init__(self, compute: Compute) -> None:
        super().__init__()
        self.linear, self.compute = nn.Linear(8, 8), compute
        self.register_buffer("table", torch.randn(16, 8))

    def forward(self, x: Tensor) -> Any:
        return self.compute(self.linear, x)


class Inside(Whole):
    """Another one in it, which decides too."""

    def __init__(self, compute: Compute) -> None:
        super().__init__(compute)
        self.inner = Whole(lambda linear, x: linear(x[:, : max(1, x.size(1) // 2)]))

    def forward(self, x: Tensor) -> Any:
        y = self.inner(x)
        return torch.cat([y, x], 1) if x.size(1) > 4 else y + self.table[: y.size(1)]


class WithLSTM(Whole):
    def __init__(self, compute: Compute) -> None:
        super().__init__(compute)
        self.lstm = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        y, _ = self.lstm(x)
        return y[:, -4:] if x.size(1) > 4 else y


def branch(linear: nn.Module, x: Tensor) -> Tensor:
    return linear(x) if x.size(1) > 4 else linear(x) * 2 + 1


def cut(linear: nn.Module, x: Tensor) -> Tensor:
    # A tensor on no named device: the shapes are not found on the meta device.
    y = linear(x) + torch.zeros(x.size(0), 1, 8)
    return y[:, :4] if x.size(1) > 4 else y


def padded(linear: nn.Module, x: Tensor) -> Tensor:
    missing = -x.size(1) % 4
    return linear(F.pad(x, (0, 0, 0, missing)) if missing else x)


def halved(linear: nn.Module, x: Tensor) -> Tensor:
    batch, length, _ = x.shape
    y = linear(x)
    return y.view(batch, length // 2, 2, 8).sum(2) if length % 2 == 0 else y[:, : length // 2 + 1]


def looped(linear: nn.Module, x: Tensor) -> Tensor:
    return torch.stack([linear(x[:, step]) for step in range(0, x.size(1), 2)], 1)


def of_floats(linear: nn.Module, x: Tensor) -> Tensor:
    return linear(x[:, : int(x.size(1) * 0.5) + 1]) / x.size(1) ** 0.5


def by_data(linear: nn.Module, x: Tensor) -> Tensor:
    y = linear(x)
    if y.abs().sum() < 0:
        y = -y
    return y[:, :4] if x.size(1) > 4 else y


def handed_on(linear: nn.Module, x: Tensor) -> Tensor:
    return x if x.size(1) > 4 else linear(x)


COMPUTES = (branch, cut, padded, halved, looped, of_floats, by_data, handed_on)
WHOLE: dict[str, Callable[[], Whole]] = {
    **{compute.__name__: lambda compute=compute: Whole(compute) for compute in COMPUTES},  # type: ignore[misc]
    "inside": lambda: Inside(branch),
    "with_lstm": lambda: WithLSTM(branch),
}


class Around(nn.Module):
    def __init__(self, middle: Whole) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 8), middle, nn.Linear(8, 8)


class Computes(Around):
    """Computes with the sizes of results, and calls the module twice."""

    def forward(self, x: Tensor) -> Any:
        y = self.middle(self.first(x))
        again = self.middle(y)
        batch, length = y.size(0), y.size(1)
        ones = torch.ones(batch, again.size(1) + length, 8)
        return torch.cat([again, y], 1) + ones, self.last(y).reshape(batch * length, 8)


class Decides(Around):
    """Decides by the size of a result."""

    def forward(self, x: Tensor) -> Any:
        y = self.middle(self.first(x))
        return self.last(y) if y.size(1) > 3 else self.last(y) * 3


def prepared_and_converted(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    config = PrepareCustomConfig().set_non_traceable_module_names(["middle"])
    prepared = tc.prepare_fx(model, MAPPING, (torch.randn(*EXAMPLE),), config)
    for size in SIZES:
        if is_taken(prepared, torch.randn(*size)):
            prepared(torch.randn(*size))
    return prepared, tc.convert_fx(prepared)


def is_taken(model: nn.Module, x: Tensor) -> bool:
    try:
        model(x)
    except InputError:
        return False
    return True


def assert_same(model: nn.Module, prepared: nn.Module, converted: nn.Module, x: Tensor) -> None:
    exact, found = leaves(model(x)), leaves(run_prepared(prepared, (x,)))
    assert [tuple(item.shape) for item in found] == [tuple(item.shape) for item in exact]
    assert all(torch.equal(*pair) for pair in zip(exact, found, strict=True))
    assert all(10 < sqnr(*pair) < 70 for pair in zip(exact, leaves(converted(x)), strict=True))


@pytest.mark.parametrize("make", WHOLE.values(), ids=WHOLE)
def test_decisions_inside_are_made_at_each_call(make: Callable[[], Whole]) -> None:
    torch.manual_seed(0)
    model = Computes(make()).eval()
    prepared, converted = prepared_and_converted(model)
    with torch.no_grad():
        for size in SIZES:
            assert_same(model, prepared, converted, torch.randn(*size))


@pytest.mark.parametrize("make", WHOLE.values(), ids=WHOLE)
def test_a_decision_by_a_result_is_kept_at_the_sizes_it_has(make: Callable[[], Whole]) -> None:
    torch.manual_seed(0)
    model = Decides(make()).eval()
    prepared, converted = prepared_and_converted(model)
    taken = 0
    with torch.no_grad():
        is_long = model.middle(torch.randn(*EXAMPLE)).size(1) > 3
        for size in SIZES:
            x = torch.randn(*size)
            if (model.middle(x).size(1) > 3) == is_long:
                assert_same(model, prepared, converted, x)
                taken += 1
            else:
                for refusing in (prepared, converted):
                    with pytest.raises(InputError, match=r"dimension 1.*test_sizes_decided_inside.py"):
                        refusing(x)
    assert 2 < taken < 6 or (taken == 6 and make is WHOLE["padded"])


class Padded(nn.Module):
    """Padded as its mask says. In evaluation and without gradients it has nested tensors."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.first, self.middle = nn.Linear(8, 8), nn.TransformerEncoder(layer, 1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y: Tensor = self.middle(self.first(x), src_key_padding_mask=mask)
        return y * 2 if y.size(1) > 2 else y


@pytest.mark.parametrize("trained", [True, False])
def test_a_decision_by_what_a_padded_transformer_returns(*, trained: bool) -> None:
    def given(batch: int, length: int) -> tuple[Tensor, Tensor]:
        mask = torch.arange(length) >= torch.randint(1, max(2, length), (batch, 1))
        return torch.randn(batch, length, 8), mask & (torch.arange(batch)[:, None] > 0)

    torch.manual_seed(0)
    model = Padded().eval().requires_grad_(trained)
    prepared = tc.prepare_fx(model, MAPPING, given(2, 3))
    with torch.no_grad():
        for size in [(3, 5), (2, 9), (1, 3), (4, 12)]:
            args = given(*size)
            assert torch.equal(run_prepared(prepared, args), model(*args))
        for size in [(3, 2), (1, 1)]:
            with pytest.raises(InputError, match=r"in dimension 1.*because of test_sizes_decided_inside\.py"):
                prepared(*given(*size))


def test_what_needs_data_at_other_sizes_is_refused_there() -> None:
    """The shapes of its results in the example need no data, so its weights are not kept to compute them."""

    def needs_data(linear: nn.Module, x: Tensor) -> Tensor:
        y = linear(x)
        if x.size(1) < 5 and y.sum() > 1e9:
            y = -y
        return y[:, :7]

    torch.manual_seed(0)
    model = Decides(Whole(needs_data)).eval()
    prepared, converted = prepared_and_converted(model)
    with torch.no_grad():
        for size in [EXAMPLE, (3, 9, 8), (1, 5, 8)]:
            assert_same(model, prepared, converted, torch.randn(*size))
        for refusing in (prepared, converted):
            with pytest.raises(InputError, match="dimension 1"):
                refusing(torch.randn(2, 4, 8))


class Results(Around):
    def forward(self, x: Tensor) -> Any:
        y, mean, flat = self.middle(self.first(x))
        return self.last(y) + mean[:, None], flat.size(1) + 1


def test_several_results() -> None:
    def several(linear: nn.Module, x: Tensor) -> Any:
        y = linear(x)
        return y, y.mean(1) if x.size(1) > 3 else y[:, 0], y.flatten(1)

    torch.manual_seed(0)
    model = Results(Whole(several)).eval()
    prepared, _ = prepared_and_converted(model)
    for size in SIZES:
        x = torch.randn(*size)
        (exact, number), (found, other) = model(x), run_prepared(prepared, (x,))
        assert torch.equal(exact, found)
        assert number == other == size[1] * 8 + 1


class Ranks(Around):
    def forward(self, x: Tensor) -> Any:
        y = self.middle(self.first(x))
        return self.last(y[:, None] * 2 if y.dim() == 2 else y)


class Numbers(Around):
    def forward(self, x: Tensor) -> Any:
        y, number = self.middle(self.first(x))
        return self.last(y) * number


class Sums(Around):
    def forward(self, x: Tensor) -> Any:
        return self.last(sum(self.middle(self.first(x))))


def test_another_rank_at_sizes_that_were_not_tried_is_refused() -> None:
    torch.manual_seed(0)
    model = Ranks(Whole(lambda linear, x: linear(x).mean(1) if x.size(1) > 50 else linear(x))).eval()
    prepared, converted = prepared_and_converted(model)
    with torch.no_grad():
        assert_same(model, prepared, converted, torch.randn(2, 50, 8))
        for refusing in (prepared, converted, copy.deepcopy(converted)):
            with pytest.raises(InputError, match="'middle' returns a tensor of 2 dimensions at the sizes"):
                refusing(torch.randn(2, 51, 8))


OTHERS: dict[str, tuple[type[Around], Compute, tuple[int, ...]]] = {
    "rank": (Ranks, lambda linear, x: linear(x).mean(1) if x.size(1) > 15 else linear(x), (16,)),
    "number": (Numbers, lambda linear, x: (linear(x), int(x.size(1) * 0.5)), (3, 9, 1, 16, 5)),
    "count": (Sums, lambda linear, x: (linear(x),) * (2 if x.size(1) > 4 else 3), (3, 1)),
}


@pytest.mark.parametrize(("kind", "compute", "refused"), OTHERS.values(), ids=OTHERS)
def test_results_of_another_form_are_refused(
    kind: type[Around], compute: Compute, refused: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    model = kind(Whole(compute)).eval()
    prepared, converted = prepared_and_converted(model)
    with torch.no_grad():
        for size in SIZES:
            x = torch.randn(*size)
            if size[1] not in refused:
                assert_same(model, prepared, converted, x)
                continue
            for refusing in (prepared, converted):
                with pytest.raises(InputError, match="dimension 1"):
                    refusing(x)


def test_sizes_are_computed_without_the_weights() -> None:
    """What computes the shapes of results at each call keeps no second copy of a module's weights."""
    prepared, _ = prepared_and_converted(Decides(Whole(cut)).eval())
    program = prepared.record.signature.sizes.program  # type: ignore[attr-defined]
    (call,) = [n for n in program.graph_module.graph.nodes if n.target.__class__.__name__ == "function"]
    (shapes,) = [c.cell_contents for c in call.target.__closure__ if hasattr(c.cell_contents, "_module")]
    assert all(tensor.is_meta for tensor in shapes._module.state_dict().values())
