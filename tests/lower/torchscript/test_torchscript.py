"""torch.jit.script and torch.jit.trace of prepared and converted models, saved, loaded, at other sizes."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import get_default_qat_qconfig_mapping, get_default_qconfig_mapping
from torch.fx import GraphModule

import torchq_compat as tc
from tests.helpers.once import made_once
from tests.helpers.oracle import leaves, sqnr
from torchq_compat.errors import ExportError, InputError, QuantizationWarning

MAPPING = get_default_qconfig_mapping("x86")


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3)
        self.bn = nn.BatchNorm2d(8)
        self.relu = nn.ReLU()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.pool(self.relu(self.bn(self.conv1(x))))
        return self.fc(y.view(y.size(0), -1))


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.lstm = nn.LSTM(8, 8, bidirectional=True)
        self.fc = nn.Linear(16, 4)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        output, (h, c) = self.lstm(self.embedding(tokens))
        return self.fc(output) + h[-1].mean(), c


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, batch: dict[str, Tensor], pair: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        joined = torch.cat([self.fc(batch["a"]), batch["b"]], 1)
        return {"joined": joined[:, :4] * pair[0], "half": joined.split(8, 1)[1] + pair[1]}


class Rows(nn.Module):
    """A loop over any number of rows, with a state and a result for every step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(8, 8)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = c = torch.zeros(x.shape[1], 8)
        results = []
        for row in x:
            h, c = self.cell(row, (h, c))
            results.append(self.out(h))
        return torch.stack(results), h


class Each(nn.Module):
    """A loop without a state."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.out(row).relu() for row in x])


class Between(nn.Module):
    """A recurrent module that reads a quantized layer's integers and passes integers to another one."""

    def __init__(self, recurrent: nn.Module) -> None:
        super().__init__()
        self.before = nn.Linear(6, 8)
        self.recurrent = recurrent
        self.behind = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        output, _ = self.recurrent(self.before(x).relu())
        return self.behind(output)


#: Models, and what each is prepared and calibrated with.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]]]] = {
    "classifier": (Classifier, lambda: (torch.randn(4, 3, 9, 9),) * 2),
    "tagger": (Tagger, lambda: (torch.randint(20, (5, 3)),) * 2),
    "rows": (Rows, lambda: (torch.randn(4, 2, 8), torch.randn(9, 3, 8))),
    "each": (Each, lambda: (torch.randn(4, 2, 8), torch.randn(9, 3, 8))),
    "LSTM": (lambda: Between(nn.LSTM(8, 4, bidirectional=True)), lambda: (torch.randn(5, 2, 6),) * 2),
    "GRU": (lambda: Between(nn.GRU(8, 8)), lambda: (torch.randn(5, 2, 6),) * 2),
}


@made_once
def stages(name: str) -> dict[str, Any]:
    """Return a model, prepared, as a reference and lowered, and its inputs of ``MODELS``."""
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    model, (x, calibrated) = make().eval(), inputs()
    is_recurrent = name != "classifier"
    config = tc.get_default_prepare_custom_config() if is_recurrent else None
    prepared = tc.prepare_fx(model, MAPPING, (x,), config)
    prepared(calibrated)
    lowered = tc.convert_fx(prepared, tc.get_default_convert_custom_config() if is_recurrent else None)
    return {
        "model": model,
        "prepared": prepared,
        "reference": lowered.reference,
        "lowered": lowered,
        "inputs": (x, calibrated),
    }


def script(model: nn.Module, inputs: tuple[Any, ...]) -> Any:
    return torch.jit.script(model)


def trace(model: nn.Module, inputs: tuple[Any, ...]) -> Any:
    return torch.jit.trace(model, inputs)


def loaded_again(scripted: Any) -> Any:
    buffer = io.BytesIO()
    torch.jit.save(scripted, buffer)
    buffer.seek(0)
    return torch.jit.load(buffer).eval()


def check_equal(model: nn.Module, scripted: Any, inputs: tuple[Any, ...]) -> None:
    with torch.no_grad():
        expected, found = leaves(model(*inputs)), leaves(scripted(*inputs))
    assert len(expected) == len(found) > 0
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-6)


@pytest.mark.parametrize("how", [script, trace])
@pytest.mark.parametrize("stage", ["lowered", "reference", "prepared"])
@pytest.mark.filterwarnings("ignore:TorchScript of a prepared model")
def test_classifier(stage: str, how: Callable[..., Any]) -> None:
    made, x = stages("classifier"), torch.randn(4, 3, 9, 9)
    model, quantized = made["model"], made[stage]
    again = loaded_again(how(quantized, (x,)))
    for sizes in ((4, 3, 9, 9), (7, 3, 9, 9), (1, 3, 12, 9)):
        check_equal(quantized, again, (torch.randn(*sizes),))
    assert ("torchq_compat_native::convolution" in str(again.inlined_graph)) == (stage == "lowered")
    low, high = (100, float("inf")) if stage == "prepared" else (25, 50)
    with torch.no_grad():
        assert low < sqnr(model(x), again(x)) <= high


