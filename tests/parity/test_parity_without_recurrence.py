"""Models without recurrence: the same ops quantized, equal qparams, outputs within one step of FX's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import (
    QConfigMapping,
    float_qparams_weight_only_qconfig,
    get_default_qconfig,
    get_default_qconfig_mapping,
)

from tests.helpers.captured_once import captured_once
from tests.helpers.once import made_once
from tests.helpers.oracle import (
    activation_qparams,
    by_fx,
    by_us,
    fx_activation_qparams,
    leaves,
    quantize_nodes,
    sqnr,
)

BACKENDS = ("x86", "fbgemm", "onednn", "qnnpack")


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(16, 24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, 16), nn.Identity()
        )
        self.head = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.body(x)))


class Arithmetic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 16)
        self.b = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.a(x), self.b(x)
        joined = torch.cat([a + b, a * b, b + 1.5], -1)
        return torch.relu(joined) * 2.0


class FixedQParams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)
        self.softmax = nn.Softmax(-1)
        self.tanh = nn.Tanh()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.fc(x)
        return torch.sigmoid(y), self.tanh(y), self.softmax(y)


class Shapes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 12)
        self.out = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x).transpose(0, 1)
        y = y.reshape(y.shape[0], y.shape[1], 3, 4).permute(1, 0, 2, 3)
        return self.out(y.mean(2).unsqueeze(1)).squeeze(1).flatten(1)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.fc(x)))


class UnknownOps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.gelu(self.fc(x)) - x.abs().sqrt())


MODELS: tuple[Callable[[], nn.Module], ...] = (MLP, Arithmetic, FixedQParams, Shapes, Norm, UnknownOps)


def batches(count: int, *shape: int) -> list[tuple[Tensor]]:
    return [(torch.randn(shape),) for _ in range(count)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_equal_qparams_and_outputs_within_one_step(make: Callable[[], nn.Module], backend: str) -> None:
    torch.manual_seed(0)
    model = make().eval()
    mapping = get_default_qconfig_mapping(backend)
    data = batches(3, 6, 7, 16)
    with captured_once((__name__, make)):
        _, ours = by_us(model, mapping, data)
    _, theirs = by_fx(model, mapping, data)
    assert activation_qparams(ours) == fx_activation_qparams(theirs)
    # Another batch size and length than prepared for.
    x = torch.randn(3, 11, 16)
    with torch.no_grad():
        for mine, fx_result, exact in zip(leaves(ours(x)), leaves(theirs(x)), leaves(model(x)), strict=True):
            assert_within_one_step(mine, fx_result)
            assert 15 < sqnr(exact, mine) < 60


def assert_within_one_step(mine: Tensor, theirs: Tensor) -> None:
    """Assert a difference of at most one step of the common qparams, which is the floor:
    torch.quantize_per_tensor and its decomposed form round a few values in a million differently."""
    levels = torch.unique(torch.cat([mine.flatten(), theirs.flatten()]))
    step = float((levels[1:] - levels[:-1]).median())
    difference = (mine - theirs).abs()
    assert float(difference.max()) <= 1.01 * step
    assert float((difference > 0.01 * step).float().mean()) < 0.01


def test_linear_relu_is_one_op_with_no_observer_between() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    _, converted = by_us(model, get_default_qconfig_mapping("qnnpack"), batches(2, 3, 4))
    relu = next(n for n in converted.graph.nodes if n.target is torch.ops.aten.relu.default)
    assert relu.args[0].target is torch.ops.aten.linear.default


def test_embedding_is_weight_only() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 4)).eval()
    mapping = get_default_qconfig_mapping("x86").set_object_type(
        nn.Embedding, float_qparams_weight_only_qconfig
    )
    data = [(torch.randint(0, 20, (4, 5)),) for _ in range(3)]
    _, ours = by_us(model, mapping, data)
    _, theirs = by_fx(model, mapping, data)
    weights = [m for n, m in ours.named_buffers() if m.dtype is torch.uint8]
    assert [tuple(w.shape) for w in weights] == [(20, 16)]
    assert_within_one_step(ours(*data[0]), theirs(*data[0]))


def test_static_qconfig_leaves_embedding_float_and_says_why() -> None:
    from torchq_compat import explain

    model = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 4)).eval()
    prepared, _ = by_us(model, get_default_qconfig_mapping("x86"), [(torch.randint(0, 20, (4, 5)),)])
    (decision,) = explain(prepared).find("0")
    assert decision.action == "float"
    assert "activation uint8" in decision.reason


def test_reduced_range_saturates_where_fx_does() -> None:
    """quant_max is 127 with x86's reduced range; FX clamps at the dtype's 255, plain PT2E would at 127."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8)).eval()
    mapping = get_default_qconfig_mapping("x86")
    data = batches(4, 16, 8)
    _, ours = by_us(model, mapping, data)
    _, theirs = by_fx(model, mapping, data)
    wide = torch.randn(64, 8) * 3
    assert_within_one_step(ours(wide), theirs(wide))
    assert float(ours(wide).abs().max()) > 1.3 * float(ours(data[0][0]).abs().max())
    for node in quantize_nodes(ours):
        assert node.args[3:5] == (0, 255)


