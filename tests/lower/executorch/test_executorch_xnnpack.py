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


def steps_of_results(model: GraphModule) -> list[float]:
    """Return the scales of the results, each of which a quantize or a dequantize computes."""
    (output,) = model.graph.find_nodes(op="output")
    return [float(result.args[1]) for result in output.all_input_nodes]


@pytest.mark.slow
def test_convolution_and_linear_within_one_step_per_tensor() -> None:
    model = converted(image_classifier(), PER_TENSOR, images)
    program = to_executorch(model, (images(),), backend="xnnpack")
    assert program.report is not None
    taken = {name: program.report.delegated.get(name) for name in ("aten.convolution", "aten.linear")}
    assert taken == {"aten.convolution": 1, "aten.linear": 1}
    assert "aten.convolution" not in {name for name, _ in program.report.left}
    x = images()
    check_within_one_step(program(x), model(x), steps_of_results(model)[0])


def check_within_one_step(found: Tensor, expected: Tensor, step: float) -> None:
    difference = (found - expected).abs() / step
    assert difference.max() < 1.01
    assert (difference < 0.01).float().mean() > 0.95


class Filter(nn.Module):
    """A convolution of one dimension, which XNNPACK reshapes to two, and a linear, which it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Conv1d(6, 4, 5, stride=2, padding=2), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.first(x).relu().transpose(1, 2))


class SideBySide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.images, self.lines, self.line = image_classifier(), Filter(), nn.Conv1d(6, 4, 5)
        self.rows = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))

    def forward(self, images: Tensor, lines: Tensor, line: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
        return self.images(images), self.lines(lines), self.line(line), self.rows(rows)


def test_convolutions_linears_and_integers_side_by_side_within_one_step() -> None:
    """What XNNPACK would reshape with two free sizes is left, and integers that the model hands out stay
    uint8."""

    def inputs(batch: int = 4, length: int = 20) -> tuple[Tensor, ...]:
        return images(), torch.randn(batch, 6, length), torch.randn(1, 6, length), torch.randn(16, 8)

    interface = PrepareCustomConfig().set_output_quantized_indexes([3])
    model = by_us(SideBySide().eval(), PER_CHANNEL, [inputs(), inputs()], interface)[1]
    program = to_executorch(model, inputs(), backend="xnnpack")
    assert program.report is not None
    taken = {name: program.report.delegated.get(name) for name in ("aten.convolution", "aten.linear")}
    assert taken == {"aten.convolution": 2, "aten.linear": 3}
    left = {why: count for (name, why), count in program.report.left.items() if name == "aten.convolution"}
    assert left == {"XNNPACK reshapes a tensor with one free size at most": 1}
    assert any("torch.uint8 [0, 255]" in reason for _, reason in program.report.left)
    steps = steps_of_results(model)
    for batch, length in ((4, 20), (2, 13)):
        given = inputs(batch, length)
        found, expected = program(*given), model(*given)
        check_within_one_step(found[0], expected[0], steps[0])
        assert (found[1] - expected[1]).abs().max() < 1.01 * steps[1]
        assert (found[2] - expected[2]).abs().max() < 1.01 * steps[2]
        assert found[3].dtype is torch.uint8
        assert (found[3].int() - expected[3].int()).abs().max() <= 1


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
