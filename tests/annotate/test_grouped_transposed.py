"""A batch norm behind a grouped transposed convolution, whose weight has no axis with all output channels."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.ao.quantization import get_default_qconfig, get_default_qconfig_mapping
from torch.ao.quantization.qconfig_mapping import QConfigMapping

import torchq_compat as tc
from tests.helpers.oracle import calibrate, sqnr

MAPPINGS = {
    "default": get_default_qconfig_mapping("x86"),
    "one": QConfigMapping().set_global(get_default_qconfig("qnnpack")),
}


@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_it_stays_apart(rank: int, mapping: str) -> None:
    torch.manual_seed(0)
    conv = getattr(nn, f"Conv{rank}d")(4, 8, 1)
    transposed = getattr(nn, f"ConvTranspose{rank}d")(8, 8, 3, 2, groups=2, padding=1, output_padding=1)
    norm = getattr(nn, f"BatchNorm{rank}d")(8)
    norm.running_mean.normal_(), norm.running_var.uniform_(0.5, 2)
    model, x = nn.Sequential(conv, transposed, norm, nn.ReLU()).eval(), torch.randn(2, 4, *[5] * rank)
    prepared = tc.prepare_fx(model, MAPPINGS[mapping], (x,))
    calibrate(prepared, [(x,)])
    converted = tc.convert_fx(prepared)
    with torch.no_grad():
        assert 25 < sqnr(model(x), converted(x)) < 60
        assert sqnr(converted.reference(x), converted(x)) > 45
