"""torch.compile of lowered models: the same graph; the floats between its kernels are the compiler's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import QConfigMapping, default_dynamic_qconfig, get_default_qconfig_mapping

import torchq_compat as tc
from tests.helpers.once import made_once
from tests.helpers.oracle import calibrate, leaves, sqnr
from tests.helpers.recording_backend import Recorder
from torchq_compat.custom_config import PrepareCustomConfig
from torchq_compat.errors import InputError, QuantizationWarning


class Between(nn.Module):
    """Floats between three regions, a value of the first read in the third, a size as a result."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.out = (
            nn.Linear(8, 16),
            nn.Linear(16, 16),
            nn.Linear(16, 16),
            nn.Linear(32, 6),
        )

    def forward(self, x: Tensor, gain: float = 1.0) -> Any:
        first = self.a(x)
        second = self.b(torch.erf(first))
        third = torch.cos(self.c(second))
        joined = torch.cat([second + first, third], -1)
        return self.out(joined * gain).chunk(2, -1)[0], first.size(0), {"joined": joined}


class Images(nn.Module):
    """Channels-last results of convolutions, moves of data on integers, a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.each = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        y = F.relu(self.norm(self.first(x)))
        left, right = torch.cat([y, F.relu6(self.each(y))], 1).chunk(2, 1)
        y = F.max_pool2d(left + right, 2)
        return self.out(y.flatten(2).transpose(1, 2)), y


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.out = (
            nn.Embedding(20, 8),
            nn.LSTM(8, 8, batch_first=True),
            nn.Linear(8, 6),
        )

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.lstm(self.embedding(ids))[0])


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm, self.out = nn.LayerNorm(16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x + self.attention(x, x, x, need_weights=False)[0])).mean(1)


def compiled(model: nn.Module, backend: Any = "eager") -> Any:
    torch.compiler.reset()
    return torch.compile(model, backend=backend, fullgraph=True)


def floats(*shape: int) -> tuple[Tensor, ...]:
    return (torch.randn(*shape),)


def images(*shape: int) -> tuple[Tensor, ...]:
    return (torch.randn(*shape, 3, 8, 8),)


def channels_last(*shape: int) -> tuple[Tensor, ...]:
    return (images(*shape)[0].contiguous(memory_format=torch.channels_last),)


def ids(*shape: int) -> tuple[Tensor, ...]:
    return (torch.randint(0, 20, shape),)


class Block(nn.Module):
    """Two regions with floats between them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.erf(self.a(x)))


class Blocks(nn.Module):
    """The first block runs before all kernels of the model itself, and is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = Block(), Block(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.second(self.first(x)) + self.first(-x))


class OnlyBlock(nn.Module):
    """A model without kernels of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()

    def forward(self, x: Tensor) -> Tensor:
        return torch.erf(self.first(x))


