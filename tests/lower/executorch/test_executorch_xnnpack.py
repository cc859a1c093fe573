"""XNNPACK in ExecuTorch: what is delegated, what must not be, and results within one quantization step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import MinMaxObserver, QConfig, QConfigMapping, default_weight_observer
from torch.ao.quantization.backend_config import DTypeConfig, get_qnnpack_backend_config
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config,
)

from tests.helpers.executorch_models import (
    PER_CHANNEL,
    PER_TENSOR,
    converted,
    image_classifier,
    same_bits,
    tagger,
)
from tests.helpers.oracle import by_us, leaves, sqnr
from torchq_compat.custom_config import PrepareCustomConfig
from torchq_compat.errors import QuantizationWarning
from torchq_compat.lower.executorch.lowering import to_executorch
from torchq_compat.lower.executorch.passes import shift_to_int8
from torchq_compat.lower.export import export

QUANTIZE = torch.ops.quantized_decomposed.quantize_per_tensor.default


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def images(count: int = 64) -> Tensor:
    return torch.randn(count, 3, 8, 8)


def step_of_the_result(model: GraphModule) -> float:
    return float(model.graph.find_nodes(op="call_function", target=QUANTIZE)[-1].args[1])


@pytest.mark.parametrize(
    "mapping",
    [pytest.param(PER_TENSOR, marks=pytest.mark.slow), PER_CHANNEL],
    ids=["per tensor", "per channel"],
)
def test_convolution_and_linear_within_one_step(mapping: QConfigMapping) -> None:
    model = converted(image_classifier(), mapping, images)
    program = to_executorch(model, (images(),), backend="xnnpack")
    assert program.report is not None
    taken = {name: program.report.delegated.get(name) for name in ("aten.convolution", "aten.linear")}
    assert taken == {"aten.convolution": 1, "aten.linear": 1}
    assert "aten.convolution" not in {name for name, _ in program.report.left}
    x = images()
    difference = (program(x) - model(x)).abs() / step_of_the_result(model)
    assert difference.max() < 1.01
    assert (difference < 0.01).float().mean() > 0.95


class Filters(nn.Module):
    """Convolutions of one dimension, which XNNPACK reshapes to two, and a linear, which it takes as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(6, 8, 5, stride=2, padding=2), nn.Conv1d(8, 4, 1)
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.second(self.first(x).relu()).transpose(1, 2))


def test_what_xnnpack_would_reshape_with_two_free_sizes_is_left() -> None:
    model = converted(Filters(), PER_CHANNEL, lambda: torch.randn(4, 6, 20))
    program = to_executorch(model, (torch.randn(4, 6, 20),), backend="xnnpack")
    assert program.report is not None
    reasons = {reason for name, reason in program.report.left if name == "aten.convolution"}
    assert reasons == {"XNNPACK reshapes a tensor with one free size at most"}
    assert "aten.convolution" not in program.report.delegated
    assert program.report.delegated["aten.linear"] == 1
    for batch, length in ((4, 20), (2, 13)):
        x = torch.randn(batch, 6, length)
        assert (program(x) - model(x)).abs().max() < 1.01 * step_of_the_result(model)
    fixed = to_executorch(model, (torch.randn(1, 6, 20),), backend="xnnpack").report
    assert fixed is not None
    assert fixed.delegated["aten.convolution"] == 2


@pytest.mark.slow
def test_the_projection_of_all_steps_is_taken_and_the_loop_is_not() -> None:
    model = tagger(nn.LSTM(8, 12))
    program = to_executorch(model, (torch.randn(12, 4, 8),), backend="xnnpack")
    assert program.report is not None
    assert program.report.delegated["aten.linear"] == 2  # the head is the other one
    left = {name: reason for name, reason in program.report.left if "sigmoid" in name or "addmm" in name}
    assert left.keys() == {"aten.sigmoid", "aten.addmm"}
    assert all("body of a loop" in reason for reason in left.values())
    assert "2  aten.linear" in str(program.report)
    for size in ((12, 4), (5, 1), (1, 2)):
        x = torch.randn(*size, 8)
        for ours, theirs in zip(leaves(model(x)), leaves(program(x)), strict=True):
            assert ours.shape == theirs.shape
            assert sqnr(ours, theirs) > 40


def uint8_quantizes(program: ExportedProgram) -> int:
    nodes = program.graph.find_nodes(op="call_function", target=QUANTIZE)
    return sum(node.args[5] is torch.uint8 for node in nodes)


def test_uint8_qparams_become_int8_qparams_without_a_changed_bit() -> None:
    """XNNPACK accepts uint8 patterns and reads their integers as int8."""
    model = converted(image_classifier(), PER_TENSOR, images)
    program = export(model, (images(4),))
    x = images(4)
    before = program.module()(x)
    assert uint8_quantizes(program) > 0
    shift_to_int8(program)
    assert uint8_quantizes(program) == 0
    assert torch.equal(program.module()(x), before)


def test_integers_that_the_model_hands_out_stay_uint8() -> None:
    interface = PrepareCustomConfig().set_output_quantized_indexes([0])
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    model = converted(layers, PER_TENSOR, lambda: torch.randn(16, 8), interface)
    program = to_executorch(model, (torch.randn(16, 8),), backend="xnnpack")
    assert program.report is not None
    assert program.report.delegated["aten.linear"] == 1
    assert any("torch.uint8 [0, 255]" in reason for _, reason in program.report.left)
    x = torch.randn(16, 8)
    integers = program(x)
    assert integers.dtype is torch.uint8
    assert (integers.int() - model(x).int()).abs().max() <= 1


def linear_on_16_bits() -> GraphModule:
    backend = get_qnnpack_backend_config()
    for config in backend.configs:
        if config.pattern is nn.Linear:
            config.add_dtype_config(DTypeConfig(torch.qint32, torch.qint32, torch.qint8, torch.float))
    observer = MinMaxObserver.with_args(dtype=torch.qint32, quant_min=-(2**15), quant_max=2**15 - 1)
    mapping = QConfigMapping().set_global(QConfig(observer, default_weight_observer))
    return by_us(nn.Linear(8, 4).eval(), mapping, [(torch.randn(16, 8),)], backend_config=backend)[1]


def linear_on_half_of_uint8() -> GraphModule:
    config = get_default_x86_inductor_quantization_config(reduce_range=True)
    quantizer = X86InductorQuantizer().set_global(config)
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    return by_us(layers.eval(), quantizer, [(torch.randn(16, 8),)])[1]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (linear_on_16_bits, "not torch.int32 [-2147483648, 2147483647]"),
        (linear_on_half_of_uint8, "not torch.int8 [-128, -1]"),
    ],
    ids=["16 bits", "half of uint8"],
)
def test_other_qparams_are_left_to_the_portable_kernels(make: Callable[[], GraphModule], reason: str) -> None:
    """XNNPACK's own checks inspect the pattern, but not the qparams."""
    model = make()
    with pytest.warns(QuantizationWarning, match="xnnpack takes no operator"):
        program = to_executorch(model, (torch.randn(16, 8),), backend="xnnpack")
    assert program.report is not None
    assert not program.report.delegated
    assert any(reason in why for _, why in program.report.left)
    assert same_bits(model, program, torch.randn(9, 8), 5 * torch.randn(3, 8))
