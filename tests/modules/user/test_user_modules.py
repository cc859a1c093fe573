"""A user's own custom modules: what FX did for the classic one, and all other forms of calls and results."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
import torch.ao.nn.quantized as nnq
import torch.ao.nn.quantized.dynamic as nnqd
import torch.ao.quantization.quantize_fx as fx
from torch import Tensor, nn
from torch.ao.quantization import (
    FakeQuantizeBase,
    MinMaxObserver,
    QConfigMapping,
    default_dynamic_qconfig,
    default_qconfig,
    disable_fake_quant,
    disable_observer,
    float_qparams_weight_only_qconfig,
    get_default_qat_qconfig_mapping,
)
from torch.ao.quantization.fx.custom_config import PrepareCustomConfig
from torch.ao.quantization.quant_type import QuantType
from torch.fx import GraphModule

import torchq_compat as tc
from tests.helpers.engines import with_exact_sums
from tests.helpers.lstm_flow import uniform
from tests.helpers.once import made_once
from tests.helpers.oracle import calibrate, leaves, quantize_nodes, sqnr
from tests.helpers.recurrent_points import together
from tests.helpers.user_modules import (
    CLASSIC,
    MAPPING,
    Around,
    Custom,
    Mixer,
    ObservedCustom,
    StaticCustom,
    by_ours,
    classic,
    mirror,
    rows,
    settings_for,
    with_weights_of,
)
from torchq_compat.custom_modules import UserModuleHandler, register
from torchq_compat.errors import CustomModuleError, QuantizationWarning
from torchq_compat.modules import registry


def by_theirs(
    model: nn.Module, data: Sequence[tuple[Any, ...]], configs: tuple[Any, Any], mapping: Any = MAPPING
) -> tuple[GraphModule, GraphModule]:
    """Prepare and convert by FX, to quantized modules."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = fx.prepare_fx(copy.deepcopy(model), mapping, data[0], configs[0])
        calibrate(prepared, data)
        return prepared, with_exact_sums(fx.convert_fx(copy.deepcopy(prepared), configs[1]))


# The classic custom module of torch.ao's documentation and tests.


class DynamicCustom(StaticCustom):
    @classmethod
    def from_observed(cls, observed: nn.Module) -> nn.Module:
        observed.linear.qconfig = observed.qconfig
        return cls(nnqd.Linear.from_float(observed.linear))


class Alone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.custom = Custom()

    def forward(self, x: Tensor) -> Tensor:
        return self.custom(x)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("model_class", [Around, Alone])
@pytest.mark.parametrize(
    "mapping", [QConfigMapping().set_global(default_qconfig), MAPPING], ids=["default", "qnnpack"]
)
def test_the_classic_module_is_bit_equal_with_fx(model_class: type[nn.Module], mapping: Any) -> None:
    model, data = model_class().eval(), rows()
    prepared, converted = by_ours(model, data, CLASSIC, mapping)
    _, theirs = by_theirs(model, data, CLASSIC, mapping)
    assert isinstance(prepared.custom, ObservedCustom)
    assert isinstance(converted.custom, StaticCustom)
    assert isinstance(converted.custom.linear, nnq.Linear)
    ours, of_fx = converted.custom.linear, theirs.custom.linear
    assert (ours.scale, ours.zero_point) == (of_fx.scale, of_fx.zero_point)
    (x,) = rows(1, 64)[0]
    torch.testing.assert_close(prepared(x), model(x), atol=1e-6, rtol=0)
    assert torch.equal(converted(x), theirs(x))
    assert 25 < sqnr(model(x), converted(x)) < 60


class InASequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 3), Custom(), nn.Sequential(Custom(), nn.ReLU()))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def test_custom_modules_in_sequentials_hand_on_their_integers() -> None:
    model, data = InASequence().eval(), rows()
    _, converted = by_ours(model, data, CLASSIC)
    _, theirs = by_theirs(model, data, CLASSIC)
    calls = [n for n in converted.reference.graph.nodes if n.op == "call_module"]
    assert [c.target for c in calls] == ["body.1", "body.2.0"]
    # A single quantize between the two modules.
    (quantize,) = calls[1].args
    assert quantize in quantize_nodes(converted)
    assert quantize.args[0].args[0] is calls[0]
    (x,) = rows(1, 64)[0]
    assert torch.equal(converted(x), theirs(x))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.custom = Custom()

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.custom(x), self.custom(y)


