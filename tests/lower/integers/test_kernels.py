"""Every kernel on plain integers against the reference graph, for any batch and size."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.ao.quantization.quantize_fx as fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import (
    QConfigMapping,
    default_dynamic_qconfig,
    float16_dynamic_qconfig,
    float_qparams_weight_only_qconfig,
    float_qparams_weight_only_qconfig_4bit,
    get_default_qat_qconfig_mapping,
    get_default_qconfig_mapping,
)

import torchq_compat as tc
from tests.helpers.oracle import calibrate, sqnr
from tests.helpers.side_by_side import Branches
from torchq_compat.errors import CallError
from torchq_compat.lower.integers.lowered_module import LoweredGraphModule
from torchq_compat.support.decisions import FUSED

DEFAULT = get_default_qconfig_mapping("x86")
DYNAMIC = QConfigMapping().set_global(default_dynamic_qconfig)
HALF = QConfigMapping().set_global(float16_dynamic_qconfig)


class Calls(nn.Module):
    """A module that calls ``function(module, x)``."""

    def __init__(self, function: Callable[..., Tensor], module: nn.Module | None = None) -> None:
        super().__init__()
        self.module, self.function = module, function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.module, x)


def behind(layer: Callable[[], nn.Module], *modules: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return a maker of ``modules`` behind a layer whose result is quantized."""
    return lambda: nn.Sequential(layer(), *(module() for module in modules))


def rows(count: int = 6) -> Tensor:
    return torch.randn(count, 16)


def signals(count: int = 4, length: int = 15) -> Tensor:
    return torch.randn(count, 8, length)


def images(count: int = 4, height: int = 9, width: int = 11) -> Tensor:
    return torch.randn(count, 8, height, width)


def volumes(count: int = 2, depth: int = 5) -> Tensor:
    return torch.randn(count, 4, depth, 6, 7)


def linear() -> nn.Module:
    return nn.Linear(16, 16)


def conv() -> nn.Module:
    return nn.Conv2d(8, 8, 3)


class Case(NamedTuple):
    """A model, its inputs (any batch), and the ops of its lowered graph between the quantize of its input and
    the dequantize of its result."""

    build: Callable[[], nn.Module]
    inputs: Callable[..., Tensor]
    kernels: tuple[str, ...]


N = "torchq_compat_native"
CONV, LINEAR, TABLE, TWO, POOL, MEAN, QUANTIZE, DEQUANTIZE = (
    f"{N}.{name}.default"
    for name in (
        "convolution",
        "linear",
        "lookup",
        "arithmetic",
        "max_pool",
        "mean",
        "quantize",
        "dequantize",
    )
)
#: Zeros between the values, along each dimension with a stride, and around; then an ordinary convolution.
SPREAD, PAD = (
    ("aten.unsqueeze.default", "aten.constant_pad_nd.default", "aten.flatten.using_ints"),
    ("aten.constant_pad_nd.default"),
)
TRANSPOSED = {1: (*SPREAD, PAD, CONV), 2: (*SPREAD, *SPREAD, PAD, CONV), 3: (PAD, CONV)}


def in_floats(op: str) -> tuple[str, ...]:
    return DEQUANTIZE, op, QUANTIZE