class Steps(nn.Module):
    """A loop over time around kernels, between kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.h, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[0], 8)
        for t in range(x.shape[1]):
            h = torch.cos(self.x(x[:, t]) + self.h(h))
        return self.out(h)


def standalone(*names: str, integers: bool = False) -> Any:
    inner = None
    if integers:
        inner = PrepareCustomConfig().set_input_quantized_indexes([0]).set_output_quantized_indexes([0])
    config = tc.get_default_prepare_custom_config()
    for name in names:
        config.set_standalone_module_name(name, None, floats(3, 8), inner, None)
    return config


MAPPINGS = {
    "dynamic": QConfigMapping().set_global(default_dynamic_qconfig),
    **{name: get_default_qconfig_mapping(name) for name in ("x86", "onednn", "qnnpack")},
}
BOTH = ("first", "second")
#: A class of models; what makes an input of it, and the sizes behind the batch; and the settings.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., tuple[Tensor, ...]], tuple[int, ...], Any]] = {
    "between": (Between, floats, (8,), standalone()),
    "images": (Images, images, (), standalone()),
    "channels last": (Images, channels_last, (), standalone()),
    "text": (Text, ids, (7,), standalone()),
    "attention": (Attending, floats, (5, 16), standalone()),
    "blocks": (Blocks, floats, (8,), standalone(*BOTH)),
    "blocks of integers": (Blocks, floats, (8,), standalone(*BOTH, integers=True)),
    "one block": (Blocks, floats, (8,), standalone("second")),
    "only a block": (OnlyBlock, floats, (8,), standalone("first")),
    "loop": (Steps, floats, (3, 8), standalone()),
}


@made_once
def prepared(name: str, mapping: str = "x86") -> tuple[nn.Module, Any]:
    kind, example, rest, config = MODELS[name]
    model = kind().eval()
    return model, tc.prepare_fx(model, MAPPINGS[mapping], example(3, *rest), config)


def converted(name: str, prepared_model: Any) -> Any:
    _, example, rest, _ = MODELS[name]
    calibrate(prepared_model, [example(64, *rest)])
    return tc.convert_fx(prepared_model)


@made_once
def lowered(name: str, mapping: str = "x86") -> tuple[nn.Module, Any]:
    """Return a float model and it lowered."""
    model, prepared_model = prepared(name, mapping)
    return model, converted(name, prepared_model)


def with_other_weights(name: str) -> Any:
    _, prepared_model = prepared(name)
    with torch.no_grad():
        for parameter in prepared_model.parameters():
            parameter.normal_(std=0.3)
    return converted(name, prepared_model)


def convert(model: nn.Module, example: tuple[Any, ...]) -> Any:
    made = tc.prepare_fx(model, MAPPINGS["x86"], example, tc.get_default_prepare_custom_config())
    calibrate(made, [example])
    return tc.convert_fx(made)


def native(graph: torch.fx.Graph) -> list[str]:
    """Return the kernels that a graph calls."""
    targets = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    return [target for target in targets if target.startswith("torchq_compat_native.")]


@pytest.mark.parametrize(
    ("name", "mapping"),
    [
        pytest.param("between", "x86", id="floats between"),
        pytest.param("between", "dynamic", id="dynamic"),
        pytest.param("images", "x86", id="images"),
        pytest.param("channels last", "x86", id="channels last"),
        pytest.param("images", "onednn", id="onednn", marks=pytest.mark.slow),
        pytest.param("images", "qnnpack", id="qnnpack", marks=pytest.mark.slow),
        pytest.param("text", "x86", id="recurrent"),
        pytest.param("attention", "x86", id="attention"),
    ],
)
def test_the_bits_of_the_lowered_model(name: str, mapping: str) -> None:
    float_model, model = lowered(name, mapping)
    _, example, rest, _ = MODELS[name]
    backend = Recorder()
    fast = compiled(model, backend)
    with torch.no_grad():
        for batch in (1, 3, 5):  # compiled for a size of one, then for any other
            x = example(batch, *rest)
            plain, expected, found = float_model(*x), model(*x), fast(*x)
            assert all(map(torch.equal, leaves(expected), leaves(found)))
            assert all(15 < sqnr(a, b) < 60 for a, b in zip(leaves(plain), leaves(found), strict=True))
    kernels = native(backend.graphs[0].graph)
    if name not in ("attention", "text"):  # These have modules with graphs of their own.
        assert kernels == native(model.graph)
    assert len(kernels) > 2


@pytest.fixture
def between() -> Any:
    return lowered("between")[1]


def test_keywords_and_sizes_as_without_the_compiler(between: Any) -> None:
    with pytest.warns(QuantizationWarning, match="is fixed: at 2 by"):
        fixed = convert(Fixed().eval(), floats(2, 8))
    with torch.no_grad():
        (x,) = floats(4, 8)
        assert torch.equal(compiled(between)(x=x)[0], between(x)[0])
        with pytest.raises(InputError, match=r"size 3 in dimension 0") as plain:
            fixed(*floats(3, 8))
        fast = torch.compile(fixed, backend="eager")  # An error breaks the graph.
        assert torch.equal(fast(x[:2]), fixed(x[:2]))
        with pytest.raises(InputError) as found:
            fast(*floats(3, 8))
    assert str(found.value) == str(plain.value)


class Fixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) if x.shape[0] == 2 else self.fc(x).relu()


def test_other_weights_reach_compiled_code(between: Any) -> None:
    (x,) = floats(4, 8)
    fast = compiled(between)
    with torch.no_grad():
        before = fast(x)[0]
        weight = next(value for value in between.state_dict().values() if value.dtype is torch.int8)
        weight.copy_(weight.flip(0))  # written in place
        flipped = fast(x)[0]
        assert torch.equal(flipped, between(x)[0])
        assert sqnr(before, flipped) < 20
        other = with_other_weights("between")
        assert not torch.equal(other(x)[0], flipped)
        between.load_state_dict(other.state_dict())
        assert torch.equal(fast(x)[0], other(x)[0])


def test_copies_and_outer_models_share_nothing(between: Any) -> None:
    (x,) = floats(4, 8)
    copied = copy.deepcopy(between)
    outer, fast = compiled(nn.Sequential(copied)), torch.compile(between, backend="eager")
    with torch.no_grad():
        expected = between(x)[0]
        for parameter in copied.state_dict().values():
            if parameter.dtype is torch.int8:
                parameter.zero_()
        assert torch.equal(fast(x)[0], expected)
        assert torch.equal(outer(x)[0], copied(x)[0])
        assert not torch.equal(outer(x)[0], expected)


class Counting(nn.Module):
    """A model that writes to its state; the order of its nodes is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return self.fc(x) * self.calls