def test_used_twice_on_different_ranges() -> None:
    """FX uses the second call's observer in place of the first's. A legacy class has one set of output
    qparams, which has to cover both calls."""
    model = Twice().eval()
    data = [(uniform(10.0, 16, 3), uniform(2.0, 16, 3)) for _ in range(8)]
    _, ours = by_ours(model, data, CLASSIC)
    _, theirs = by_theirs(model, data, CLASSIC)
    scales = [n.args[1] for n in quantize_nodes(ours)]
    assert scales[0] > 4 * scales[1]
    args = data[0]
    assert all(25 < sqnr(a, b) < 60 for a, b in zip(model(*args), ours(*args), strict=True))
    assert sqnr(model(*args)[0], theirs(*args)[0]) < 10


class FloatCustom(StaticCustom):
    takes_floats = True

    @classmethod
    def from_observed(cls, observed: nn.Module) -> nn.Module:
        return cls(observed.linear)


def test_used_twice_each_call_with_its_own_qparams() -> None:
    """A class with ``takes_floats`` has no output qparams: a call with small values is as accurate."""
    model = Twice().eval()
    data = [(uniform(10.0, 16, 3), uniform(0.1, 16, 3)) for _ in range(8)]
    configs = settings_for(Custom, ObservedCustom, FloatCustom)
    _, ours = by_ours(model, data, configs)
    assert all(30 < sqnr(a, b) < 60 for a, b in zip(model(*data[0]), ours(*data[0]), strict=True))


# Dynamic and weight-only: the class gets its qconfig, the boundary stays float.


class WeightOnlyCustom(StaticCustom):
    @classmethod
    def from_observed(cls, observed: nn.Module) -> nn.Module:
        assert observed.qconfig.weight().dtype is torch.quint8
        return cls(torch.ao.nn.quantized.reference.Linear.from_float(observed.linear, WEIGHT_QPARAMS))


WEIGHT_QPARAMS = {
    "dtype": torch.qint8,
    "qscheme": torch.per_tensor_affine,
    "scale": 0.01,
    "zero_point": 0,
}
OTHER_TYPES = {
    "dynamic": (QuantType.DYNAMIC, default_dynamic_qconfig, DynamicCustom),
    "weight_only": (QuantType.WEIGHT_ONLY, float_qparams_weight_only_qconfig, WeightOnlyCustom),
}


@pytest.mark.parametrize("key", OTHER_TYPES)
def test_mappings_of_other_quantization_types(key: str) -> None:
    """FX's setter refuses them, and FX ignores them if they are set in another way."""
    quant_type, qconfig, quantized = OTHER_TYPES[key]
    with pytest.raises(ValueError, match="only supported for static"):
        PrepareCustomConfig().set_float_to_observed_mapping(Custom, ObservedCustom, quant_type)
    configs = settings_for(Custom, ObservedCustom, quantized, quant_type)
    mapping = QConfigMapping().set_object_type(Custom, qconfig)
    model, data = Around().eval(), rows()
    _, theirs = by_theirs(model, data, configs, mapping)
    assert type(theirs.custom) is Custom
    prepared, converted = by_ours(model, data, configs, mapping)
    assert isinstance(prepared.custom, ObservedCustom)
    assert isinstance(converted.custom, quantized)
    assert quantize_nodes(converted) == []
    (x,) = rows(1, 64)[0]
    by_hand = copy.deepcopy(model)
    by_hand.custom = quantized.from_observed(ObservedCustom.from_float(with_qconfig(by_hand.custom, qconfig)))
    torch.testing.assert_close(prepared(x), model(x), atol=1e-6, rtol=0)
    assert torch.equal(converted(x), by_hand(x))
    assert 25 < sqnr(model(x), converted(x)) < 60