class Paths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


class Additions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.add(self.c(torch.add(self.b(self.a(x)), x)), x)


@made_once
def with_data(kind: type[nn.Module]) -> tuple[nn.Module, list[tuple[Tensor]]]:
    return kind().eval(), batches(2, 3, 4)


@pytest.mark.parametrize(
    ("mapping", "quantized"),
    [
        (QConfigMapping().set_global(get_default_qconfig("x86")), {"a", "b.0", "b.1"}),
        (QConfigMapping().set_object_type(nn.Linear, get_default_qconfig("x86")), {"a", "b.0", "b.1"}),
        (QConfigMapping().set_module_name("b", get_default_qconfig("x86")), {"b.0", "b.1"}),
        (
            QConfigMapping().set_global(get_default_qconfig("x86")).set_module_name("b", None),
            {"a"},
        ),
        (
            QConfigMapping()
            .set_module_name_regex(r"b\.\d", get_default_qconfig("x86"))
            .set_module_name("b.1", None),
            {"b.0"},
        ),
        (
            {
                "": None,
                "object_type": [(nn.Linear, get_default_qconfig("x86"))],
                "module_name": [("a", None)],
            },
            {"b.0", "b.1"},
        ),
    ],
)
def test_selectors_and_their_precedence(mapping: object, quantized: set[str]) -> None:
    from torchq_compat import explain

    model, data = with_data(Paths)
    prepared, _ = by_us(model, mapping, data)
    assert {d.path for d in explain(prepared) if d.action == "quantized"} == quantized


def test_sigmoid_of_a_float_input_keeps_its_input_range() -> None:
    """FX quantizes the input with the output's qparams: sigmoid(-5) becomes 0.5 (B7)."""
    model = nn.Sequential(nn.Sigmoid()).eval()
    mapping = get_default_qconfig_mapping("qnnpack")
    data = [(torch.linspace(-6, 6, 64).reshape(8, 8),)]
    _, ours = by_us(model, mapping, data)
    _, theirs = by_fx(model, mapping, data)
    x = torch.full((1, 8), -5.0)
    assert float(theirs(x)[0, 0]) == pytest.approx(0.5, abs=0.01)
    assert float(ours(x)[0, 0]) == pytest.approx(0.0067, abs=0.01)


@pytest.mark.parametrize("object_type", [nn.Linear, torch.add])
def test_call_order_rule_switches_one_call_off(object_type: object) -> None:
    from torchq_compat import explain

    model, data = with_data(Additions)
    mapping = get_default_qconfig_mapping("x86").set_module_name_object_type_order("", object_type, 1, None)
    prepared, ours = by_us(model, mapping, data)
    _, theirs = by_fx(model, mapping, data)
    off = {nn.Linear: "b", torch.add: "add_1"}[object_type]
    assert {d.path for d in explain(prepared).left_float()} == {off}
    assert len(activation_qparams(ours)) == len(fx_activation_qparams(theirs))