STATIC = {
    "linear": Case(linear, rows, (LINEAR,)),
    "linear, no bias": Case(lambda: nn.Linear(15, 4, bias=False), signals, (LINEAR,)),
    "linear relu": Case(behind(linear, nn.ReLU), rows, (LINEAR,)),
    "conv1d": Case(lambda: nn.Conv1d(8, 6, 3, stride=2), signals, (CONV,)),
    "conv1d relu": Case(behind(lambda: nn.Conv1d(8, 6, 3), nn.ReLU), signals, (CONV,)),
    "conv2d, groups": Case(lambda: nn.Conv2d(8, 16, 3, dilation=2, groups=4), images, (CONV,)),
    "conv2d, padding by name": Case(lambda: nn.Conv2d(8, 6, 3, padding="same"), images, (CONV,)),
    "conv2d, reflecting": Case(
        behind(conv, lambda: nn.Conv2d(8, 6, 3, padding=1, padding_mode="reflect")),
        images,
        (CONV, "aten.pad.default", CONV),
    ),
    "conv2d bn relu": Case(behind(conv, lambda: nn.BatchNorm2d(8), nn.ReLU), images, (CONV,)),
    "conv3d relu": Case(behind(lambda: nn.Conv3d(4, 6, 3), nn.ReLU), volumes, (CONV,)),
    "conv_transpose1d": Case(lambda: nn.ConvTranspose1d(8, 6, 3, stride=2), signals, (*TRANSPOSED[1],)),
    "conv_transpose2d": Case(lambda: nn.ConvTranspose2d(8, 6, 3, stride=2), images, (*TRANSPOSED[2],)),
    "conv_transpose3d": Case(lambda: nn.ConvTranspose3d(4, 6, 3), volumes, (*TRANSPOSED[3],)),
    "add": Case(lambda: Calls(lambda m, x: x + m(x), linear()), rows, (LINEAR, TWO)),
    "add relu": Case(lambda: Calls(lambda m, x: F.relu(m(x) + x), linear()), rows, (LINEAR, TWO)),
    "mul": Case(lambda: Calls(lambda m, x: x * m(x), linear()), rows, (LINEAR, TWO)),
    "mul relu": Case(lambda: Calls(lambda m, x: F.relu(x * m(x)), linear()), rows, (LINEAR, TWO)),
    "matmul": Case(
        lambda: Calls(lambda m, x: torch.matmul(x, x.transpose(1, 2))),
        signals,
        (DEQUANTIZE, "aten.transpose.int", *in_floats("aten.matmul.default")),
    ),
    "cat": Case(
        lambda: Calls(lambda m, x: torch.cat([x, m(x)], 1), linear()),
        rows,
        (LINEAR, "aten.cat.default"),
    ),
    "a chain and numbers": Case(
        lambda: Calls(lambda m, x: torch.sigmoid(m(x) * 0.5 + 1.5), linear()),
        rows,
        (LINEAR, TABLE, TABLE, TABLE),
    ),
    "hardswish": Case(behind(linear, nn.Hardswish), rows, (LINEAR, TABLE)),
    "elu": Case(behind(linear, nn.ELU), rows, (LINEAR, TABLE)),
    "leaky relu": Case(behind(linear, nn.LeakyReLU), rows, (LINEAR, TABLE)),
    "sigmoid": Case(behind(linear, nn.Sigmoid), rows, (LINEAR, TABLE)),
    "tanh": Case(behind(linear, nn.Tanh), rows, (LINEAR, TABLE)),
    "hardsigmoid": Case(behind(linear, nn.Hardsigmoid), rows, (LINEAR, TABLE)),
    "softmax": Case(behind(linear, lambda: nn.Softmax(1)), rows, (LINEAR, *in_floats("aten.softmax.int"))),
    "layer norm": Case(
        behind(linear, lambda: nn.LayerNorm(16)), rows, (LINEAR, *in_floats("aten.layer_norm.default"))
    ),
    "instance norm": Case(
        behind(conv, lambda: nn.InstanceNorm2d(8, affine=True)),
        images,
        (CONV, *in_floats("aten.instance_norm.default")),
    ),
    "batch norm relu": Case(
        behind(nn.ReLU, lambda: nn.BatchNorm2d(8), nn.ReLU),
        images,
        ("aten.clamp.default", f"{N}.affine.default"),
    ),
    "batch norm 3d": Case(
        behind(nn.ReLU, lambda: nn.BatchNorm3d(4)),
        volumes,
        ("aten.clamp.default", f"{N}.affine.default"),
    ),
    "pools": Case(
        behind(conv, lambda: nn.MaxPool2d(2), lambda: nn.AvgPool2d(2, 1), lambda: nn.AdaptiveAvgPool2d(2)),
        images,
        (
            CONV,
            POOL,
            *in_floats("aten.avg_pool2d.default"),
            *in_floats("aten.adaptive_avg_pool2d.default"),
        ),
    ),
    "relu6, mean, flatten": Case(
        lambda: Calls(lambda m, x: F.relu6(m(x)).mean((2, 3), keepdim=True).flatten(1), conv()),
        images,
        (CONV, MEAN, "aten.flatten.using_ints"),
    ),
    # Convolutions return channels-last activations, which cannot be viewed with other sizes.
    "view by size": Case(
        lambda: Calls(lambda m, x: m(x).view(x.size(0), -1), conv()), images, (CONV, "aten.reshape.default")
    ),
    "interpolate": Case(
        lambda: Calls(lambda m, x: F.interpolate(m(x), scale_factor=2.0), conv()),
        images,
        (CONV, "aten.upsample_nearest2d.vec"),
    ),
    "dropout": Case(behind(linear, nn.Dropout), rows, (LINEAR,)),
}


