"""What the guide says in a sentence holds: equalizing by hand, silencing a code, leaving this package."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import get_default_qconfig_mapping
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config,
)

from tests.helpers.oracle import sqnr
from torchq_compat import convert_fx, prepare_fx
from torchq_compat.errors import QuantizationWarning

X86 = get_default_qconfig_mapping("x86")


def net(*sizes: int) -> nn.Sequential:
    torch.manual_seed(0)
    first, between, last = sizes
    return nn.Sequential(nn.Linear(first, between), nn.ReLU(), nn.Linear(between, last)).eval()


def quantized(model: nn.Module, x: Tensor) -> Tensor:
    prepared = prepare_fx(model, X86, (x,))
    prepared(x)
    return convert_fx(prepared)(x)


@torch.no_grad()
def test_equalizing_by_hand_as_tq202_says() -> None:
    model, x = net(8, 16, 4), torch.randn(256, 8)
    first, _, second = model
    first.weight[:2] *= 12  # two channels that are much wider than the others
    second.weight[:, :2] /= 12
    exact = model(x)
    before = sqnr(exact, quantized(model, x))
    asked, given = second.weight.abs().amax(0), torch.relu(first(x)).amax(0)
    s = (asked / given).sqrt()
    first.weight.mul_(s[:, None])
    first.bias.mul_(s)
    second.weight.div_(s)
    torch.testing.assert_close(model(x), exact)
    assert before < 30
    assert before + 6 < sqnr(exact, quantized(model, x)) < 50


def test_a_code_is_silenced_by_its_name() -> None:
    model, x = net(4, 4, 2), torch.randn(3, 4)
    with pytest.warns(QuantizationWarning, match=r"\[TQ405\]$"):
        convert_fx(prepare_fx(model, X86, (x,)))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*TQ405")
        convert_fx(prepare_fx(model, X86, (x,)))


def test_torchaos_own_words_give_a_model_as_near() -> None:
    model, x = net(8, 8, 4), torch.randn(16, 8)
    quantizer = X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config())
    plain = prepare_pt2e(torch.export.export(model, (x,)).module(), quantizer)
    plain(x)
    plain = convert_pt2e(plain)
    exact, ours = model(x), quantized(model, x)
    assert 0 < (plain(x) - ours).abs().max() < 0.05 * exact.abs().max()
    assert 25 < sqnr(exact, ours) < 50
