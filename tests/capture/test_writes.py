"""Writes in place through any name: the graph returns what the float model returns, and writes nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import (
    QConfigMapping,
    get_default_qat_qconfig_mapping,
    get_default_qconfig,
    get_default_qconfig_mapping,
)
from torch.fx import GraphModule
from torch.nn import functional as F

import torchq_compat as tc
from tests.helpers.once import made_once
from tests.helpers.oracle import activation_qparams, by_fx, by_us, fx_activation_qparams, sqnr
from tests.parity.fx_decisions import quantized_by_fx, quantized_by_us
from torchq_compat.capture.torch_export import capture_freely
from torchq_compat.capture.writes import make_out_of_place
from torchq_compat.errors import CaptureError

Values = list[Tensor]

#: Views of a tensor with three dimensions of at least 2.
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "slice": lambda v: v[1:],
    "slice of steps": lambda v: v[:, ::2],
    "narrow": lambda v: v.narrow(-1, 0, 2),
    "transpose": lambda v: v.transpose(0, -1),
    "permute": lambda v: v.permute(2, 0, 1),
    "movedim": lambda v: v.movedim(0, 2),
    "mT": lambda v: v.mT,
    "unsqueezed": lambda v: v.unsqueeze(1).squeeze(1),
    "view": lambda v: v.reshape(-1).view(v.shape),
    "detach": lambda v: v.detach(),
    "alias": lambda v: torch.ops.aten.alias.default(v),
    "view_as": lambda v: v.view_as(v),
    "flattened": lambda v: v.flatten(1).unflatten(1, v.shape[1:]),
}
#: Parts with fewer dimensions, used only as targets of writes.
PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "select": lambda v: v[0],
    "negative select": lambda v: v[:, -1],
    "diagonal": lambda v: v.diagonal(0, 1, 2),
    "element": lambda v: v[0, 1, 0],
}
WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add_": lambda v, x: v.add_(x.sum()),
    "relu_": lambda v, x: F.relu_(v),
    "mul_": lambda v, x: v.mul_(-1.5),
    "copy_": lambda v, x: v.copy_(v.clone() * 2),
    "broadcast": lambda v, x: v.copy_(x.mean()),
    "fill_": lambda v, x: v.fill_(0.5),
    "zero_": lambda v, x: v.zero_(),
    "masked_fill_": lambda v, x: v.masked_fill_(v > 0.5, -0.25),
    "clamp_": lambda v, x: v.clamp_(-0.5, 0.75),
}


class Program(nn.Module):
    """Random views, parts, writes and reads of one value, drawn from ``seed``."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        pick = random.Random(self.seed)
        names, read = [x * 2 - 1], list[Tensor]()
        for _ in range(pick.randint(2, 7)):
            name, action = pick.choice(names), pick.random()
            if action < 0.35:
                names.append(pick.choice(list(VIEWS.values()))(name))
            elif action < 0.8:
                part = pick.choice([lambda v: v, *PARTS.values()])(name)
                result = pick.choice(list(WRITES.values()))(part, x)
                read.append(result.sum())
            else:
                read.append(name * 3)
            if pick.random() < 0.3:
                names.append(pick.choice(names) + 1)
        return (*(name.clone() for name in names), *read)


def writes_of(graph_module: GraphModule) -> list[str]:
    targets = [node.target for node in graph_module.graph.nodes]
    return [
        str(target) for target in targets if getattr(getattr(target, "_schema", None), "is_mutable", False)
    ]


@made_once
def captured(seed: int) -> GraphModule:
    return capture_freely(Program(seed), (torch.randn(3, 3, 3),))


@pytest.mark.parametrize(
    "seed", [*range(15), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(15, 1_000))]
)
def test_random_programs(seed: int) -> None:
    program, x = Program(seed), torch.randn(3, 3, 3)
    expected, graph_module = program(x), captured(seed)
    before = len(writes_of(graph_module))
    make_out_of_place(graph_module)
    graph_module.graph.lint()
    assert not writes_of(graph_module), before
    found = graph_module(x)
    for ours, theirs in zip(found, expected, strict=True):
        # Sums over another memory layout round differently.
        torch.testing.assert_close(ours, theirs)


def test_random_programs_write() -> None:
    counts = [len(writes_of(captured.itself(seed))) for seed in range(15)]
    assert sum(count > 0 for count in counts) > 10
    assert max(counts) > 2


def slice_of_channels(x: Tensor) -> Tensor:
    x[:, 0] += 5
    return x


def filled_by_parts(x: Tensor) -> Tensor:
    """Masks, paddings and loop outputs as models write them."""
    made = torch.zeros_like(x)
    made[:, :2] = x[:, :2]
    made[:, 2:] = x[:, 2:] * 2
    return made


def by_another_name(x: Tensor) -> Tensor:
    y = x.view(x.shape[0], 4, -1)
    F.relu_(y)
    return x