def converted_by_us(model: nn.Module, data: list[Any], mapping: Any = DEFAULT) -> Any:
    prepared = tc.prepare_fx(model, mapping, data[0])
    calibrate(prepared, data)
    converted = tc.convert_fx(prepared)
    assert isinstance(converted, LoweredGraphModule)
    return converted


def computing(lowered: Any) -> list[str]:
    """Return the targets of the lowered graph, without those that compute sizes."""
    targets = [str(n.target) for n in lowered.graph.nodes if n.op == "call_function"]
    return [target for target in targets if not target.startswith("aten.sym_")]


def result_scale(lowered: Any) -> float:
    dequantize = lowered.reference.graph.output_node().all_input_nodes[0]
    return float(dequantize.args[1])


@functools.cache
def branches(inputs: Callable[..., Tensor]) -> tuple[list[str], nn.Module, Any]:
    """Return the names of all cases with these inputs, their models side by side, and these lowered."""
    names = [name for name, case in STATIC.items() if case.inputs is inputs]
    torch.manual_seed(0)
    model = Branches(STATIC[name].build() for name in names).eval()
    # So many that the values of other batches, say products of two, are rarely beyond them.
    data = [([inputs(24) for _ in names],) for _ in range(3)]
    return names, model, converted_by_us(model, data)


def computing_in_branches(lowered: Any) -> list[list[str]]:
    """Return the same as ``computing`` for what depends on each of the inputs."""
    found = []
    for x in lowered.graph.find_nodes(op="placeholder"):
        behind_x = {x}
        for node in lowered.graph.nodes:
            if not behind_x.isdisjoint(node.all_input_nodes) and node.op == "call_function":
                behind_x.add(node)
        targets = [str(node.target) for node in lowered.graph.nodes if node in behind_x - {x}]
        found.append([target for target in targets if not target.startswith("aten.sym_")])
    return found


@pytest.mark.parametrize("inputs", dict.fromkeys(case.inputs for case in STATIC.values()))
def test_every_kernel_is_within_a_step_of_the_reference(
    inputs: Callable[..., Tensor], subtests: pytest.Subtests
) -> None:
    names, model, lowered = branches(inputs)
    scales = [float(node.args[1]) for node in lowered.reference.graph.output_node().all_input_nodes]
    assert len(scales) == len(names) > 1
    for name, (first, *kernels, last) in zip(names, computing_in_branches(lowered), strict=True):
        with subtests.test(name=name):
            assert (first, last) == (QUANTIZE, DEQUANTIZE)
            assert tuple(kernels) == STATIC[name].kernels
    for count in (1, 4, 24):
        x = [1.5 * inputs(count) for _ in names]
        for name, scale, expected, found in zip(names, scales, lowered.reference(x), lowered(x), strict=True):
            with subtests.test(name=name, count=count):
                assert ((found - expected) / scale).abs().max() < 1.001
                assert count < 24 or expected.unique().numel() > 7
    x = [inputs() for _ in names]
    for name, exact, found in zip(names, model(x), lowered(x), strict=True):
        with subtests.test(name=name):
            assert 20 < sqnr(exact, found) < 60


def test_any_spatial_size() -> None:
    sizes = {"conv2d bn relu": (2, 13, 17), "conv1d": (3, 40), "pools": (1, 20, 8)}
    for inputs in (images, signals):
        names, _, lowered = branches(inputs)
        scales = [float(node.args[1]) for node in lowered.reference.graph.output_node().all_input_nodes]
        x = [inputs(*sizes.get(name, ())) for name in names]
        for name, scale, expected, found in zip(names, scales, lowered.reference(x), lowered(x), strict=True):
            assert ((found - expected) / scale).abs().max() < 1.001, name


def tokens(count: int = 5) -> Tensor:
    return torch.randint(0, 10, (count, 3))


def of_embeddings(qconfig: Any) -> QConfigMapping:
    mapping = QConfigMapping().set_object_type(nn.Embedding, qconfig)
    return mapping.set_object_type(nn.EmbeddingBag, qconfig)


