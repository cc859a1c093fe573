"""quantize_dynamic beside torch.ao's, on the same weights."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import default_dynamic_qconfig, per_channel_dynamic_qconfig
from torch.ao.quantization import quantize_dynamic as by_torch_ao

import torchq_compat as tc
from tests.helpers.once import made_once
from tests.helpers.oracle import leaves, sqnr
from torchq_compat.errors import ConfigError, QuantizationWarning


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> Any:
        return self.inner(*args)


def state(*sizes: int) -> Tensor:
    return torch.randn(*sizes)


CASES: dict[str, tuple[Any, tuple[Any, ...], torch.dtype]] = {
    "lstm": (lambda: nn.LSTM(8, 16, 2, bidirectional=True), (state(6, 3, 8),), torch.qint8),
    "lstm in half": (lambda: nn.LSTM(8, 16), (state(6, 3, 8),), torch.float16),
    "batch first": (
        lambda: nn.LSTM(8, 16, batch_first=True),
        (state(3, 6, 8), (state(1, 3, 16), state(1, 3, 16))),
        torch.qint8,
    ),
    "gru": (lambda: nn.GRU(8, 16), (state(6, 3, 8),), torch.qint8),
    "lstm cell": (lambda: nn.LSTMCell(8, 16), (state(3, 8),), torch.qint8),
    "gru cell": (lambda: nn.GRUCell(8, 16), (state(3, 8), state(3, 16)), torch.qint8),
    "rnn cell": (lambda: nn.RNNCell(8, 16, nonlinearity="relu"), (state(3, 8),), torch.qint8),
    "linear": (lambda: nn.Linear(8, 16), (state(3, 5, 8),), torch.qint8),
    "embedding": (lambda: nn.Embedding(10, 16), (torch.arange(5),), torch.quint8),
    "bag": (
        lambda: nn.EmbeddingBag(10, 16, mode="sum"),
        (torch.arange(6), torch.tensor([0, 2])),
        torch.quint8,
    ),
}


@made_once
def quantized(name: str) -> tuple[nn.Module, dict[str, Tensor], nn.Module]:
    """Return a float model, its state beforehand, and the quantized model."""
    make, _, dtype = CASES[name]
    torch.manual_seed(0)
    model = Around(make()).eval()
    before = copy.deepcopy(model.state_dict())
    return model, before, tc.quantize_dynamic(model, dtype=dtype)


@pytest.mark.parametrize("name", CASES)
def test_numbers_of_torch_ao(name: str) -> None:
    _, args, dtype = CASES[name]
    model, before, ours = quantized(name)
    theirs = by_torch_ao(model, dtype=dtype)
    assert type(ours.inner) is not type(model.inner)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not hasattr(model.inner, "qconfig")
    with torch.no_grad():
        results = [leaves(each(*args)) for each in (model, ours, theirs)]
    for float_result, our_result, their_result in zip(*results, strict=True):
        assert sqnr(their_result, our_result) > 60
        # A higher SQNR would mean that the module is float.
        low, high = (60, 90) if dtype is torch.float16 else (30, 60)
        assert low < sqnr(float_result, our_result) < high


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"mode": "mean"}, "mode"),
        ({"mode": "sum", "padding_idx": 1}, "padding_idx"),
        ({"max_norm": 1.0}, "max_norm"),
    ],
)
def test_a_bag_that_torch_ao_would_sum_up_stays_float(settings: dict[str, Any], word: str) -> None:
    torch.manual_seed(0)
    model, args = Around(nn.EmbeddingBag(10, 16, **settings)).eval(), CASES["bag"][1]
    with pytest.warns(UserWarning, match=f"EmbeddingBag at 'inner' stays float.*{word}"):
        ours = tc.quantize_dynamic(model, dtype=torch.quint8)
    assert type(ours.inner) is nn.EmbeddingBag
    assert torch.equal(ours(*args), model(*args))


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(20, 8)
        self.rnn = nn.LSTM(8, 8)
        self.decoder = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 20))

    def forward(self, tokens: Tensor) -> Tensor:
        self.rnn.flatten_parameters()
        output: Tensor = self.decoder(self.rnn(self.encoder(tokens))[0])
        return output


def kinds(model: nn.Module) -> list[str]:
    modules = (model.encoder, model.rnn, model.decoder[0], model.decoder[1])  # type: ignore[index]
    return [module._get_name().removeprefix("DynamicQuantized") for module in modules]


@pytest.mark.parametrize(
    ("spec", "quantized"),
    [
        ({nn.LSTM}, ["rnn"]),
        ({"decoder"}, ["0", "1"]),
        ({"decoder.1", nn.LSTM}, ["rnn", "1"]),
        ({"decoder": default_dynamic_qconfig, "decoder.0": None}, ["1"]),
        ({nn.Linear: per_channel_dynamic_qconfig}, ["0", "1"]),
        (None, ["rnn", "0", "1"]),
    ],
)
def test_specs(spec: Any, quantized: list[str]) -> None:
    model = LanguageModel()
    made = tc.quantize_dynamic(model, spec)
    assert not made.training
    assert model.training
    changed = [
        path.rpartition(".")[2]
        for path, module in model.named_modules()
        if path and made.get_submodule(path)._get_name() != module._get_name()
    ]
    assert [name for name in changed if name != "decoder"] == quantized


def test_in_place_and_the_model_itself() -> None:
    model = LanguageModel()
    assert tc.quantize_dynamic(model, inplace=True) is model
    assert model.rnn._get_name() == "DynamicQuantizedLSTM"
    for bare, inplace in ((nn.Linear(4, 2), False), (nn.LSTM(4, 4), True)):
        assert type(torch.ao.quantization.quantize_dynamic(bare)) is type(bare)
        with pytest.warns(QuantizationWarning, match=r"torch\.ao leaves float.*\n?.*TQ318"):
            made = tc.quantize_dynamic(bare, inplace=inplace)
        assert made._get_name() == f"DynamicQuantized{type(bare).__name__}"


def test_rnn_and_mapping() -> None:
    torch.manual_seed(0)
    model, x = Around(nn.RNN(8, 8)).eval(), torch.randn(4, 2, 8)
    with torch.no_grad():
        assert 30 < sqnr(model(x)[0], tc.quantize_dynamic(model, {nn.RNN})(x)[0]) < 60

    class Marked(nn.Linear):
        @classmethod
        def from_float(cls, module: nn.Linear) -> Marked:
            assert module.qconfig is default_dynamic_qconfig
            return cls(module.in_features, module.out_features)

    made = tc.quantize_dynamic(LanguageModel(), {nn.Linear}, mapping={nn.Linear: Marked})
    assert type(made.decoder[0]) is Marked


@pytest.mark.parametrize(
    "name", ["lstm", "lstm in half", "batch first", "gru", "lstm cell", "gru cell", "bag"]
)
def test_torchscript(name: str) -> None:
    args, made = CASES[name][1], quantized(name)[2].inner
    # A bare LSTM is scripted without its forward, here as in torch.ao.
    scripted = torch.jit.script(made if name == "bag" else nn.Sequential(made))
    for compiled, given in (
        (scripted, args if name == "bag" else args[:1]),
        (torch.jit.trace(made, args), args),
    ):
        buffer = io.BytesIO()
        torch.jit.save(compiled, buffer)
        buffer.seek(0)
        again = torch.jit.load(buffer).eval()
        with torch.no_grad():
            for one, other in zip(leaves(made(*given)), leaves(again(*given)), strict=True):
                assert torch.equal(one, other)


def test_classes_and_keys_are_those_of_torch_ao() -> None:
    recurrent = nn.ModuleList([CASES[name][0]() for name in ("lstm", "gru", "lstm cell", "rnn cell")])
    ours, theirs = tc.quantize_dynamic(recurrent), by_torch_ao(recurrent)
    assert [type(module) for module in ours] == [type(module) for module in theirs]
    theirs.load_state_dict(ours.state_dict())
    # What torch.ao's classes refuse or compute wrongly keeps a module of this package.
    beyond = nn.ModuleList([nn.LSTM(4, 4, bias=False), nn.LSTM(4, 4, proj_size=2), nn.RNN(4, 4)])
    for module in tc.quantize_dynamic(beyond, {nn.LSTM, nn.RNN}):
        assert type(module).__module__.startswith("torchq_compat.")
        scripted, x = torch.jit.script(module), torch.randn(3, 2, 4)
        with torch.no_grad():
            result, states = module(x)
            for given in ((x,), (x, states)):
                for one, other in zip(leaves(module(*given)), leaves(scripted(*given)), strict=True):
                    torch.testing.assert_close(other, one, rtol=0, atol=1e-6)
        assert result.isfinite().all()


def test_saved_whole_and_by_state() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(20, (5, 2))
    made = tc.quantize_dynamic(LanguageModel().eval())
    buffer = io.BytesIO()
    torch.save(made, buffer)
    buffer.seek(0)
    other = tc.quantize_dynamic(LanguageModel().eval())
    with torch.no_grad():
        expected = made(tokens)
        other.encoder.load_state_dict(made.encoder.state_dict())
        assert not torch.equal(other(tokens), expected)
        other.load_state_dict(made.state_dict())
        for again in (torch.load(buffer, weights_only=False), other, copy.deepcopy(made)):
            assert torch.equal(again(tokens), expected)


@pytest.mark.parametrize(
    "arguments",
    [
        {"dtype": torch.float64},
        {"qconfig_spec": {nn.Linear: 3}},
        {"qconfig_spec": "fc"},
        {"mapping": {nn.Linear: 3}},
    ],
)
def test_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="Hint"):
        tc.quantize_dynamic(LanguageModel(), **arguments)


def test_what_matches_nothing_is_told() -> None:
    with pytest.warns(UserWarning, match="decodr matches no module"):
        tc.quantize_dynamic(LanguageModel(), {"decodr"})


def test_a_list_of_all_that_can_be_quantized_is_no_mistake() -> None:
    everything = {nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.Linear}
    model = nn.Sequential(nn.Linear(4, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error", QuantizationWarning)
        tc.quantize_dynamic(model, everything)
    with pytest.warns(
        QuantizationWarning, match=r"qconfig_spec: GRU(Cell)?, GRU(Cell)? match no module of"
    ) as told:
        tc.quantize_dynamic(model, {nn.GRU, nn.GRUCell})
    assert len(told) == 1