@pytest.mark.parametrize("how", [script, trace])
def test_mapped_lstm(how: Callable[..., Any]) -> None:
    made = stages("tagger")
    model, prepared, quantized, (tokens, _) = (
        made[key] for key in ("model", "prepared", "lowered", "inputs")
    )
    with (
        pytest.warns(UserWarning, match="does not observe"),
        pytest.raises(ExportError, match="at every step") as error,
    ):
        how(prepared, (tokens,))
    assert "what convert_fx returns" in str(error.value)
    again = loaded_again(how(quantized, (tokens,)))
    for sizes in ((5, 3), (9, 1)):
        check_equal(quantized, again, (torch.randint(20, sizes),))
    assert "torchq_compat_native::recurrent" in str(again.inlined_graph)
    with torch.no_grad():
        assert 20 < sqnr(model(tokens)[0], again(tokens)[0]) < 45


def test_qat_with_frozen_observers() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 9, 9)
    prepared = tc.prepare_qat_fx(Classifier().train(), get_default_qat_qconfig_mapping("x86"), (x,))
    prepared(x)
    prepared.apply(torch.ao.quantization.disable_observer).eval()
    with pytest.warns(UserWarning, match="does not observe"):
        scripted = torch.jit.script(prepared)
    check_equal(prepared, loaded_again(scripted), (torch.randn(6, 3, 9, 9),))


def test_nested_arguments_and_results() -> None:
    torch.manual_seed(0)
    batch = {"a": torch.randn(4, 8), "b": torch.randn(4, 8)}
    pair = (torch.randn(4, 4), torch.randn(4, 8))
    # The number of parts that split returns is fixed.
    with pytest.warns(QuantizationWarning, match=r"'b'\]\" is free: as long as it is 1 to 8"):
        prepared = tc.prepare_fx(Nested().eval(), MAPPING, (batch, pair))
    prepared(batch, pair)
    quantized = tc.convert_fx(prepared)
    again = loaded_again(torch.jit.script(quantized))
    check_equal(quantized, again, (batch, pair))
    assert set(again(batch, pair)) == {"joined", "half"}


class Optionals(nn.Module):
    """Tensors behind arguments that have no sizes, or are no tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor, state: Tensor | None, times: int, scale: Tensor, more: Tensor) -> Tensor:
        y = self.fc(x) * times * scale + more
        return y if state is None else y + state


def test_what_stands_before_a_tensor_is_counted() -> None:
    torch.manual_seed(0)
    args = (torch.randn(4, 8), None, 3, torch.tensor(0.5), torch.randn(4, 8))
    prepared = tc.prepare_fx(Optionals().eval(), MAPPING, args)
    prepared(*args)
    lowered = tc.convert_fx(prepared)
    again = loaded_again(torch.jit.script(lowered))
    check_equal(lowered, again, args)
    check_equal(lowered, again, (*args[:4], torch.randn(1, 8)))
    for place, other, said in (1, args[0], "state"), (2, 4, "times"), (4, torch.randn(3, 8), "more.size"):
        given = [*args[:place], other, *args[place + 1 :]]
        with pytest.raises(torch.jit.Error, match=rf"{said}.* is not as captured"):
            again(*given)
        with pytest.raises(InputError):
            lowered(*given)


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Pair:
        return Pair(self.fc(x), x)


def test_namedtuples_are_traced_as_tuples() -> None:
    x = torch.randn(4, 8)
    prepared = tc.prepare_fx(Named().eval(), MAPPING, (x,))
    prepared(x)
    lowered = tc.convert_fx(prepared)
    check_equal(lowered, loaded_again(torch.jit.trace(lowered, (x,))), (torch.randn(7, 8),))
    with pytest.raises(ExportError, match="no namedtuple"):
        torch.jit.script(lowered)


def test_a_fixed_size_is_checked() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fcs = nn.ModuleList(nn.Linear(8, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return sum((fc(row) for fc, row in zip(self.fcs, x, strict=True)), torch.zeros(4))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = tc.prepare_fx(Fixed().eval(), MAPPING, (torch.randn(3, 8),))
        prepared(torch.randn(3, 8))
        scripted = torch.jit.script(tc.convert_fx(prepared))
    scripted(torch.randn(3, 8))
    with pytest.raises(torch.jit.Error, match=r"x.size\(0\) is not as captured: 3"):
        scripted(torch.randn(4, 8))
    with pytest.raises(torch.jit.Error, match="x has to have 2 dimensions in TorchScript"):
        scripted(torch.randn(3, 8, 8))


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) if x.size(0) > 2 else -self.fc(x)


def test_what_a_whole_module_decides_by_sizes_is_checked_in_a_script() -> None:
    """Python decides it at each call, and a script has no Python."""
    config = tc.get_default_prepare_custom_config().set_non_traceable_module_names(["1"])
    prepared = tc.prepare_fx(
        nn.Sequential(nn.Linear(8, 8), Whole()).eval(), MAPPING, (torch.randn(4, 8),), config
    )
    prepared(torch.randn(4, 8))
    lowered = tc.convert_fx(prepared)
    again = loaded_again(torch.jit.script(lowered))
    check_equal(lowered, again, (torch.randn(3, 8),))
    lowered(torch.randn(2, 8))
    with pytest.raises(torch.jit.Error, match=r"argument 0 of 1.size\(0\) is not as captured: at least 3"):
        again(torch.randn(2, 8))


@pytest.mark.parametrize("how", [script, trace])
def test_a_loop_without_a_state(how: Callable[..., Any]) -> None:
    made = stages("each")
    again = loaded_again(how(made["lowered"], made["inputs"][:1]))
    for rows in (4, 9, 1):
        check_equal(made["lowered"], again, (torch.randn(rows, 2, 8),))


@pytest.mark.parametrize("how", [script, trace])
def test_a_loop_is_a_loop(how: Callable[..., Any]) -> None:
    made = stages("rows")
    model, quantized, (x, longer) = (made[key] for key in ("model", "lowered", "inputs"))
    again = loaded_again(how(quantized, (x,)))
    for call in (x, longer):
        results, last = again(call)
        assert torch.equal(results, quantized(call)[0])
        assert torch.equal(last, quantized(call)[1])
        assert 20 < sqnr(model(call)[0], results) < 60


class Attends(nn.Module):
    """A decoder whose step repeats its state for each place of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.score = nn.Linear(6 + 4, 8), nn.Linear(4 + 8, 1)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        h, states = memory.new_zeros(memory.size(0), 8), []
        for step in x.unbind(1):
            repeated = h.unsqueeze(1).expand(-1, memory.size(1), -1)
            weights = self.score(torch.cat([memory, repeated], -1))
            h = torch.tanh(self.step(torch.cat([step, (weights * memory).sum(1)], -1)))
            states.append(h)
        return torch.stack(states, 1)