def one_by_one(x: Tensor) -> Tensor:
    for index in range(4):
        x[:, index] = x[:, index] * (index + 1)
    return x


def masked(x: Tensor) -> Tensor:
    part = x[:, 0]
    part.masked_fill_(part < -9, 3.0)
    return x + part.unsqueeze(1)


def through_a_dead_identity(x: Tensor) -> Tensor:
    """timm's blocks: conv, batch norm, Identity, in-place activation."""
    y = torch.ops.aten.alias.default(x)
    return F.hardtanh_(y, 0.0, 6.0) + x


def without_gradients(x: Tensor) -> Tensor:
    with torch.no_grad():
        left, right = x.chunk(2, 1)
        left.add_(right)
    return x


def by_index(x: Tensor) -> Tensor:
    x[torch.arange(x.shape[0]), 1] = x[:, 2].clone()
    return x


@torch.no_grad()
def into_out(x: Tensor) -> Tensor:
    """``out=`` whole, a view, the operand itself, and two at once."""
    total, other = torch.empty_like(x), torch.empty_like(x[:, 0])
    torch.add(x, 1.0, out=total)
    torch.mul(total[:, :2], 2.0, out=total[:, :2])
    torch.sub(total, x, out=x)
    torch.max(total, 1, out=(other, torch.empty_like(other, dtype=torch.long)))
    return x + total + other.unsqueeze(1)


BETWEEN: list[Callable[[Tensor], Tensor]] = [
    slice_of_channels,
    filled_by_parts,
    by_another_name,
    one_by_one,
    masked,
    through_a_dead_identity,
    without_gradients,
    by_index,
]


class Net(nn.Module):
    def __init__(self, between: Callable[[Tensor], Tensor], writes_into_input: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1)
        self.between, self.writes_into_input = between, writes_into_input

    def forward(self, x: Tensor) -> Tensor:
        if self.writes_into_input:
            x[:, :, 0] = 0.5
            x.mul_(1.5)
        return self.second(self.between(self.first(x)))


#: Without constants: a constant shares the fake-quantize of the tensor it is added to, and the moving average
#: of one step has not seen the constant.
TRAINED = [by_another_name, masked, by_index]


