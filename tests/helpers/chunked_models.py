"""Specs and models shared by tests of operators with several outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.ao.quantization.fx._decomposed
from torch import Tensor, nn
from torch.fx import GraphModule
from torchao.quantization.pt2e.observer import MinMaxObserver
from torchao.quantization.pt2e.quantizer import (
    DerivedQuantizationSpec,
    FixedQParamsQuantizationSpec,
    QuantizationSpec,
)

from tests.helpers.oracle import leaves

ATEN = torch.ops.aten


def int8(observer: Any = MinMaxObserver) -> QuantizationSpec:
    return QuantizationSpec(torch.int8, observer, -128, 127, torch.per_tensor_affine)


UINT8 = QuantizationSpec(torch.uint8, MinMaxObserver, 0, 255, torch.per_tensor_affine)


FIXED = FixedQParamsQuantizationSpec(torch.int8, 1 / 64, 3, -128, 127, torch.per_tensor_affine)


class Apply(nn.Module):
    """Return ``function`` as a module; every tensor that it returns is a result of the module."""

    def __init__(self, function: Callable[..., Any], *submodules: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.submodules = nn.ModuleList(submodules)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(leaves(self.function(x)))


def export(function: Callable[..., Any], x: Tensor, modules: tuple[nn.Module, ...] = ()) -> GraphModule:
    return torch.export.export(Apply(function, *modules).eval(), (x,)).module()


X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 9)


def product_of_scales(observers: list[Any]) -> tuple[Tensor, Tensor]:
    scales = [observer.calculate_qparams()[0] for observer in observers]
    return torch.stack(scales).prod(0), torch.zeros(1, dtype=torch.int32)


def derived(*points: Any) -> DerivedQuantizationSpec:
    return DerivedQuantizationSpec(
        list(points), product_of_scales, torch.int32, -(2**31), 2**31 - 1, torch.per_tensor_affine
    )
