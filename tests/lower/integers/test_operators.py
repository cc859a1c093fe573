"""The operators in C++ against what operators.py says they compute: bits, dtypes, shapes and strides."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from torchq_compat.lower.integers import operators
from torchq_compat.recurrent.kernel.build import kernel_build

NATIVE = torch.ops.torchq_compat_native
SHAPES = [(), (0, 3), (7,), (130,), (3, 70), (2, 3, 5), (2, 8, 5, 6), (1, 64, 9, 9), (2, 3, 4, 5, 6)]
Make = Callable[[tuple[int, ...]], Tensor]


def unsigned(shape: tuple[int, ...]) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def signed(shape: tuple[int, ...]) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


MAKES = (unsigned, signed)


def layouts(shape: tuple[int, ...], make: Make) -> Iterator[Tensor]:
    """Yield tensors of ``shape``: contiguous, channels last, permuted, expanded, with gaps."""
    yield make(shape)
    if len(shape) == 4:
        yield make(shape).contiguous(memory_format=torch.channels_last)
    if len(shape) == 5:
        yield make(shape).contiguous(memory_format=torch.channels_last_3d)
    if shape:
        yield make((*shape[:-1], 2 * shape[-1]))[..., ::2]
    if len(shape) > 1:
        yield make(shape[::-1]).permute(*reversed(range(len(shape))))
        yield make((shape[0], *[1] * (len(shape) - 1))).expand(shape)


def check_bits(name: str, *args: Any) -> None:
    assert kernel_build().is_loaded
    expected, found = getattr(operators, name)(*args), getattr(NATIVE, name)(*args)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), (name, args)
    assert torch.equal(found, expected), (name, args)
    check_strides(found, expected, name, args)


def check_strides(found: Tensor, expected: Tensor, *told: Any) -> None:
    """Compilers trust the strides of the specification, but for dimensions of one."""
    strides = zip(found.shape, found.stride(), expected.stride(), strict=True)
    assert not found.numel() or all(one == other for size, one, other in strides if size > 1), told


def check_steps(name: str, *args: Any, step: float = 1.0) -> None:
    expected, found = getattr(operators, name)(*args), getattr(NATIVE, name)(*args)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), (name, args)
    check_strides(found, expected, name, args)
    assert not found.numel() or float((found.double() - expected.double()).abs().max()) <= 1.001 * step


def test_floats_to_integers_and_back() -> None:
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e30, -0.0, 2.5, -1.5])
    for shape in SHAPES:
        for x in layouts(shape, torch.randn):
            if x.is_contiguous() and x.numel() > 7:
                x.view(-1)[:7] = special
            for low, high, is_signed in (
                (0, 255, False),
                (5, 127, False),
                (-128, 127, True),
                (-20, 30, True),
            ):
                check_bits("quantize", x, 0.0373, low // 2 + 3, low, high, is_signed)
        for x in itertools.chain.from_iterable(layouts(shape, make) for make in MAKES):
            check_bits("dequantize", x, 0.0373, 7)


def test_results_keep_the_layout_of_dense_inputs() -> None:
    x = unsigned((2, 8, 5, 6)).contiguous(memory_format=torch.channels_last)
    table = unsigned((256,))
    for found in (
        NATIVE.dequantize(x, 0.1, 3),
        NATIVE.quantize(x.float(), 0.1, 3, 0, 255, False),
        NATIVE.lookup(x, table, 0),
        NATIVE.arithmetic(x, 0.1, 3, x[:, :, :1, :1], 0.1, 3, "mul", 0.1, 3, 0, 255, False),
        NATIVE.max_pool(x, [2, 2], [2, 2], [0, 0], [1, 1], False),
        NATIVE.convolution(
            x,
            0.1,
            3,
            signed((4, 8, 3, 3)),
            torch.ones(4),
            None,
            [1, 1],
            [0, 0],
            [1, 1],
            1,
            9.0,
            3,
            0,
            255,
            "uint8",
        ),
    ):
        assert found.is_contiguous(memory_format=torch.channels_last)


def test_tables_and_factors_of_channels() -> None:
    for shape, make in itertools.product(SHAPES, MAKES):
        for x in layouts(shape, make):
            for of_table in MAKES:
                check_bits("lookup", x, of_table((256,)), 0)
                for axis in range(len(shape)):
                    check_bits("lookup", x, of_table((shape[axis], 256)), axis - len(shape))
            for axis in range(len(shape)):
                numbers = torch.randn(shape[axis]), torch.randn(shape[axis])
                check_bits("affine", x, 0.03, 7, *numbers, axis, 0.02, 100, 0, 255, False)


def others_of(shape: tuple[int, ...]) -> set[tuple[int, ...]]:
    """Return the shapes of what is broadcast to ``shape``."""
    by_channel = tuple(size if index == 1 else 1 for index, size in enumerate(shape))
    of_images = tuple(size if index < 2 else 1 for index, size in enumerate(shape))
    of_batch = tuple(size if index else 1 for index, size in enumerate(shape))
    return {shape, (), shape[1:], (1,) * len(shape), by_channel, of_images, of_batch}


@pytest.mark.parametrize("operation", operators.OPERATIONS)
def test_operations_on_two_tensors(operation: str) -> None:
    for shape, make, make_other in itertools.product(SHAPES[1:], MAKES, MAKES):
        for x, other in itertools.product(layouts(shape, make), sorted(others_of(shape))):
            y = next(itertools.islice(layouts(other, make_other), x.dim() % 2, None), make_other(other))
            check_bits("arithmetic", x, 0.03, 7, y, 0.021, -3, operation, 0.05, 100, 0, 255, False)
            check_bits("arithmetic", y, 0.03, 7, x, 0.021, -3, operation, 0.05, -10, -100, 90, True)


def test_means_and_pools() -> None:
    for shape, make in itertools.product(SHAPES[2:], MAKES):
        for x in layouts(shape, make):
            for count in range(1, len(shape) + 1):
                for dims in itertools.combinations(range(len(shape)), count):
                    check_steps("mean", x, 0.03, 7, list(dims), count % 2 == 0, 0.011, 100, 0, 255, False)
    pools = [
        ((2, 8, 9), 1),
        ((8, 9), 1),
        ((2, 8, 9, 11), 2),
        ((8, 9, 11), 2),
        ((1, 70, 9, 9), 2),
        ((2, 3, 5, 6, 7), 3),
    ]
    windows = [
        (2, 2, 0, 1, False),
        (3, 2, 1, 1, False),
        (3, 2, 1, 1, True),
        (2, 1, 1, 2, False),
        (3, 3, 1, 1, True),
    ]
    for (shape, rank), make, window in itertools.product(pools, MAKES, windows):
        *each, ceil_mode = window
        for x in layouts(shape, make):
            check_bits("max_pool", x, *([setting] * rank for setting in each), ceil_mode)


def results_of(step: float) -> Iterator[tuple[float, int, int, int, str]]:
    """Yield qparams and kinds of results: with and without a ReLU, over a part of the range, floats."""
    yield from ((step, 100, 0, 255, "uint8"), (step, 100, 100, 255, "uint8"), (step, 60, 10, 127, "uint8"))
    yield from ((step, 3, -128, 127, "int8"), (step, 3, 3, 100, "int8"), (1.0, 0, 0, 0, "float32"))


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_convolutions(rank: int) -> None:
    torch.manual_seed(0)
    channels = [(8, 16, 1), (8, 8, 8), (8, 16, 4), (3, 5, 1)]
    for (inputs, outputs, groups), (size, stride, padding, dilation) in itertools.product(
        channels, [(3, 1, 1, 1), (3, 2, 0, 1), (1, 1, 0, 1), (2, 2, 1, 2)]
    ):
        weight = torch.randint(-127, 128, (outputs, inputs // groups, *[size] * rank), dtype=torch.int8)
        scales, bias = torch.rand(outputs) * 0.01 + 0.001, torch.randn(outputs) if stride == 1 else None
        settings = ([stride] * rank, [padding] * rank, [dilation] * rank, groups)
        step = 64 * 64 * 0.005 * 0.02 * (weight[0].numel() ** 0.5) / 20
        for make in MAKES:
            for x in layouts((2, inputs, *(9, 8, 7)[:rank]), make):
                for zero_point, ends in zip((0, 3) * 3, results_of(step), strict=True):
                    args = (x, 0.02, zero_point, weight, scales, bias, *settings, *ends)
                    check_steps("convolution", *args, step=step * 1e-2 if ends[-1] == "float32" else 1.0)


@pytest.mark.parametrize("inputs", [12, 300])
def test_convolutions_of_any_number_of_pixels(inputs: int) -> None:
    """Pixels are computed in strips of some lengths."""
    torch.manual_seed(0)
    step = 64 * 64 * 0.005 * 0.02 * inputs**0.5 / 20
    for outputs, pixels in itertools.product((16, 40, 64, 130), (*range(1, 15), 17, 25, 49, 60, 61, 73)):
        weight = torch.randint(-127, 128, (outputs, inputs, 1), dtype=torch.int8)
        scales, x = torch.rand(outputs) * 0.01 + 0.001, unsigned((1, pixels, inputs)).transpose(1, 2)
        args = (x, 0.02, 3, weight, scales, None, [1], [0], [1], 1, step, 100, 0, 255, "uint8")
        check_steps("convolution", *args)


def test_linears() -> None:
    torch.manual_seed(0)
    for rows, (inputs, outputs) in itertools.product((1, 5, 12, 13, 40, 0), ((64, 64), (100, 33), (8, 4))):
        weight = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
        scales, step = torch.rand(outputs) * 0.01 + 0.001, 64 * 64 * 0.005 * 0.02 * inputs**0.5 / 20
        for make, leading, bias in itertools.product(
            MAKES, ((rows,), (rows, 1), (1, rows, 1), ()), (None, torch.randn(outputs))
        ):
            x = make((*leading, inputs)) // 2
            for ends in results_of(step):
                args = (x, 0.02, 3, weight, scales, bias, *ends)
                check_steps("linear", *args, step=step * 1e-2 if ends[-1] == "float32" else 1.0)


def test_packed_weights_are_those_of_the_tensor() -> None:
    """Written in place, past torch's count of versions, in other memory, forgotten."""
    torch.manual_seed(0)
    weight, scales, bias = signed((16, 8, 3, 3)), torch.rand(16) * 0.01 + 0.001, torch.randn(16)
    x, before = unsigned((1, 8, 6, 6)) // 2, NATIVE.kept_weights()
    args = (x, 0.02, 3, weight, scales, bias, [1, 1], [1, 1], [1, 1], 1, 0.5, 100, 0, 255, "uint8")
    check_steps("convolution", *args)
    assert NATIVE.kept_weights() == before + 1
    for change in (weight.neg_, lambda: weight.data.mul_(-1), bias.neg_, lambda: scales.mul_(2)):
        first = NATIVE.convolution(*args)
        change()
        check_steps("convolution", *args)
        assert not torch.equal(NATIVE.convolution(*args), first)
    assert NATIVE.kept_weights() == before + 1
    operators.forget_weights([weight.data_ptr()])
    assert NATIVE.kept_weights() == before
    check_steps("convolution", *args)