BYTES, NIBBLES = map(
    of_embeddings, (float_qparams_weight_only_qconfig, float_qparams_weight_only_qconfig_4bit)
)
#: Kernels that return floats: (model, its input, mapping, kernel, dB against the float model).
FLOATING = {
    "embedding": (lambda: nn.Embedding(10, 6), tokens, BYTES, "aten.embedding.default", 40),
    "embedding, 4 bits": (
        lambda: nn.Embedding(10, 6),
        tokens,
        NIBBLES,
        "aten.embedding.default",
        18,
    ),
    "embedding bag": (
        lambda: nn.EmbeddingBag(10, 6, mode="sum"),
        tokens,
        BYTES,
        "aten.embedding.default",
        40,
    ),
    "dynamic": (linear, rows, DYNAMIC, f"{N}.recurrent.default", 30),
    "dynamic relu": (
        behind(linear, nn.ReLU),
        rows,
        DYNAMIC,
        f"{N}.recurrent.default",
        30,
    ),
}


@pytest.mark.parametrize("name", FLOATING)
def test_kernels_that_give_floats(name: str) -> None:
    """The integers equal those of the reference graph; the rest is the order of float additions."""
    torch.manual_seed(0)
    build, inputs, mapping, kernel, quality = FLOATING[name]
    model = nn.Sequential(build()).eval()
    lowered = converted_by_us(model, [(inputs(),)], mapping)
    assert kernel in computing(lowered)
    assert not any("dequantize" in target for target in computing(lowered))
    for count in (1, 3, 64):
        x = inputs(count)
        torch.testing.assert_close(lowered(x), lowered.reference(x), rtol=1e-5, atol=1e-6)
    assert quality < sqnr(model(x), lowered(x)) < quality + 25


def test_linears_in_float16_round_no_input_as_in_fx() -> None:
    """FX's reference rounds the inputs of its kernel, too, and its kernel does not."""
    model = nn.Sequential(linear(), nn.ReLU(), linear()).eval()
    lowered = converted_by_us(model, [(rows(),)], HALF)
    prepared = fx.prepare_fx(copy.deepcopy(model), HALF, (rows(),))
    theirs = fx.convert_fx(prepared)
    x = rows(64)
    torch.testing.assert_close(lowered(x), theirs(x), rtol=1e-5, atol=1e-6)
    assert not torch.equal(lowered(x), lowered.reference(x))
    assert not any("convert_element_type" in target for target in computing(lowered))
    assert 60 < sqnr(model(x), lowered.reference(x)) < sqnr(model(x), lowered(x)) < 85


def test_an_index_beyond_the_table_is_an_error() -> None:
    lowered = converted_by_us(nn.Sequential(nn.Embedding(10, 6)).eval(), [(tokens(),)], BYTES)
    for index in (-1, 10):
        with pytest.raises(CallError, match="index out of range"):
            lowered(torch.tensor([[index]]))


