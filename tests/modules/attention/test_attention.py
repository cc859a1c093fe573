"""nn.MultiheadAttention as a custom module, in every call style; the FX engine crashes on all of these."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.ao.nn.quantizable as nnqa
import torch.ao.nn.quantized as nnq
import torch.ao.quantization.quantize_fx as fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import (
    FakeQuantizeBase,
    MinMaxObserver,
    QConfig,
    QConfigMapping,
    default_weight_observer,
    disable_observer,
    get_default_qat_qconfig_mapping,
    get_default_qconfig_mapping,
)
from torch.ao.quantization.fx.custom_config import ConvertCustomConfig, PrepareCustomConfig
from torch.fx import GraphModule

import torchq_compat as tc
from tests.helpers.lstm_flow import part_qparams, uniform
from tests.helpers.once import made_once
from tests.helpers.oracle import calibrate, leaves, sqnr
from torchq_compat.errors import CustomModuleError, QuantizationWarning, TorchQCompatError
from torchq_compat.nn import quantizable, quantized

MAPPING = get_default_qconfig_mapping("qnnpack")
MAP = PrepareCustomConfig().set_float_to_observed_mapping(nn.MultiheadAttention, nnqa.MultiheadAttention)
CONVERT = ConvertCustomConfig().set_observed_to_quantized_mapping(
    nnqa.MultiheadAttention, nnq.MultiheadAttention
)
E, HEADS = 16, 4
Call = Callable[..., Any]
Mask = Callable[..., Tensor]
LOW = float("-inf")


# Masks: (target length, source length, batch) -> a mask in which every query may attend to the first key.


def hidden(*shape: int) -> Tensor:
    mask = torch.rand(shape) < 0.3
    mask[..., 0] = False
    return mask


def bool_2d(target: int, source: int, batch: int) -> Tensor:
    return hidden(target, source)


def float_2d(target: int, source: int, batch: int) -> Tensor:
    return torch.where(hidden(target, source), LOW, uniform(1.0, target, source))


def bool_3d(target: int, source: int, batch: int) -> Tensor:
    return hidden(batch * HEADS, target, source)


def float_3d(target: int, source: int, batch: int) -> Tensor:
    return torch.where(hidden(batch * HEADS, target, source), LOW, 0.0)


def one_batch_3d(target: int, source: int, batch: int) -> Tensor:
    return hidden(HEADS, target, source)


def causal(target: int, source: int, batch: int) -> Tensor:
    return torch.triu(torch.full((target, source), LOW), diagonal=1)


def bool_padding(target: int, source: int, batch: int) -> Tensor:
    return hidden(batch, source)


def float_padding(target: int, source: int, batch: int) -> Tensor:
    return torch.where(hidden(batch, source), LOW, 0.0)


def one_padding(target: int, source: int, batch: int) -> Tensor:
    return hidden(source)


@dataclass(frozen=True)
class Style:
    """How a MultiheadAttention is made and called.

    Attributes:
        call: the call, given the module and the model's arguments.
        arguments: arguments of the constructor.
        masks: further arguments of the model.
        self_attention: query, key and value are one tensor.
    """

    call: Call
    arguments: dict[str, Any] = field(default_factory=dict)
    masks: tuple[Mask, ...] = ()
    self_attention: bool = False
    batched: bool = True

    def build(self) -> Model:
        torch.manual_seed(0)
        attention = nn.MultiheadAttention(E, HEADS, **self.arguments)
        for name, parameter in attention.named_parameters():
            # torch initializes biases to zero, and scores so small that all attention weights are equal.
            parameter.data.copy_(uniform(0.3 if "bias" in name else 0.5, *parameter.shape))
        return Model(attention, self.call).eval()

    def batch(self, target: int, source: int, batch: int) -> tuple[Tensor, ...]:
        source = target if self.self_attention else source
        widths = (E, self.arguments.get("kdim") or E, self.arguments.get("vdim") or E)
        lengths = (target, source, source)
        inputs = [uniform(1.0, *pair) for pair in zip(lengths, widths, strict=True)]
        if self.batched:
            axis = 0 if self.arguments.get("batch_first") else 1
            inputs = [torch.stack([uniform(1.0, *each.shape) for _ in range(batch)], axis) for each in inputs]
        masks = tuple(make(target, source, batch) for make in self.masks)
        return (inputs[0], *masks) if self.self_attention else (*inputs, *masks)

    def data(self) -> list[tuple[Tensor, ...]]:
        """Return batches whose lengths and batch sizes differ from those of ``example``."""
        return [self.batch(4 + i, 9 - i, 3 + i % 2) for i in range(6)]

    def example(self) -> tuple[Tensor, ...]:
        return self.batch(3, 5, 2)


class Model(nn.Module):
    def __init__(self, attention: nn.Module, call: Call) -> None:
        super().__init__()
        self.attention = attention
        self.call = call

    def forward(self, *args: Tensor) -> Any:
        return self.call(self.attention, *args)


def itself(m: nn.Module, x: Tensor) -> Any:
    return m(x, x, x)


def across(m: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Any:
    return m(q, k, v)


def masked(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Any:
    return m(q, k, v, attn_mask=mask)


def padded(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Any:
    return m(q, k, v, key_padding_mask=padding)


def masked_and_padded(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, padding: Tensor) -> Any:
    return m(q, k, v, padding, True, mask)


STYLES: dict[str, Style] = {
    "self": Style(itself, self_attention=True),
    "self_output_alone": Style(lambda m, x: m(x, x, x)[0], self_attention=True),
    "self_no_weights": Style(lambda m, x: m(x, x, x, need_weights=False)[0], self_attention=True),
    "self_no_weights_whole": Style(lambda m, x: m(x, x, x, need_weights=False), self_attention=True),
    "weights_alone": Style(lambda m, q, k, v: m(q, k, v)[1]),
    "cross": Style(across),
    "cross_memory": Style(lambda m, q, k, v: m(q, k, k)),
    "cross_no_weights": Style(lambda m, q, k, v: m(q, k, v, need_weights=False)[0]),
    "by_name": Style(lambda m, q, k, v: m(value=v, key=k, query=q)),
    "per_head": Style(lambda m, q, k, v: m(q, k, v, average_attn_weights=False)),
    "all_positional": Style(
        lambda m, q, k, v, mask, pad: m(q, k, v, pad, True, mask, False, False),
        masks=(float_2d, float_padding),
    ),
    "batch_first": Style(across, {"batch_first": True}),
    "batch_first_per_head": Style(
        lambda m, q, k, v: m(q, k, v, average_attn_weights=False), {"batch_first": True}
    ),
    "no_bias": Style(across, {"bias": False}),
    "kdim": Style(across, {"kdim": 6}),
    "vdim_and_kdim": Style(across, {"kdim": 6, "vdim": 10, "batch_first": True}),
    "bias_kv": Style(across, {"add_bias_kv": True}),
    "zero_attn": Style(across, {"add_zero_attn": True}),
    "everything_appended": Style(
        masked_and_padded,
        {"add_bias_kv": True, "add_zero_attn": True, "bias": False},
        (float_3d, float_padding),
    ),
    "bool_2d": Style(masked, masks=(bool_2d,)),
    "float_2d": Style(masked, masks=(float_2d,)),
    "bool_3d": Style(masked, masks=(bool_3d,)),
    "float_3d": Style(masked, masks=(float_3d,)),
    "bool_padding": Style(padded, masks=(bool_padding,)),
    "float_padding": Style(padded, {"batch_first": True}, (float_padding,)),
    "mask_and_padding": Style(masked_and_padded, masks=(bool_3d, bool_padding)),
    "causal": Style(
        lambda m, x, mask: m(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0],
        masks=(causal,),
        self_attention=True,
    ),
    "causal_with_weights": Style(
        lambda m, x, mask: m(x, x, x, attn_mask=mask, is_causal=True), masks=(causal,), self_attention=True
    ),
    "unbatched": Style(across, batched=False),
    "unbatched_per_head": Style(lambda m, q, k, v: m(q, k, v, average_attn_weights=False), batched=False),
    "unbatched_masked": Style(
        masked_and_padded, {"batch_first": True}, (one_batch_3d, one_padding), batched=False
    ),
}
#: The other styles combine what these have.
QUICK = (
    "self",
    "self_no_weights_whole",
    "cross",
    "batch_first",
    "bool_2d",
    "mask_and_padding",
    "unbatched_masked",
)
EVERY_STYLE = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in STYLES]
)


@made_once
def prepared_as(name: str) -> tuple[Model, GraphModule]:
    """Return (float, prepared), which has seen no data."""
    model = STYLES[name].build()
    return model, tc.prepare_fx(model, MAPPING, STYLES[name].example(), MAP)


Data = list[tuple[Tensor, ...]]


@made_once
def converted_as(name: str) -> tuple[Data, Model, list[Any], GraphModule, GraphModule]:
    """Return (data, float, what the prepared model returned while it was calibrated, prepared, converted)."""
    (model, prepared), data = prepared_as(name), STYLES[name].data()
    with torch.no_grad():
        observed = [prepared(*args) for args in data]
    return data, model, observed, prepared, tc.convert_fx(prepared, CONVERT)


def together(results: list[Any]) -> list[Tensor]:
    return [torch.cat([t.flatten() for t in column]) for column in zip(*map(leaves, results), strict=True)]


@EVERY_STYLE
def test_prepared_equals_float_and_converted_is_close(name: str) -> None:
    data, model, observed, prepared, converted = converted_as.itself(name)
    assert isinstance(prepared.attention, nnqa.MultiheadAttention)
    with torch.no_grad():
        exact = [model(*args) for args in data]
        found = [converted(*args) for args in data]
    assert isinstance(converted.attention, nnq.MultiheadAttention)
    for a, b, c in zip(exact, observed, found, strict=True):
        assert [t.shape for t in leaves(a)] == [t.shape for t in leaves(b)] == [t.shape for t in leaves(c)]
        assert isinstance(a, tuple) == isinstance(c, tuple)
        if isinstance(a, tuple):
            assert [part is None for part in a] == [part is None for part in c]
    for a, b, c in zip(together(exact), together(observed), together(found), strict=True):
        assert float((a - b).abs().max()) < 1e-5
        assert 30 < sqnr(a, c) < 60


class OfOne(Model):
    def forward(self, x: Tensor) -> Any:  # type: ignore[override]  # FX does not trace *args
        return self.call(self.attention, x)


class OfThree(Model):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:  # type: ignore[override]
        return self.call(self.attention, q, k, v)


FX_RUNS = [
    name for name, style in STYLES.items() if not style.masks and name not in ("kdim", "vdim_and_kdim")
]


@pytest.mark.parametrize("name", FX_RUNS)
def test_fx_crashes(name: str) -> None:
    """FX crashes on the same model and configuration."""
    style = STYLES[name]
    model = (OfOne if style.self_attention else OfThree)(style.build().attention, style.call).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = fx.prepare_fx(model, MAPPING, style.example(), MAP)
        with pytest.raises((AttributeError, ValueError), match=r"has no attribute 'numel'|to unpack"):
            calibrate(prepared, style.data())


# The observers of torch.ao's quantizable attention, which runs eagerly.

LEGACY_PARTS = {
    "linear_Q": "project_in",
    "linear_K": "project_in",
    "linear_V": "project_in",
    "quant_attn_output": "project_out",
    "out_proj": "project_out",
}


@pytest.mark.parametrize("name", ["self", "cross", "no_bias", "float_2d", "zero_attn"])
def test_the_qparams_are_those_of_the_eager_engine(name: str) -> None:
    style = STYLES[name]
    model, data = style.build(), STYLES[name].data()
    qconfig = QConfig(activation=MinMaxObserver, weight=default_weight_observer)  # type: ignore[arg-type]
    prepared = tc.prepare_fx(model, QConfigMapping().set_global(qconfig), data[0], MAP)
    calibrate(prepared, data)
    converted = tc.convert_to_reference_fx(prepared, CONVERT)
    theirs = copy.deepcopy(model)
    theirs.attention.qconfig = qconfig
    theirs.attention = nnqa.MultiheadAttention.from_float(theirs.attention)
    observe_eagerly(theirs.attention)
    calibrate(theirs, data)
    # Legacy averages the weights after their observer, so the returned average has a smaller range.
    returned = MinMaxObserver()
    for args in data:
        returned(model(*args)[1])
    (found,) = part_qparams(converted.attention.returned_weights).values()
    assert found == expected_of(returned)
    for part, graph in LEGACY_PARTS.items():
        observer = theirs.attention.get_submodule(part).activation_post_process
        in_graph = converted.attention.get_submodule(graph)
        assert isinstance(in_graph, GraphModule)
        assert part_qparams(in_graph)[part] == expected_of(observer)


def test_legacy_attention_mixes_up_a_batch_that_comes_first() -> None:
    """torch.ao's eager module before observation is bit-equal with steps first and noise with batch first."""
    found = []
    for name in ("cross", "batch_first"):
        model, args = STYLES[name].build(), STYLES[name].example()
        legacy = copy.deepcopy(model)
        legacy.attention.qconfig = MAPPING.global_qconfig
        legacy.attention = nnqa.MultiheadAttention.from_float(legacy.attention)
        found.append(sqnr(model(*args)[0], legacy(*args)[0]))
    assert found[0] > 100
    assert found[1] < 6


