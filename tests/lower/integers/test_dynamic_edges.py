"""Dynamic and float16 linears at the edges: half-precision models, batches without rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.quantization import QConfigMapping, default_dynamic_qconfig, float16_dynamic_qconfig

import torchq_compat as tc
from tests.helpers.once import made_once
from tests.helpers.oracle import sqnr
from torchq_compat.errors import CallError

CONVERTS = [tc.convert_to_reference_fx, tc.convert_fx]


def float_model() -> nn.Module:
    """Fill in weights that bfloat16 and float16 hold without rounding."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).eval()
    return model.to(torch.bfloat16).to(torch.float16).float()


QCONFIGS = {"int8": default_dynamic_qconfig, "float16": float16_dynamic_qconfig}


@made_once
def prepared(dtype: torch.dtype, qconfig: str) -> Any:
    example = (torch.randn(4, 16).to(dtype),)
    mapping = QConfigMapping().set_global(QCONFIGS[qconfig])
    return tc.prepare_fx(float_model().to(dtype), mapping, example)


def converted(dtype: torch.dtype, qconfig: str, convert: Any) -> Any:
    return convert(prepared(dtype, qconfig))


@torch.no_grad()
@pytest.mark.parametrize("convert", CONVERTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dynamic_models_of_half_precision_keep_their_dtype(dtype: torch.dtype, convert: Any) -> None:
    torch.manual_seed(1)
    x = torch.randn(64, 16).to(torch.bfloat16)
    found = converted(dtype, "int8", convert)(x.to(dtype))
    assert found.dtype is dtype
    expected = converted(torch.float32, "int8", tc.convert_to_reference_fx)(x.float())
    assert sqnr(expected, found.float()) > (50 if dtype is torch.float16 else 35)
    assert 20 < sqnr(float_model()(x.float()), found.float()) < 45


@torch.no_grad()
@pytest.mark.parametrize("convert", CONVERTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_float16_in_models_of_half_precision_keeps_their_dtype(dtype: torch.dtype, convert: Any) -> None:
    torch.manual_seed(1)
    x = torch.randn(64, 16).to(torch.bfloat16).to(dtype)
    found = converted(dtype, "float16", convert)(x)
    assert found.dtype is dtype
    assert torch.equal(found, float_model().to(dtype)(x))


@torch.no_grad()
def test_a_dynamic_linear_without_rows() -> None:
    """The q-dq graph chooses qparams from the values, and there are none; the kernel does without."""
    empty = torch.zeros(0, 16)
    assert converted(torch.float32, "int8", tc.convert_fx)(empty).shape == (0, 8)
    reference = converted(torch.float32, "int8", tc.convert_to_reference_fx)
    with pytest.raises(CallError, match=r"choose_qparams.*empty.*\nHint: "):
        reference(empty)