@pytest.mark.parametrize("qconfig", [None, default_dynamic_qconfig], ids=["None", "dynamic"])
def test_a_mapped_class_is_not_traced_whatever_its_qconfig(qconfig: Any) -> None:
    mapping = copy.deepcopy(MAPPING).set_object_type(Custom, qconfig)
    model, data = Around().eval(), rows()
    _, theirs = by_theirs(model, data, CLASSIC, mapping)
    said = nullcontext() if qconfig is None else pytest.warns(QuantizationWarning, match="mapped for static")
    with said:
        _, converted = by_ours(model, data, (CLASSIC[0], None), mapping)
    assert type(theirs.custom) is type(converted.custom) is Custom
    (x,) = rows(1, 64)[0]
    assert sqnr(theirs(x), converted(x)) > 38
    assert 25 < sqnr(model(x), converted(x)) < 60


def with_qconfig(module: nn.Module, qconfig: Any) -> nn.Module:
    module.qconfig = qconfig
    return module


# Small modules with dict inputs and dataclass outputs.


@dataclasses.dataclass(frozen=True)
class Scores:
    logits: Tensor
    extra: dict[str, Any]
    exact: bool = True

    def __post_init__(self) -> None:
        assert self.logits.dim() == 2


class Scorer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)

    def forward(self, batch: dict[str, Tensor | None], *, scale: float = 1.0) -> Scores:
        logits = self.linear(batch["x"]) * scale
        if batch["mask"] is not None:
            logits = logits * batch["mask"]
        return Scores(logits, {"sums": (logits.sum(-1), [logits.argmax(-1)])})


class ObservedScorer(Scorer):
    quantized_inputs: ClassVar = {"batch.mask": None}
    from_float = classmethod(lambda cls, module: with_weights_of(cls(), module))


class QuantizedScorer(Scorer):
    takes_floats = True
    from_observed = classmethod(lambda cls, module: with_weights_of(cls(), module))


SCORER = settings_for(Scorer, ObservedScorer, QuantizedScorer)


class ScoresTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.scorer = Scorer()
        self.out = nn.Linear(6, 2)

    def forward(self, x: Tensor, mask: Tensor) -> dict[str, Any]:
        first = self.scorer({"mask": mask, "x": self.inner(x)}, scale=0.5)
        second = self.scorer({"x": x, "mask": None})
        return {
            "sum": self.out(first.logits) + self.out(second.logits),
            "first": first.extra["sums"],
            "second": second.extra,
            "exact": first.exact,
        }


def scorer_data(size: int = 16) -> tuple[Tensor, Tensor]:
    return uniform(1.0, size, 4), (torch.rand(size, 6) > 0.3).float()


@made_once
def scores_twice() -> tuple[nn.Module, list[tuple[Tensor, Tensor]], GraphModule, GraphModule]:
    """Return (float, data, prepared, converted)."""
    model, data = ScoresTwice().eval(), [scorer_data() for _ in range(5)]
    return model, data, *by_ours(model, data, SCORER)


def test_a_dict_in_and_a_dataclass_out() -> None:
    model, data, prepared, converted = scores_twice()
    x, mask = data[0]
    exact, observed, found = model(x, mask), prepared(x, mask), converted(x, mask)
    assert found["exact"] is True
    assert exact["first"][1][0].dtype is found["first"][1][0].dtype is torch.int64
    for a, b in zip(leaves(exact), leaves(observed), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)
    for a, b in zip(leaves(exact), leaves(found), strict=True):
        if a.is_floating_point():
            assert 25 < sqnr(a, b) < 60
    # x, the inner linear and the module's results are quantized, the mask is not.
    (mask_node,) = [n for n in converted.graph.nodes if n.target == "mask"]
    assert {user.op for user in mask_node.users} == {"call_module"}
    assert converted(*scorer_data(3))["sum"].shape == (3, 2)


# Every form of call and result.


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


class OfNamedTuple(Mixer):
    def forward(self, pair: Pair) -> Pair:
        return Pair(self.linear(pair.right), pair.left + pair.right)


