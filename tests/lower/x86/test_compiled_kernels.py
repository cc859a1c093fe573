"""torch.compile of lowered models: the same integer kernels, the floats between them left to the compiler."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import (
    QConfigMapping,
    default_dynamic_qconfig,
    get_default_qconfig_mapping,
)

import torchq_compat as tc
from tests.helpers.oracle import calibrate, leaves, sqnr
from tests.helpers.recording_backend import Recorder
from torchq_compat.custom_config import PrepareCustomConfig
from torchq_compat.errors import InputError, QuantizationWarning
from torchq_compat.lower.x86.compiled.region_operator import REGION_OPERATOR

X86 = get_default_qconfig_mapping("x86")


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
        self.layer, self.out = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(x)).mean(1)


def prepare(model: nn.Module, example: tuple[Any, ...], mapping: Any = X86) -> Any:
    return tc.prepare_fx(model, mapping, example, tc.get_default_prepare_custom_config())


def convert(model: nn.Module, example: tuple[Any, ...]) -> Any:
    prepared = prepare(model, example)
    calibrate(prepared, [example])
    return tc.convert_fx(prepared)


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


DYNAMIC = QConfigMapping().set_global(default_dynamic_qconfig)
ONEDNN = get_default_qconfig_mapping("onednn")
QNNPACK = get_default_qconfig_mapping("qnnpack")


@pytest.mark.parametrize(
    ("kind", "example", "rest", "mapping", "regions"),
    [
        pytest.param(Between, floats, (8,), X86, 4, id="floats between"),
        pytest.param(Between, floats, (8,), DYNAMIC, 3, id="dynamic"),
        pytest.param(Images, images, (), X86, 2, id="images"),
        pytest.param(Images, channels_last, (), X86, 2, id="channels last"),
        pytest.param(Images, images, (), ONEDNN, 2, id="onednn", marks=pytest.mark.slow),
        pytest.param(Images, images, (), QNNPACK, 2, id="qnnpack", marks=pytest.mark.slow),
        pytest.param(Text, ids, (7,), X86, 1, id="recurrent"),
        pytest.param(Attending, floats, (5, 16), X86, 3, id="attention"),
    ],
)
def test_the_bits_of_the_lowered_model(
    kind: Any, example: Any, rest: tuple[int, ...], mapping: Any, regions: int
) -> None:
    float_model = kind().eval()
    prepared = prepare(float_model, example(3, *rest), mapping)
    calibrate(prepared, [example(64, *rest)])
    model = tc.convert_fx(prepared)
    backend = Recorder()
    fast = compiled(model, backend)
    with torch.no_grad():
        for batch in (3, 5, 1):
            x = example(batch, *rest)
            plain, lowered, found = float_model(*x), model(*x), fast(*x)
            assert all(map(torch.equal, leaves(lowered), leaves(found)))
            assert all(15 < sqnr(a, b) < 60 for a, b in zip(leaves(plain), leaves(found), strict=True))
    targets = [str(node.target) for node in backend.graphs[0].graph.nodes]
    assert targets.count(str(REGION_OPERATOR)) == regions == len(model.kernel_regions())
    if kind is not Attending:  # An attention's graphs are its own.
        assert not [target for target in targets if target.startswith(("aten.linear", "aten.conv"))]


@pytest.fixture
def between() -> Any:
    return convert(Between().eval(), floats(3, 8))


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
        other = convert(Between().eval(), floats(3, 8))
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


def test_torch_export_sees_no_kernels(between: Any) -> None:
    x = floats(4, 8)
    program = torch.export.export(between, x)
    assert REGION_OPERATOR not in {node.target for node in program.graph.nodes}
    assert torch.equal(program.module()(*x)[0], between.reference(*x)[0])


class Counting(nn.Module):
    """A model that writes to its state; the order of its nodes is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return self.fc(x) * self.calls


def test_a_model_that_writes_to_its_state_is_compiled_as_the_q_dq_graph() -> None:
    model = convert(Counting().eval(), floats(3, 8))
    assert model.kernel_regions() == ()
    other = copy.deepcopy(model)
    fast, (x,) = compiled(model), floats(3, 8)
    with torch.no_grad():
        for _ in range(3):
            assert sqnr(other(x), fast(x)) > 40


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
    assert len(model.kernel_regions()) == 2
    backend, x = Recorder(), torch.randn(3, 8)
    fast = compiled(model, backend)
    with torch.no_grad():
        for mask in (torch.tensor([1, 0, 1]), torch.tensor([0, 0, 0])):
            assert torch.equal(fast(x, mask), model(x, mask))
    assert backend.calls(REGION_OPERATOR) == 2
    assert "_assert_tensor_metadata" in model._portable().code