@made_once
def attending() -> tuple[GraphModule, tuple[Tensor, Tensor]]:
    example = (torch.randn(2, 5, 6), torch.randn(2, 7, 4))
    prepared = tc.prepare_fx(Attends().eval(), MAPPING, example, tc.get_default_prepare_custom_config())
    prepared(*example)
    return tc.convert_fx(prepared), example


@pytest.mark.parametrize("how", [script, trace])
def test_a_loop_whose_step_reads_sizes(how: Callable[..., Any]) -> None:
    quantized, example = attending()
    again = loaded_again(how(quantized, example))
    for batch, steps, places in ((2, 5, 7), (3, 4, 9), (1, 1, 1)):
        call = (torch.randn(batch, steps, 6), torch.randn(batch, places, 4))
        check_equal(quantized, again, call)


def test_packed_sequences_are_refused_by_name() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(4, 6)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
            return nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0])[0]

    call = (torch.randn(5, 2, 4), torch.tensor([5, 3]))
    prepared = tc.prepare_fx(Packed().eval(), MAPPING, call, tc.get_default_prepare_custom_config())
    prepared(*call)
    with pytest.raises(
        ExportError, match=r"ConvertedGRU at 'rnn' cannot become TorchScript: .* depends on values"
    ):
        torch.jit.script(tc.convert_fx(prepared))


def test_inside_another_module() -> None:
    quantized = stages("classifier")["lowered"]

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = quantized

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * 2

    x = torch.randn(3, 3, 9, 9)
    check_equal(Outer(), loaded_again(torch.jit.script(Outer())), (x,))


@pytest.mark.parametrize("how", [script, trace])
@pytest.mark.parametrize("recurrent", ["LSTM", "GRU"])
def test_integers_go_in_and_out_of_a_recurrent_module(recurrent: str, how: Callable[..., Any]) -> None:
    made = stages(recurrent)
    model, quantized, (x, _) = (made[key] for key in ("model", "lowered", "inputs"))
    again = loaded_again(how(quantized, (x,)))
    for call in (x, torch.randn(9, 3, 6)):
        check_equal(quantized, again, (call,))
    with torch.no_grad():
        assert 20 < sqnr(model(x), again(x)) < 50


@pytest.mark.parametrize("how", [script, trace])
def test_a_module_that_stays_float(how: Callable[..., Any]) -> None:
    class Unmapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(6, 4, batch_first=True)
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
            output, (_, last) = self.lstm(x, hx=(h, c))
            return self.fc(output), last

    def example(batch: int, steps: int) -> tuple[Tensor, ...]:
        return torch.randn(batch, steps, 6), torch.randn(1, batch, 4), torch.randn(1, batch, 4)

    # Of weights that ask for gradients torch computes other bits.
    model, calls = Unmapped().eval().requires_grad_(False), (example(2, 5), example(3, 7))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", QuantizationWarning)
        prepared = tc.prepare_fx(model, MAPPING, calls[0])
        for call in calls:
            prepared(*call)
        quantized = tc.convert_fx(prepared)
    again = loaded_again(how(quantized, calls[0]))
    for call in calls:
        check_equal(quantized, again, call)
        assert 20 < sqnr(model(*call)[0], again(*call)[0]) < 50