class OfList(Mixer):
    def forward(self, items: list[Tensor]) -> list[Tensor]:
        return [self.linear(item) for item in reversed(items)]


class OfNested(Mixer):
    def forward(self, nested: Any) -> Any:
        (a, named), [c] = nested
        b = named["b"]
        return {"out": (self.linear(a), [b * c]), "pair": Pair(a + b, c)}


class OfOptional(Mixer):
    def forward(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        y = self.linear(x)
        return y if bias is None else y + bias, bias


class OfPlainValues(Mixer):
    def forward(self, x: Tensor, mode: str, factors: tuple[float, ...], *, flip: bool = False) -> Any:
        y = self.linear(x) * factors[0] if mode == "scaled" else self.linear(x)
        return (-y if flip else y), mode, len(factors)


class OfKeywords(Mixer):
    def forward(self, x: Tensor, *others: Tensor, bias: Tensor, **more: Tensor) -> Tensor:
        return self.linear(x) + sum(others) + bias * more["gain"]


class OfSizes(Mixer):
    def forward(self, x: Tensor, width: int, count: int) -> tuple[Tensor, Tensor]:
        return self.linear(x[:, :width]) / count, x.new_ones(count, width) * x.mean()


class OfScalars(Mixer):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x).sum(), x.mean(0)


class Calls(nn.Module):
    def __init__(self, custom: nn.Module) -> None:
        super().__init__()
        self.before = nn.Linear(4, 4)
        self.custom = custom

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.call(self.before(x), y)


class CallsNamedTuple(Calls):
    def call(self, x: Tensor, y: Tensor) -> Any:
        left, right = self.custom(Pair(x, right=y))
        return Pair(right, left), self.custom(pair=Pair(y, y)).left


class CallsList(Calls):
    def call(self, x: Tensor, y: Tensor) -> Any:
        first, *rest = self.custom([x, y, x + y])
        return self.custom([first]), rest


class CallsNested(Calls):
    def call(self, x: Tensor, y: Tensor) -> Any:
        result = self.custom(((x, {"b": y}), [x - y]))
        return result, result["out"][1][0] + result["pair"].left


class CallsOptional(Calls):
    def call(self, x: Tensor, y: Tensor) -> Any:
        return self.custom(x), self.custom(x, bias=y)[0], self.custom(y, None)


class CallsPlainValues(Calls):
    def call(self, x: Tensor, y: Tensor) -> Any:
        scaled, mode, count = self.custom(x, "scaled", (0.5, 2.0), flip=True)
        return scaled * count, mode, self.custom(y, mode="plain", factors=())


class CallsKeywords(Calls):
    def call(self, x: Tensor, y: Tensor) -> Any:
        return self.custom(x, y, x + y, gain=x, bias=y), self.custom(y, bias=y, gain=y)


class CallsSizes(Calls):
    def call(self, x: Tensor, y: Tensor) -> Any:
        return self.custom(x, x.shape[1], x.shape[0]), self.custom(y, y.size(-1), count=y.size(0) + 1)


class CallsScalars(Calls):
    def call(self, x: Tensor, y: Tensor) -> Any:
        total, mean = self.custom(x)
        return total, y * mean


FORMS = {
    "named_tuple": CallsNamedTuple(OfNamedTuple()),
    "list": CallsList(OfList()),
    "nested": CallsNested(OfNested()),
    "optional": CallsOptional(OfOptional()),
    "plain_values": CallsPlainValues(OfPlainValues()),
    "keywords": CallsKeywords(OfKeywords()),
    "sizes": CallsSizes(OfSizes()),
    "scalars": CallsScalars(OfScalars()),
}


def assert_same_structure(exact: Any, found: Any) -> None:
    """Assert equal types and equal values of all leaves that are no tensors, and equal shapes of tensors."""

    def shown(value: Any) -> Any:
        return tuple(value.shape) if isinstance(value, Tensor) else value

    pytree = torch.utils._pytree
    assert pytree.tree_structure(exact) == pytree.tree_structure(found)
    assert pytree.tree_map(shown, exact) == pytree.tree_map(shown, found)