#: Ops that stay float between their q-dq: (model, inputs, mapping, op, why).
LEFT = {
    "softmax": (
        behind(linear, lambda: nn.Softmax(1)),
        rows,
        DEFAULT,
        "aten.softmax.int",
        "no integer kernel",
    ),
    "no batch": (
        lambda: nn.Conv1d(8, 6, 3),
        lambda: torch.randn(8, 16),
        DEFAULT,
        "aten.conv1d.default",
        "batched inputs only",
    ),
    "a bag without an index": (
        lambda: nn.EmbeddingBag(10, 6, mode="mean", padding_idx=1),
        tokens,
        BYTES,
        "aten.embedding_bag.padding_idx",
        "it skips an index",
    ),
    "prelu": (behind(linear, nn.PReLU), rows, DEFAULT, "aten.prelu.default", "no integer kernel"),
    "uneven padding": (
        lambda: nn.Conv2d(8, 6, 2, padding="same"),
        images,
        DEFAULT,
        "aten.conv2d.padding",
        "pads one side more",
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_explain_says_what_was_not_lowered_and_why(name: str) -> None:
    torch.manual_seed(0)
    build, inputs, mapping, op, reason = LEFT[name]
    x = inputs()
    lowered = converted_by_us(nn.Sequential(build()).eval(), [(x,)], mapping)
    (decision,) = [d for d in tc.explain(lowered) if d.action == "reference"]
    assert decision.kind == op
    assert reason in decision.reason
    torch.testing.assert_close(lowered(x), lowered.reference(x), rtol=0, atol=1e-5)


def test_explain_names_the_kernels() -> None:
    lowered = converted_by_us(nn.Sequential(linear(), nn.ReLU()).eval(), [(rows(),)])
    (decision,) = tc.explain(lowered).find("0/linear")
    assert (decision.action, decision.kind) == ("lowered", "aten.linear.default")
    assert decision.reason == f"runs as {LINEAR}"


def test_trained_ranges_saturate_as_in_training() -> None:
    """Training uses a reduced range."""
    torch.manual_seed(0)
    prepared = tc.prepare_qat_fx(
        nn.Sequential(linear(), nn.ReLU(), linear()), get_default_qat_qconfig_mapping("x86"), (rows(),)
    )
    calibrate(prepared, [(rows(),)])
    lowered = tc.convert_fx(prepared.eval())
    x = 10 * rows(64)
    steps = (lowered(x) - lowered.reference(x)) / result_scale(lowered)
    assert steps.abs().max() < 1.001
    assert lowered(x).unique().numel() <= 128


def test_a_kernel_that_would_keep_its_input_qparams_does_not_where_they_differ() -> None:
    """FX's lowering drops the quantize behind a max pool, and with it the qparams."""
    torch.manual_seed(0)
    model = Calls(lambda m, x: torch.cat([F.max_pool2d(m(x), 2), 3 * x[:, :, :3, :4]], 1), conv()).eval()
    lowered = converted_by_us(model, [(images(),)])
    x = images()
    steps = (lowered(x) - lowered.reference(x)) / result_scale(lowered)
    assert steps.abs().max() < 1.001
    pooled, again = (computing(lowered).index(op) for op in (POOL, TABLE))
    assert pooled < again < computing(lowered).index("aten.cat.default")


def test_bit_equal_with_fx_lowered() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.Hardswish(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 10),
    ).eval()
    data = [(torch.randn(4, 3, 16, 16),) for _ in range(3)]
    lowered = converted_by_us(model, data)
    prepared = fx.prepare_fx(model, DEFAULT, data[0])
    calibrate(prepared, data)
    theirs = fx.convert_fx(prepared)
    (x,) = data[0]
    assert torch.equal(lowered(x), theirs(x))
    assert 20 < sqnr(model(x), lowered(x)) < 50


def test_a_kernel_covers_no_activation_that_stays_float() -> None:
    """A linear under a QConfig and the ReLU behind it under none: FX quantizes nothing between them."""
    torch.manual_seed(0)
    mapping = get_default_qconfig_mapping("x86").set_module_name("1", None)
    model = nn.Sequential(linear(), nn.ReLU(), linear()).eval()
    lowered = converted_by_us(model, [(rows(24),)], mapping)
    x = rows(64)
    assert computing(lowered).count(LINEAR) == 2
    assert ((lowered(x) - lowered.reference(x)) / result_scale(lowered)).abs().max() < 1.001
    assert 20 < sqnr(model(x), lowered(x)) < 60


class Clamped(nn.Module):
    """ReLUs and a clamp that FX does not fuse, behind layers that other ops read too or do not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 1)
        self.linear = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = torch.relu(self.first(x))
        second = self.second(first)
        pixels = torch.clamp(second, -0.3, 0.4).flatten(2).transpose(1, 2)
        return torch.relu(self.linear(pixels)).transpose(1, 2), second.flatten(1)


def test_kernels_saturate_to_a_clamp_that_alone_reads_them() -> None:
    torch.manual_seed(0)
    model, x = Clamped().eval(), images()
    prepared = tc.prepare_fx(model, DEFAULT, (x,))
    prepared(x)
    converted = tc.convert_fx(prepared)
    clamps = [node.name for node in converted.graph.nodes if "clamp" in str(node.target)]
    assert clamps == ["clamp"]  # The result of the second convolution is read without it, too.
    reasons = {decision.node: decision.reason for decision in converted.lowering}
    assert all(reasons[name].startswith(FUSED) for name in ("relu", "relu_1"))
    for x in (images(), 3 * images(2, 5, 6)):
        for result, expected, floats in zip(converted(x), converted.reference(x), model(x), strict=True):
            assert torch.equal(result, expected)
            assert 10 < sqnr(floats, result) < 50
