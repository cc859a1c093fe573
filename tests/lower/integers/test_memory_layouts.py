"""Memory layouts that torch's kernels on quantized tensors mistake: a batch of one behind a transpose."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.quantization.quantize_fx as fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import get_default_qconfig_mapping
from torch.fx import GraphModule

import torchq_compat as tc
from tests.helpers.oracle import by_fx, calibrate, sqnr
from tests.helpers.side_by_side import Branches

MAPPING = get_default_qconfig_mapping("x86")
Op = Callable[[Tensor], Tensor]
PLANES: dict[str, Op] = {
    "avg_pool": lambda x: F.avg_pool2d(x, 2),
    "max_pool": lambda x: F.max_pool2d(x, 2),
    "adaptive_avg_pool": lambda x: F.adaptive_avg_pool2d(x, (3, 2)),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "instance_norm": nn.InstanceNorm2d(6, affine=True),
    "group_norm": nn.GroupNorm(2, 6),
}
LINES: dict[str, Op] = {
    "avg_pool": lambda x: F.avg_pool1d(x, 2),
    "max_pool": lambda x: F.max_pool1d(x, 2),
    "adaptive_avg_pool": lambda x: F.adaptive_avg_pool1d(x, 3),
}


class Tokens(nn.Module):
    """Tokens that become an image, as between a transformer's blocks."""

    def __init__(self, op: Op, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.linear, self.op, self.sizes = nn.Linear(6, 6), op, sizes

    def forward(self, x: Tensor) -> Tensor:
        return self.op(self.linear(x).transpose(1, 2).reshape(x.shape[0], 6, *self.sizes))


class OfChannelsLast(nn.Module):
    """A pixel of 1 by 1 whose channels are a part of those before."""

    def __init__(self, op: Op) -> None:
        super().__init__()
        self.conv, self.op = nn.Conv2d(6, 12, 1), op

    def forward(self, x: Tensor) -> Tensor:
        return self.op(self.conv(x)[:, :6])


def lowered_by_us(model: nn.Module, batches: list[Any]) -> GraphModule:
    prepared = tc.prepare_fx(model, MAPPING, batches[0])
    calibrate(prepared, batches)
    return tc.convert_fx(prepared)


def close(lowered: GraphModule, batches: list[Any]) -> None:
    """Assert that ``lowered`` gives its reference's values but for ties, at every one of ``batches``."""
    reference = lowered.reference
    for batch in batches:
        with torch.no_grad():
            check_close(reference(*batch), lowered(*batch))


def check_close(expected: Tensor, found: Tensor, name: str = "") -> None:
    assert found.shape == expected.shape, name
    steps = expected.unique().diff().min()  # a quantization step, or several
    # The mean of four integers is often a tie, which kernels round to the other side.
    assert (found - expected).abs().max() <= 1.01 * steps, name
    assert sqnr(expected, found) > 18, name


#: Ops, and the sizes of the image that they read.
OPS: dict[str, tuple[Op, tuple[int, ...]]] = {
    **{f"{name}2d": (op, (4, 6)) for name, op in PLANES.items()},
    **{f"{name}1d": (op, (24,)) for name, op in LINES.items()},
    "avg_pool3d": (lambda x: F.avg_pool3d(x, 2), (2, 4, 3)),
    "max_pool3d": (lambda x: F.max_pool3d(x, 2), (2, 4, 3)),
    "nearest3d": (lambda x: F.interpolate(x, scale_factor=2), (2, 4, 3)),
}


def test_a_batch_of_one_behind_a_transpose() -> None:
    model = Branches(Tokens(*each) for each in OPS.values()).eval()
    lowered = lowered_by_us(model, [([torch.randn(2, 24, 6) for _ in OPS],) for _ in range(3)])
    linears = [node for node in lowered.graph.nodes if "native.linear" in str(node.target)]
    assert len(linears) == len(OPS)
    for batch in (1, 2, 3):
        x = [torch.randn(batch, 24, 6) for _ in OPS]
        with torch.no_grad():
            results = zip(OPS, lowered.reference(x), lowered(x), strict=True)
        for name, expected, found in results:
            check_close(expected, found, name)


@pytest.mark.parametrize("name", ["adaptive_avg_pool", "bilinear", "nearest"])
def test_a_slice_of_one_pixel(name: str) -> None:
    lowered = lowered_by_us(OfChannelsLast(PLANES[name]).eval(), [(torch.randn(2, 6, 1, 1),)] * 2)
    close(lowered, [(torch.randn(batch, 6, 1, 1),) for batch in (1, 2, 3)])


def test_an_image_that_was_read_channels_last() -> None:
    """A picture of height, width and channels, as every decoder gives it."""
    model = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(3, 4, 1)).eval()
    lowered = lowered_by_us(model, [(torch.randn(2, 3, 8, 8),)] * 2)
    image = torch.randn(8, 8, 3).permute(2, 0, 1)[None]
    assert image.stride()[0] == 3
    close(lowered, [(image,)])


def test_fx_is_wrong() -> None:
    model, batches = Tokens(PLANES["bilinear"], (4, 6)).eval(), [(torch.randn(2, 24, 6),) for _ in range(3)]
    prepared = fx.prepare_fx(copy.deepcopy(model), MAPPING, batches[0])
    calibrate(prepared, batches)
    theirs, ours = fx.convert_fx(prepared), lowered_by_us(model, batches)
    given = torch.randn(1, 24, 6)
    with torch.no_grad():
        assert sqnr(model(given), theirs(given)) < 10
        assert 25 < sqnr(model(given), ours(given)) < 60
        assert sqnr(model(given), by_fx(model, MAPPING, batches)[1](given)) > 25  # FX's reference