@pytest.mark.parametrize("model", FORMS.values(), ids=FORMS)
def test_forms_of_call_and_result(model: Calls) -> None:
    model = copy.deepcopy(model).eval()
    data = [(uniform(1.0, size, 4), uniform(1.0, size, 4)) for size in (5, 16, 32, 7)]
    prepared, converted = by_ours(model, data, mirror(type(model.custom)))
    results = [[m(*args) for args in data] for m in (model, prepared, converted)]
    for exact, observed, found in zip(*results, strict=True):
        assert_same_structure(exact, observed)
        assert_same_structure(exact, found)
    for a, b, c in zip(*map(together, results), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
        assert 25 < sqnr(a, c) < 70


# Which inputs and outputs are quantized


class OfTwo(Mixer):
    def forward(self, x: Tensor, more: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        y = self.linear(x) + more["a"]
        return y, y * more["b"], more["a"] - more["b"]


class CallsTwo(Calls):
    def call(self, x: Tensor, y: Tensor) -> Any:
        return self.custom(y, {"a": 0.5 * y, "b": y + 1})


INT16 = torch.int16
CHOICES: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "all by default": ({}, (torch.uint8,) * 6),
    "one input in floats": (
        {"quantized_inputs": {"more.a": None}},
        (torch.uint8, None, torch.uint8, *(torch.uint8,) * 3),
    ),
    "a structure in floats": (
        {"quantized_inputs": {"more": None}},
        (torch.uint8, None, None, *(torch.uint8,) * 3),
    ),
    "most specific": (
        {"quantized_inputs": {"more": None, "more.b": INT16}},
        (torch.uint8, None, INT16, *(torch.uint8,) * 3),
    ),
    "outputs": (
        {"quantized_outputs": {0: INT16, "2": None}},
        (*(torch.uint8,) * 3, INT16, torch.uint8, None),
    ),
    "constructors": (
        {
            "quantized_inputs": {"x": MinMaxObserver.with_args(dtype=torch.qint8)},
            "quantized_outputs": {"1": MinMaxObserver.with_args(dtype=torch.qint8)},
        },
        (torch.int8, torch.uint8, torch.uint8, torch.uint8, torch.int8, torch.uint8),
    ),
}


@pytest.mark.parametrize(("attributes", "dtypes"), CHOICES.values(), ids=CHOICES)
def test_the_observed_class_says_what_is_quantized(
    attributes: dict[str, Any], dtypes: tuple[Any, ...]
) -> None:
    mapping = QConfigMapping().set_object_type(OfTwo, MAPPING.global_qconfig)
    model = CallsTwo(OfTwo()).eval()
    data = [(uniform(1.0, 16, 4), uniform(1.0, 16, 4)) for _ in range(4)]
    prepared, converted = by_ours(model, data, mirror(OfTwo, **attributes), mapping)
    (layout,) = converted.custom.opaque_layouts
    found = [None if qparams is None else qparams.dtype for qparams in layout.input_qparams]
    (result,) = [n for n in converted.reference.graph.nodes if n.op == "output"]
    found += [dtype_in_front(node) for node in result.all_input_nodes]
    assert tuple(found) == dtypes
    assert len(quantize_nodes(converted)) == sum(dtype is not None for dtype in dtypes)
    for args in data:
        for a, b, c in zip(*(m(*args) for m in (model, prepared, converted)), strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=0)
            assert 25 < sqnr(a, c) < 90


def dtype_in_front(node: Any) -> Any:
    """Return the dtype of the quantize in front of ``node``, a result of the graph."""
    (source,) = node.all_input_nodes[:1]
    return source.args[5] if str(source.target).startswith("quantized_decomposed.quantize_per") else None


def test_unused_outputs_leave_no_node() -> None:
    class Drops(Calls):
        def call(self, x: Tensor, y: Tensor) -> Any:
            _, second, _ = self.custom(x, {"a": y, "b": y})
            return second

    model = Drops(OfTwo()).eval()
    data = [(uniform(1.0, 16, 4), uniform(1.0, 16, 4)) for _ in range(4)]
    _, converted = by_ours(model, data, mirror(OfTwo))
    assert len(quantize_nodes(converted)) == 4  # x of the linear, x, y, and the one result that is used
    assert 25 < sqnr(model(*data[0]), converted(*data[0])) < 60


# Custom modules in and around others


class Outer(nn.Module):
    """A module that contains a custom module, which the observed class observes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Custom()
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale


class ObservedOuter(Outer):
    @classmethod
    def from_float(cls, module: nn.Module) -> nn.Module:
        made = with_weights_of(cls(), module)
        made.inner.qconfig = module.qconfig
        made.inner = ObservedCustom.from_float(made.inner)
        made.seen = module.qconfig.activation()
        return made

    def forward(self, x: Tensor) -> Tensor:
        return self.seen(self.inner(x)) * self.scale


class QuantizedOuter(nn.Module):
    def __init__(self, inner: nn.Module, scale: float) -> None:
        super().__init__()
        self.inner = inner
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).dequantize() * self.scale

    @classmethod
    def from_observed(cls, module: nn.Module) -> nn.Module:
        module.inner.activation_post_process = module.seen
        return cls(StaticCustom.from_observed(module.inner), float(module.scale))


def test_a_custom_module_inside_anothers_from_float() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.outer = Outer()
            self.custom = Custom()

        def forward(self, x: Tensor) -> Tensor:
            return self.custom(self.outer(x))

    prepare_config, convert_config = settings_for(Outer, ObservedOuter, QuantizedOuter)
    prepare_config.set_float_to_observed_mapping(Custom, ObservedCustom)
    convert_config.set_observed_to_quantized_mapping(ObservedCustom, StaticCustom)
    model, data = Model().eval(), rows()
    prepared, converted = by_ours(model, data, (prepare_config, convert_config))
    assert isinstance(prepared.outer.inner, ObservedCustom)
    assert isinstance(converted.outer.inner.linear, nnq.Linear)
    assert isinstance(converted.custom.linear, nnq.Linear)
    (x,) = data[0]
    torch.testing.assert_close(prepared(x), model(x), atol=1e-6, rtol=0)
    assert 25 < sqnr(model(x), converted(x)) < 60


class TwoLSTMs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.tags = nn.LSTM(6, 4), nn.LSTM(3, 4, bidirectional=True)
        self.custom = OfNested()

    def forward(self, x: Tensor, y: Tensor) -> Any:
        words, state = self.words(x)
        tags, (h, c) = self.tags(y)
        forward, backward = tags.chunk(2, -1)
        result = self.custom(((words, {"b": forward}), [backward]))
        return result["out"], state, h + c


def test_two_lstms_feed_a_users_module() -> None:
    model = TwoLSTMs().eval()
    data = [(uniform(2.0, steps, 9, 6), uniform(2.0, steps, 9, 3)) for steps in (5, 7, 3)]
    prepare_config, convert_config = mirror(OfNested)
    prepare_config.set_float_to_observed_mapping(nn.LSTM, torch.ao.nn.quantizable.LSTM)
    prepared, converted = by_ours(model, data, (prepare_config, convert_config))
    assert isinstance(converted.words, torch.ao.nn.quantized.LSTM)
    for args in data:
        exact, observed, found = map(leaves, (model(*args), prepared(*args), converted(*args)))
        for a, b, c in zip(exact, observed, found, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
            assert 22 < sqnr(a, c) < 60


# The life of a model with custom modules


def test_copies_and_state() -> None:
    _, data, prepared, converted = scores_twice()
    torch.manual_seed(1)
    others = by_ours(ScoresTwice().eval(), [(3 * x, mask) for x, mask in data], SCORER)
    args = data[0]
    for original, other in zip((prepared, converted), others, strict=True):
        before = leaves(original(*args))
        twin = copy.deepcopy(original)
        assert all(map(torch.equal, leaves(twin(*args)), before))
        assert not torch.equal(leaves(other(*args))[0], before[0])
        other.load_state_dict(copy.deepcopy(original.state_dict()))
        assert all(map(torch.equal, leaves(other(*args)), before))
        for value in twin.state_dict().values():
            value.zero_()
        assert all(map(torch.equal, leaves(original(*args)), before))


def test_quantization_aware_training() -> None:
    model = ScoresTwice().train()
    x, mask = scorer_data(64)
    prepared = tc.prepare_qat_fx(model, get_default_qat_qconfig_mapping("qnnpack"), (x, mask), SCORER[0])
    assert any(isinstance(m, FakeQuantizeBase) for m in prepared.modules())
    optimizer = torch.optim.Adam(prepared.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = (prepared(x, mask)["sum"] - x[:, :2]).square().mean()
        loss.backward()
        assert all(p.grad is not None and float(p.grad.abs().max()) > 0 for p in prepared.parameters())
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < 0.8 * losses[0]
    prepared.apply(disable_observer).eval()
    converted = tc.convert_fx(prepared, SCORER[1])
    with torch.no_grad():
        trained, found = prepared(x, mask)["sum"], converted(x, mask)["sum"]
    assert sqnr(trained, found) > 30
    with torch.no_grad():
        prepared.apply(disable_fake_quant)
        assert sqnr(prepared(x, mask)["sum"], found) < 60


def test_explain_names_the_module_and_its_class() -> None:
    for stage in classic()[2:]:
        (decision,) = [d for d in tc.explain(stage) if d.path == "custom"]
        assert decision.action == "quantized"
        assert "ObservedCustom" in decision.reason


def test_without_an_entry_for_its_class_a_module_stays_observed() -> None:
    model, args, prepared, _ = classic()
    with pytest.warns(QuantizationWarning, match="ObservedCustom at 'custom' stays observed"):
        converted = tc.convert_fx(prepared)
    assert 25 < sqnr(model(*args), converted(*args)) < 60


# Shapes that depend on data: a handler states them


class Chosen(Mixer):
    def forward(self, x: Tensor) -> Tensor:
        best = int(x.detach().sum(0).argmax())
        return self.linear(x) * x[:, best : best + 1]


class ChosenHandler(UserModuleHandler):
    is_fallback = False

    def takes(self, float_class: type[nn.Module], observed_class: type[nn.Module]) -> bool:
        return issubclass(float_class, Chosen)

    def fake_call(self, module: nn.Module, path: str) -> Any:
        return torch.empty_like


class CallsChosen(Calls):
    def call(self, x: Tensor, y: Tensor) -> Any:
        return self.custom(x) + y


def test_data_dependent_code_is_tried_on_data() -> None:
    model = CallsChosen(Chosen()).eval()
    data = [(uniform(1.0, 16, 4), uniform(1.0, 16, 4)) for _ in range(4)]
    prepared, converted = by_ours(model, data, mirror(Chosen))
    for args in data:
        torch.testing.assert_close(prepared(*args), model(*args), atol=1e-6, rtol=0)
        assert 25 < sqnr(model(*args), converted(*args)) < 60


class Picky(Chosen):
    """A module that fails on zeros and ones, the inputs it would be tried on."""

    def forward(self, x: Tensor) -> Tensor:
        if float(x.std()) < 0.1:
            raise ValueError("all the same")
        return super().forward(x)


def test_a_handler_for_a_module_that_cannot_be_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    model = CallsChosen(Picky()).eval()
    data = [(uniform(1.0, 16, 4), uniform(1.0, 16, 4)) for _ in range(4)]
    with pytest.raises(CustomModuleError, match=r"Picky at 'custom' cannot be computed without data") as e:
        tc.prepare_fx(model, MAPPING, data[0], mirror(Picky)[0])
    assert "Hint: register a torchq_compat.custom_modules.UserModuleHandler" in str(e.value)
    monkeypatch.setattr(registry, "_HANDLERS", list(registry.handlers()))
    register(ChosenHandler())
    prepared, converted = by_ours(model, data, mirror(Picky))
    for args in data:
        torch.testing.assert_close(prepared(*args), model(*args), atol=1e-6, rtol=0)
        assert 25 < sqnr(model(*args), converted(*args)) < 60