def test_a_model_that_writes_to_its_state() -> None:
    model = convert(Counting().eval(), floats(3, 8))
    other = copy.deepcopy(model)
    fast, (x,) = compiled(model), floats(3, 8)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(other(x), fast(x))


class Masked(nn.Module):
    """``to`` and a mask: the captured graph checks dtypes, as those of most transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.b(self.a(x).masked_fill(mask.to(torch.bool)[:, None], -1.0))


def test_checks_of_dtypes_hinder_nothing() -> None:
    example = (torch.randn(5, 8), torch.tensor([0, 1, 0, 0, 1]))
    model = convert(Masked().eval(), example)
    checks = torch.ops.aten._assert_tensor_metadata.default
    assert model.reference.graph.find_nodes(op="call_function", target=checks)
    backend, x = Recorder(), torch.randn(3, 8)
    fast = compiled(model, backend)
    with torch.no_grad():
        for mask in (torch.tensor([1, 0, 1]), torch.tensor([0, 0, 0])):
            assert torch.equal(fast(x, mask), model(x, mask))
    assert native(backend.graphs[0].graph) == native(model.graph)


@pytest.mark.parametrize(
    ("name", "rests", "linears"),
    [
        pytest.param("blocks", [(8,)], [7, 7], id="standalone", marks=pytest.mark.slow),
        pytest.param("blocks of integers", [(8,)], [7, 7], id="integers between", marks=pytest.mark.slow),
        pytest.param("one block", [(8,)], [7, 7], id="one", marks=pytest.mark.slow),
        pytest.param("only a block", [(8,)], [2, 2], id="no kernels outside"),
        pytest.param("loop", [(2, 8), (3, 8)], [5, 7], id="loop"),
    ],
)
def test_kernels_inside_modules(name: str, rests: list[tuple[int, ...]], linears: list[int]) -> None:
    float_model, model = lowered(name)
    for batch, rest, count in zip((3, 1), rests * 2, linears, strict=False):
        backend, (x,) = Recorder(), floats(batch, *rest)
        fast = compiled(model, backend)
        with torch.no_grad():
            assert torch.equal(model(x), fast(x))
            assert 15 < sqnr(float_model(x), fast(x)) < 60
        targets = [str(node.target) for node in backend.graphs[0].graph.nodes]
        assert targets.count("torchq_compat_native.linear.default") == count
        assert not [target for target in targets if target.startswith("aten.linear")]


@pytest.mark.parametrize("name", ["only a block", pytest.param("loop", marks=pytest.mark.slow)])
def test_other_weights_reach_kernels_inside_modules(name: str) -> None:
    (x,) = floats(4, *MODELS[name][2])
    _, model = lowered(name)
    fast = compiled(model)
    with torch.no_grad():
        before = fast(x)
        for path, value in model.state_dict().items():
            if value.dtype is torch.int8 and not path.startswith("out"):
                value.copy_(value.flip(0))
        after = fast(x)
        assert torch.equal(after, model(x))
        assert sqnr(before, after) < 20
        other = with_other_weights(name)
        assert not torch.equal(other(x), after)
        model.load_state_dict(other.state_dict())
        assert torch.equal(fast(x), other(x))


def test_standalone_modules_of_a_reference_model() -> None:
    """Dynamo calls ``forward`` of a graph module, not ``__call__``, and cannot look at its graph."""
    _, model = lowered("blocks of integers")
    reference, (x,) = model.reference, floats(4, 8)
    with torch.no_grad():
        assert torch.equal(compiled(reference)(x), reference(x))


@pytest.mark.slow
def test_standalone_modules_with_other_qparams() -> None:
    _, model = lowered("blocks of integers")
    reference, (x,) = model.reference, floats(4, 8)
    with torch.no_grad():
        loaded = with_other_weights("blocks of integers").reference
        loaded.load_state_dict(reference.state_dict())
        assert torch.equal(compiled(copy.deepcopy(loaded))(x), reference(x))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["between", "images"])
def test_inductor(name: str) -> None:
    _, example, rest, _ = MODELS[name]
    example, (_, model) = example(3, *rest), lowered(name)
    fast = compiled(model, "inductor")
    with torch.no_grad():
        for expected, found in zip(leaves(model(*example)), leaves(fast(*example)), strict=True):
            assert sqnr(expected, found) > 40