class Nets(nn.Module):
    """Nets that have nothing but their input in common."""

    def __init__(self, betweens: list[Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        self.nets = nn.ModuleDict({each.__name__: Net(each) for each in betweens})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {name: net(x) for name, net in self.nets.items()}


@pytest.mark.parametrize("is_qat", [False, True], ids=["ptq", "qat"])
def test_converted_models_see_what_was_written(is_qat: bool, subtests: pytest.Subtests) -> None:
    torch.manual_seed(0)
    model, x = Nets(TRAINED if is_qat else BETWEEN).train(is_qat), torch.randn(2, 3, 8, 8)
    mapping = (get_default_qat_qconfig_mapping if is_qat else get_default_qconfig_mapping)("x86")
    prepared = (tc.prepare_qat_fx if is_qat else tc.prepare_fx)(model, mapping, (x,))
    prepared(x)
    prepared.eval(), model.eval()
    forms = tc.convert_to_reference_fx(prepared), tc.convert_fx(prepared)
    batches = x, torch.cat((x, x.flip(0), x))
    with torch.no_grad():
        results = [(model(batch), *(form(batch) for form in forms)) for batch in batches]
    for name in model.nets:
        with subtests.test(between=name):
            assert {row.action for row in tc.explain(prepared).find(f"nets.{name}.first")} >= {"quantized"}
            for floats, *converted in results:
                for each in converted:
                    assert 24 < sqnr(floats[name], each[name]) < 60


def test_an_identity_in_front_of_an_op_in_place_adds_no_op() -> None:
    """timm's blocks; repeated behind the write, the identity would have a range of its own."""
    layers = nn.Conv2d(3, 4, 3), nn.Identity(), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3)
    model, batches = nn.Sequential(*layers).eval(), [(torch.randn(2, 3, 8, 8),) for _ in range(2)]
    prepared, ours = by_us(model, get_default_qconfig_mapping("x86"), batches)
    fx_prepared, theirs = by_fx(model, get_default_qconfig_mapping("x86"), batches)
    assert quantized_by_us(prepared) == quantized_by_fx(fx_prepared)
    assert activation_qparams(ours) == fx_activation_qparams(theirs)
    floats = [node for node in ours.graph.nodes if str(node.target).startswith("aten.")]
    assert [str(node.target).split(".")[1] for node in floats] == ["conv2d", "alias", "relu", "conv2d"]


@pytest.mark.parametrize("between", [into_out, into_out.__wrapped__], ids=["block", "model"])
def test_out_arguments(between: Callable[[Tensor], Tensor]) -> None:
    """torch refuses ``out=`` with gradients on, and prepare is called with them on."""
    torch.manual_seed(0)
    model, x = Net(between).eval(), torch.randn(2, 3, 8, 8)
    prepared = tc.prepare_fx(model, get_default_qconfig_mapping("x86"), (x,))
    prepared(x)
    with torch.no_grad():
        for converted in (tc.convert_to_reference_fx(prepared), tc.convert_fx(prepared)):
            assert 24 < sqnr(model(x), converted(x)) < 60


class Average(nn.Module):
    """Keeps a moving average of its results, as codebooks do, and writes whole tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("last", torch.zeros(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        made = self.fc(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(made.mean(0), alpha=0.1)
            self.last.copy_(made)
            torch.mul(self.last, 2.0, out=self.last)
        kept = torch.empty_like(made)
        kept.copy_(made)
        return self.out(kept)


@pytest.mark.filterwarnings("ignore:torch.no_grad at")
def test_buffers_written_without_gradients_are_no_part_of_the_next_step() -> None:
    torch.manual_seed(0)
    model, x = Average().train(), torch.randn(4, 8)
    prepared = tc.prepare_qat_fx(model, get_default_qat_qconfig_mapping("x86"), (x,))
    prepared(x)
    prepared.zero_grad()
    for _ in range(2):
        prepared(x).square().sum().backward()
        model(x).square().sum().backward()
    assert 15 < sqnr(model.fc.weight.grad, prepared.get_parameter("fc.weight").grad) < 60  # type: ignore[arg-type]
    assert 15 < sqnr(model.last, prepared.get_buffer("last")) < 60


@pytest.mark.filterwarnings("ignore")
def test_an_input_is_written_and_read() -> None:
    torch.manual_seed(0)
    model, x = Net(slice_of_channels, writes_into_input=True).eval(), torch.randn(2, 3, 8, 8)
    prepared = tc.prepare_fx(model, get_default_qconfig_mapping("x86"), (x.clone(),))
    prepared(x.clone())
    for converted in (tc.convert_to_reference_fx(prepared), tc.convert_fx(prepared)):
        theirs, ours = x.clone(), x.clone()
        assert 24 < sqnr(model(theirs), converted(ours)) < 60
        assert 24 < sqnr(theirs, ours) < 60
        assert sqnr(theirs, x) < 10


def test_a_view_without_a_form_out_of_place_is_refused() -> None:
    def overlapping(x: Tensor) -> Tensor:
        x.unfold(3, 2, 2).mul_(2)
        return x

    with pytest.raises(CaptureError, match=r"aten\.unfold\.default at test_writes\.py:\d+ .*\n.*clone"):
        tc.prepare_fx(Net(overlapping).eval(), get_default_qconfig_mapping("x86"), (torch.randn(2, 3, 8, 8),))


class Cache(nn.Module):
    """Stores its result in a buffer, as decoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.out = nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("cache", torch.zeros(4, 6, 8))

    def forward(self, x: Tensor) -> Tensor:
        self.cache[:, : x.shape[1]] = self.key(x)
        return self.out(self.cache.mean(1))


@pytest.mark.parametrize("with_gradients", [False, True])
def test_a_buffer_is_written_and_read(with_gradients: bool) -> None:
    torch.manual_seed(0)
    model, first, second = Cache().eval(), torch.randn(4, 5, 8), torch.randn(4, 2, 8)
    with torch.set_grad_enabled(with_gradients):
        prepared = tc.prepare_fx(model, get_default_qconfig_mapping("x86"), (first,))
        assert not model.cache.any()
        for batch in (first, second):
            prepared(batch)
        for converted in (tc.convert_to_reference_fx(prepared), tc.convert_fx(prepared)):
            theirs = Cache().eval()
            theirs.load_state_dict(model.state_dict())
            converted.cache.detach_().zero_()
            for batch in (first, second):
                assert 25 < sqnr(theirs(batch), converted(batch)) < 60
            assert 25 < sqnr(theirs.cache, converted.cache) < 60


class IdentityThenWrite(nn.Module):
    """What ``fuse_modules`` leaves behind: an Identity, whose result a ReLU writes into, and two readers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.bn = nn.Identity()
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn(self.conv(x)))
        return torch.sigmoid(self.conv2(y)) + torch.exp(y)


def test_a_write_behind_an_identity_needs_no_op_to_put_the_value_together() -> None:
    torch.manual_seed(0)
    model, x = IdentityThenWrite().eval(), torch.randn(4, 3, 8, 8)
    qconfig = get_default_qconfig("qnnpack")
    mapping = QConfigMapping().set_global(None)
    for name in ("conv", "bn", "relu", "conv2"):
        mapping.set_module_name(name, qconfig)
    _, ours = by_us(model, mapping, [(x,)])
    _, theirs = by_fx(model, mapping, [(x,)])
    assert not [node for node in ours.graph.nodes if "reshape" in str(node.target)]
    assert activation_qparams(ours) == fx_activation_qparams(theirs)
    assert sqnr(theirs(x), ours(x)) > 60
    assert 25 < sqnr(model(x), ours(x)) < 60