@pytest.mark.parametrize("outputs", [3, 1500, 5000])
def test_any_number_that_is_written_is_noticed(outputs: int) -> None:
    """The last one too, of few numbers even past torch's count of versions."""
    weight, scales, bias = signed((outputs, 8, 1)), torch.rand(outputs) * 0.01 + 0.001, torch.randn(outputs)
    x = unsigned((1, 8, 4)) // 2
    args = (x, 0.02, 3, weight, scales, bias, [1], [0], [1], 1, 0.5, 100, 0, 255, "uint8")
    for tensor in (bias, scales):
        first = NATIVE.convolution(*args)
        written = tensor.data if outputs < 2000 else tensor
        written[-1] += 50.0
        check_steps("convolution", *args)
        assert not torch.equal(NATIVE.convolution(*args)[:, -1], first[:, -1])


def test_what_does_not_fit_is_an_error() -> None:
    weight, scales, x = signed((4, 8)), torch.ones(4), unsigned((2, 8))
    ends = (1.0, 0, 0, 255, "uint8")
    for args in (
        (x.float(), 0.1, 0, weight, scales, None, *ends),
        (x[:, :5], 0.1, 0, weight, scales, None, *ends),
        (x, 0.1, 0, weight.int(), scales, None, *ends),
        (x, 0.1, 0, weight, scales[:2], None, *ends),
        (x, 0.1, 0, weight, scales, torch.ones(3), *ends),
        (x, 0.1, 0, weight, scales, None, 1.0, 0, 0, 255, "int32"),
    ):
        with pytest.raises(RuntimeError, match="torchq_compat_native: "):
            NATIVE.linear(*args)
    with pytest.raises(RuntimeError, match="there is no operation"):
        NATIVE.arithmetic(x, 0.1, 0, x, 0.1, 0, "pow", 0.1, 0, 0, 255, False)