def expected_of(observer: Any) -> tuple[Any, int, torch.dtype]:
    scale, zero_point = observer.calculate_qparams()
    return pytest.approx(float(scale), rel=1e-5), int(zero_point), torch.uint8


def observe_eagerly(attention: nn.Module) -> None:
    """Add the observers that torch.ao's eager prepare puts behind the children of a quantizable module."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.ao.quantization.prepare(
            attention, inplace=True, allow_list={nn.Linear, torch.ao.quantization.QuantStub}
        )


def test_inside_a_transformer_encoder() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, HEADS, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    data = [(torch.randn(4, steps, E),) for steps in (6, 3, 9, 7)]
    prepared = tc.prepare_fx(model, MAPPING, data[0], MAP)
    for args in data:
        torch.testing.assert_close(prepared(*args), model(*args), atol=1e-5, rtol=0)
    converted = tc.convert_fx(prepared, CONVERT)
    for index in range(2):
        found = converted.get_submodule(f"layers.{index}.self_attn")
        assert isinstance(found, nnq.MultiheadAttention)
    for args in data:
        assert 30 < sqnr(model(*args), converted(*args)) < 60


def test_a_mask_that_the_model_makes() -> None:
    """Before it is used, the layer hands it on as it is: a float of the dtype of the query."""

    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(E, HEADS, 32, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            steps = x.shape[1]
            mask = torch.triu(torch.full((steps, steps), -torch.inf, device=x.device), 1)
            result: Tensor = self.layer(x, src_mask=mask)
            return result

    torch.manual_seed(0)
    model, data = Causal().eval(), [(torch.randn(batch, steps, E),) for batch, steps in ((4, 6), (2, 9))]
    prepared = tc.prepare_fx(model, MAPPING, data[0], MAP)
    calibrate(prepared, data)
    converted = tc.convert_fx(prepared, CONVERT)
    for args in data:
        assert 25 < sqnr(model(*args), converted(*args)) < 60


def test_inside_a_transformer_decoder_layer() -> None:
    torch.manual_seed(0)
    model = nn.TransformerDecoderLayer(E, HEADS, 32).eval()
    data = [(torch.randn(t, 3, E), torch.randn(s, 3, E)) for t, s in ((4, 7), (6, 5), (3, 3))]
    prepared = tc.prepare_fx(model, MAPPING, data[0], MAP)
    for args in data:
        torch.testing.assert_close(prepared(*args), model(*args), atol=1e-5, rtol=0)
    converted = tc.convert_fx(prepared, CONVERT)
    assert type(converted.multihead_attn) is type(converted.self_attn) is quantized.MultiheadAttention
    for args in data:
        assert 30 < sqnr(model(*args), converted(*args)) < 60


def test_weights_that_are_never_returned_are_not_missed() -> None:
    """Their observer sees nothing, which is warned about only where the weights are returned."""
    for name, missed in (("self_no_weights", False), ("cross", True)):
        style, (_, prepared) = STYLES[name], prepared_as(name)
        attention = prepared.attention
        for args in style.data():
            inputs = args * 3 if style.self_attention else args
            attention(*inputs, need_weights=False)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tc.convert_fx(prepared, CONVERT)
        messages = [str(w.message) for w in caught if issubclass(w.category, QuantizationWarning)]
        assert any("returned_weights" in message for message in messages) == missed


def test_quantization_aware_training() -> None:
    torch.manual_seed(0)

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(E, HEADS)
            self.fc = nn.Linear(E, 2)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.fc(self.attention(x, x, x, need_weights=False)[0].mean(0))
            return result

    x = torch.randn(6, 64, E)
    y = (x.sum((0, 2)) > 0).long()
    mapping = get_default_qat_qconfig_mapping("qnnpack").set_module_name("fc", None)
    prepared = tc.prepare_qat_fx(Classifier().train(), mapping, (x,), MAP)
    # Four projections with their weights, and the two observed values of the attention itself.
    fake_quantizes = {m for m in prepared.attention.modules() if isinstance(m, FakeQuantizeBase)}
    assert len(fake_quantizes) == 10
    optimizer = torch.optim.Adam(prepared.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = F.cross_entropy(prepared(x), y)
        loss.backward()
        assert all(p.grad is not None for p in prepared.parameters())
        for name in ("linear_Q.weight", "linear_K.weight", "linear_V.weight", "linear_V.bias"):
            assert float(prepared.attention.project_in.get_parameter(name).grad.abs().max()) > 0
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < 0.8 * losses[0]
    prepared.apply(disable_observer).eval()
    converted = tc.convert_fx(prepared, CONVERT)
    with torch.no_grad():
        assert sqnr(prepared(x), converted(x)) > 30
        prepared.apply(torch.ao.quantization.disable_fake_quant)
        assert sqnr(prepared(x), converted(x)) < 60


Stages = tuple[Style, Data, Model, GraphModule, GraphModule]


@pytest.fixture
def cross() -> Stages:
    data, model, _, prepared, converted = converted_as("cross")
    return STYLES["cross"], data, model, prepared, converted


def assert_equal(a: Any, b: Any) -> None:
    assert all(torch.equal(p, q) for p, q in zip(leaves(a), leaves(b), strict=True))


def test_the_module_can_be_called_itself(cross: Stages) -> None:
    _, data, model, prepared, converted = cross
    for module, low, high in ((prepared.attention, 100, float("inf")), (converted.attention, 30, 60)):
        for kwargs in ({}, {"need_weights": False}):
            exact, found = ([m(*args, **kwargs) for args in data] for m in (model.attention, module))
            assert [each[1] is None for each in exact] == [each[1] is None for each in found]
            for a, b in zip(together(exact), together(found), strict=True):
                assert low < sqnr(a, b) <= high
        for name in ("embed_dim", "num_heads", "dropout", "batch_first", "kdim", "vdim", "head_dim"):
            assert getattr(module, name) == getattr(model.attention, name)


@pytest.mark.parametrize("name", QUICK)
def test_a_lowered_module_takes_and_returns_integers(name: str) -> None:
    data, *_, converted = converted_as.itself(name)
    converted = copy.deepcopy(converted)  # It gets hooks.
    attention, seen = converted.attention, list[torch.dtype]()
    for graph in (attention.project_in, attention.project_out):
        graph.register_forward_hook(lambda _m, args, out: seen.extend((args[0].dtype, out[0].dtype)))
    scripted = torch.jit.script(converted)
    values: dict[int, set[float]] = {index: set() for index in range(len(attention.integer_results))}
    for args in data:
        assert_equal(scripted(*args), converted(*args))
        pairs = zip(leaves(converted(*args)), leaves(converted.reference(*args)), strict=True)
        for index, ((lowered, expected), qparams) in enumerate(
            zip(pairs, attention.integer_results, strict=True)
        ):
            # Attention in another order of additions moves a value to the next step at most.
            steps = (lowered - expected).abs() / qparams.scale
            assert float(steps.max()) < 1.01
            assert float((steps > 0.5).float().mean()) < 0.05
            values[index].update(expected.unique().tolist())
    assert all(len(distinct) > 4 for distinct in values.values())  # A mask may leave few of one call's.
    assert seen[:4] == [torch.uint8, torch.float32, torch.float32, torch.uint8]


def test_copies_and_state(cross: Stages) -> None:
    style, data, _, prepared, converted = cross
    args = data[0]
    other_model = style.build()
    for parameter in other_model.parameters():
        parameter.data.mul_(0.5)
    other_prepared = tc.prepare_fx(other_model, MAPPING, style.example(), MAP)
    calibrated = copy.deepcopy(other_prepared)
    calibrate(calibrated, style.data())
    others = (other_prepared, tc.convert_fx(calibrated, CONVERT))
    for original, other in zip((prepared, converted), others, strict=True):
        before = original(*args)
        twin = copy.deepcopy(original)
        assert_equal(twin(*args), before)
        assert not torch.equal(other(*args)[0], before[0])
        other.load_state_dict(copy.deepcopy(original.state_dict()))
        assert_equal(other(*args), before)
        for value in twin.state_dict().values():
            value.zero_()
        assert_equal(original(*args), before)


def test_explain_lists_the_parts(cross: Stages) -> None:
    for stage in cross[3:]:
        found = [d.path for d in tc.explain(stage).find("attention") if "/" not in d.path]
        parts = {**LEGACY_PARTS, "quant_attn_output_weights": "returned_weights"}
        assert found == ["attention", *(f"attention.{graph}.{part}" for part, graph in parts.items())]


def test_float_without_a_mapping_and_warned() -> None:
    style = STYLES["cross"]
    with pytest.warns(
        QuantizationWarning, match=r"torch\.nn\.MultiheadAttention, torch\.ao\.nn\.quantizable"
    ):
        prepared = tc.prepare_fx(style.build(), MAPPING, style.example())
    args = style.data()[0]
    torch.testing.assert_close(prepared(*args), style.build()(*args), atol=1e-5, rtol=0)


# Bad input


def broken(call: Call, *shapes: tuple[int, ...]) -> tuple[Model, tuple[Tensor, ...]]:
    return Model(nn.MultiheadAttention(E, HEADS), call).eval(), tuple(torch.randn(s) for s in shapes)


X = (5, 2, E)
BAD: dict[str, tuple[Any, str]] = {
    "width of the query": (broken(itself, (5, 2, 9)), "last dimension of query must be 16"),
    "width of the key": (broken(across, X, (5, 2, 9), X), "last dimension of key must be 16"),
    "dimensions": (broken(itself, (E,)), "query must have 2 or 3 dimensions"),
    "mixed dimensions": (broken(across, X, (5, E), (5, E)), "key must have 2 or 3 dimensions, as query"),
    "unknown argument": (broken(lambda m, x: m(x, x, x, mask=x), X), "unexpected keyword argument 'mask'"),
    "missing argument": (broken(lambda m, x: m(x, x), X), "missing a required argument: 'value'"),
    "causal without a mask": (
        broken(lambda m, x: m(x, x, x, is_causal=True), X),
        "attn_mask, which is missing",
    ),
    "mask of another size": (
        broken(lambda m, x, mask: m(x, x, x, attn_mask=mask), X, (5, 4)),
        "size of attn_mask does not fit",
    ),
    "padding of another size": (
        broken(lambda m, x, mask: m(x, x, x, key_padding_mask=mask), X, (5, 2)),
        "size of key_padding_mask does not fit",
    ),
    "mask of integers": (
        broken(lambda m, x, mask: m(x, x, x, attn_mask=mask.byte()), X, (5, 5)),
        "attn_mask must be bool or floating point",
    ),
}


@pytest.mark.parametrize(("case", "problem"), BAD.values(), ids=BAD)
def test_what_the_float_module_refuses(case: tuple[Model, tuple[Tensor, ...]], problem: str) -> None:
    model, args = case
    with pytest.raises((AssertionError, RuntimeError, TypeError)):
        model(*args)
    before = copy.deepcopy(model.state_dict())
    with pytest.warns(QuantizationWarning, match=problem):
        waiting = tc.prepare_fx(model, MAPPING, args, MAP)
    with pytest.raises(TorchQCompatError, match=problem) as caught:
        waiting(*args)
    assert "'attention'" in str(caught.value)
    assert "Hint:" in str(caught.value)
    assert type(model.attention) is nn.MultiheadAttention
    assert not hasattr(model.attention, "qconfig")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_classes_that_do_not_do_what_they_promise() -> None:
    with pytest.raises(CustomModuleError, match="has no qconfig"):
        quantizable.MultiheadAttention.from_float(nn.MultiheadAttention(E, HEADS))
    with pytest.raises(CustomModuleError, match="is not a custom module this package made"):
        quantized.MultiheadAttention.from_observed(nnqa.MultiheadAttention(E, HEADS))

    class Returns(nnqa.MultiheadAttention):
        @classmethod
        def from_float(cls, other: nn.Module) -> Any:
            return nn.Linear(3, 3)

    style = STYLES["cross"]
    config = PrepareCustomConfig().set_float_to_observed_mapping(nn.MultiheadAttention, Returns)
    with pytest.raises(CustomModuleError, match="Linear is not a custom module") as caught:
        tc.prepare_fx(style.build(), MAPPING, style.example(), config)
    assert "Hint:" in str(caught.value)