def test_a_call_without_its_model_is_an_error_of_ours(between: Any) -> None:
    region = between.kernel_regions()[0]
    with pytest.raises(InputError, match=r"Hint: compile it again"):
        REGION_OPERATOR([floats(4, 8)[0]], [], 10**9, 0, region.digest)


def test_results_own_their_memory() -> None:
    """One value moved twice: the compiler may write into one result and read the other."""
    model = convert(MovedTwice().eval(), floats(3, 8))
    (region,) = model.kernel_regions()
    results = region.run(floats(3, 8), ())
    assert len(results) == len({result.data_ptr() for result in results}) == len(region.outputs)
    assert all(result.is_contiguous() for result in results)


class MovedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        y = self.fc(x)
        return y, y.reshape(-1, 4), y.t()


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


def nested(kind: Any, config: Any, *rest: int, mapping: Any = X86) -> tuple[nn.Module, Any]:
    model = kind().eval()
    prepared = tc.prepare_fx(model, mapping, floats(3, *rest), config)
    calibrate(prepared, [floats(64, *rest)])
    return model, tc.convert_fx(prepared)


BOTH = ("first", "second")


@pytest.mark.parametrize(
    ("kind", "config", "rests", "regions"),
    [
        pytest.param(Blocks, standalone(*BOTH), [(8,)], [7, 7], id="standalone", marks=pytest.mark.slow),
        pytest.param(
            Blocks,
            standalone(*BOTH, integers=True),
            [(8,)],
            [7, 7],
            id="integers between",
            marks=pytest.mark.slow,
        ),
        pytest.param(Blocks, standalone("second"), [(8,)], [5, 5], id="one", marks=pytest.mark.slow),
        pytest.param(OnlyBlock, standalone("first"), [(8,)], [2, 2], id="no kernels outside"),
        pytest.param(Steps, standalone(), [(3, 8), (5, 8)], [4, 6], id="loop"),
    ],
)
def test_kernels_inside_modules(
    kind: Any, config: Any, rests: list[tuple[int, ...]], regions: list[int]
) -> None:
    float_model, model = nested(kind, config, *rests[0])
    for batch, rest, count in zip((3, 1), rests * 2, regions, strict=False):
        backend, (x,) = Recorder(), floats(batch, *rest)
        fast = compiled(model, backend)
        with torch.no_grad():
            assert torch.equal(model(x), fast(x))
            assert 15 < sqnr(float_model(x), fast(x)) < 60
        targets = [str(node.target) for node in backend.graphs[0].graph.nodes]
        assert targets.count(str(REGION_OPERATOR)) == count
        assert not [target for target in targets if target.startswith("aten.linear")]


@pytest.mark.parametrize("kind", [Blocks, pytest.param(Steps, marks=pytest.mark.slow)])
def test_other_weights_reach_kernels_inside_modules(kind: Any) -> None:
    rest = (8,) if kind is Blocks else (3, 8)
    (x,) = floats(4, *rest)
    _, model = nested(kind, standalone(*BOTH) if kind is Blocks else standalone(), *rest)
    fast = compiled(model)
    with torch.no_grad():
        before = fast(x)
        for name, value in model.state_dict().items():
            if value.dtype is torch.int8 and not name.startswith("out"):
                value.copy_(value.flip(0))
        after = fast(x)
        assert torch.equal(after, model(x))
        assert sqnr(before, after) < 20
        _, other = nested(kind, standalone(*BOTH) if kind is Blocks else standalone(), *rest)
        model.load_state_dict(other.state_dict())
        assert torch.equal(fast(x), other(x))


def test_standalone_modules_of_a_reference_model() -> None:
    """Dynamo calls ``forward`` of a graph module, not ``__call__``, and cannot look at its graph."""
    _, model = nested(Blocks, standalone(*BOTH, integers=True), 8)
    reference, (x,) = model.reference, floats(4, 8)
    with torch.no_grad():
        assert torch.equal(compiled(reference)(x), reference(x))


@pytest.mark.slow
def test_standalone_modules_with_other_qparams() -> None:
    _, model = nested(Blocks, standalone(*BOTH, integers=True), 8)
    reference, (x,) = model.reference, floats(4, 8)
    with torch.no_grad():
        loaded = nested(Blocks, standalone(*BOTH, integers=True), 8)[1].reference
        loaded.load_state_dict(reference.state_dict())
        assert torch.equal(compiled(copy.deepcopy(loaded))(x), reference(x))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Between, Images])
def test_inductor(kind: Any) -> None:
    example = floats(3, 8) if kind is Between else images(3)
    model = convert(kind().eval(), example)
    fast = compiled(model, "inductor")
    with torch.no_grad():
        for expected, found in zip(leaves(model(*example)), leaves(fast(*example)), strict=True):
            assert sqnr(expected, found) > 40
