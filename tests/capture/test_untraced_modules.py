"""Modules that FX does not trace and torch.export cannot: composite ones of torch.nn, and TorchScript."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.quantization.quantize_fx as fx
from torch import Tensor, nn
from torch.ao.quantization import get_default_qat_qconfig_mapping, get_default_qconfig_mapping

import torchq_compat as tc
from tests.helpers.oracle import (
    activation_qparams,
    by_fx,
    by_us,
    calibrate,
    fx_activation_qparams,
    op_decisions,
    sqnr,
)
from torchq_compat.capture.trial_runs import run_prepared
from torchq_compat.errors import CaptureError, QuantizationWarning
from torchq_compat.nn import quantizable
from torchq_compat.support.decisions import Action

MAPPING = get_default_qconfig_mapping("x86")
causal = nn.Transformer.generate_square_subsequent_mask


def padding(batch: int, length: int) -> Tensor:
    return torch.arange(length).expand(batch, length) >= length - 2


class Masked(nn.Module):
    """The model of PyTorch's tutorial on language models; it compares the mask with a causal one."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 8)
        self.middle: Any = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1, enable_nested_tensor=False
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.after(self.middle(self.before(x), mask))


class Padded(Masked):
    """In evaluation its fast path, which is not traced, returns zeros at padded positions. It has nested
    tensors, whose sizes are not followed."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.after(self.middle(self.before(x), src_key_padding_mask=mask))


class Decoded(Masked):
    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, batch_first=True), 1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.after(self.middle(self.before(x), x, tgt_mask=mask))


MODELS = {
    Masked: lambda batch, length: causal(length),
    Padded: padding,
    Decoded: lambda batch, length: causal(length),
}


@pytest.mark.parametrize("make", [Masked, Padded, Decoded], ids=lambda make: make.__name__)
def test_composite_modules_are_calls_as_in_fx(make: type[Masked], capfd: pytest.CaptureFixture[str]) -> None:
    model, mask = make().eval(), MODELS[make]
    batches = [(torch.randn(3, 5, 8), mask(3, 5)) for _ in range(3)]
    theirs = by_fx(model, MAPPING, batches)[1]
    capfd.readouterr()
    prepared, ours = by_us(model, MAPPING, batches)
    assert "def forward" not in capfd.readouterr().err  # torch's graph of the failed attempt
    assert activation_qparams(ours) == fx_activation_qparams(theirs)
    sizes = [(2, 9), (4, 3), (1, 6)]
    for given in (batches[0], *((torch.randn(*size, 8), mask(*size)) for size in sizes)):
        with torch.no_grad():
            exact, mine, its = (m(*given) for m in (model, ours, theirs))
        assert torch.equal(run_prepared(prepared, given), exact)
        assert sqnr(its, mine) > 45
        assert 18 < sqnr(exact, mine) < 60
    middle = next(d for d in op_decisions(ours) if d.path == "middle")
    assert middle.action is Action.FLOAT
    assert "one float call, as in FX, because traced it fails" in middle.reason


def test_a_mapping_for_what_is_inside_is_told() -> None:
    custom = tc.get_default_prepare_custom_config()
    custom.set_float_to_observed_mapping(nn.MultiheadAttention, quantizable.MultiheadAttention)
    with pytest.warns(QuantizationWarning, match=r"'middle' stays float.*mapped, .*MultiheadAttention"):
        tc.prepare_fx(Masked().eval(), MAPPING, (torch.randn(2, 6, 8), causal(6)), custom)


def test_lowered_and_trained() -> None:
    model, given = Masked(), (torch.randn(3, 5, 8), causal(5))
    prepared = tc.prepare_qat_fx(model.train(), get_default_qat_qconfig_mapping("x86"), given)
    assert all(p.requires_grad for p in prepared.parameters())
    prepared(*given).square().mean().backward()
    assert prepared.get_submodule("middle.layers.0.linear1").weight.grad.abs().sum() > 0
    prepared.eval()
    lowered = tc.convert_fx(prepared)
    with torch.no_grad():
        assert 18 < sqnr(copy.deepcopy(model).eval()(*given), lowered(*given)) < 60


class Refused(Masked):
    """What fails is not in the module of torch.nn."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = super().forward(x, mask)
        return y if y.sum() > 0 else -y


def test_the_first_error_stays() -> None:
    with pytest.raises(CaptureError, match="data-dependent"):
        tc.prepare_fx(Refused().eval(), MAPPING, (torch.randn(3, 5, 8), causal(5)))


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()


class Scripted(Masked):
    def __init__(self, compile: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.middle = compile(block())

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.middle(self.before(x)))


COMPILERS = [torch.jit.script, lambda module: torch.jit.trace(module, torch.randn(2, 8))]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("compile", COMPILERS, ids=["script", "trace"])
def test_torchscript_is_a_call_as_in_fx(compile: Callable[[nn.Module], Any]) -> None:
    model, batches = Scripted(compile).eval(), [(torch.randn(3, 5, 8),) for _ in range(3)]
    theirs = by_fx(model, MAPPING, batches)[1]
    with pytest.warns(QuantizationWarning, match="'middle' stays float: TorchScript is not quantized inside"):
        ours = by_us(model, MAPPING, batches)[1]
    assert activation_qparams(ours) == fx_activation_qparams(theirs)
    for given in (batches[0], (torch.randn(7, 2, 8),)):
        assert sqnr(theirs(*given), ours(*given)) > 45
        assert 18 < sqnr(model(*given), ours(*given)) < 60
    assert isinstance(ours.get_submodule("middle"), torch.jit.ScriptModule)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_torchscript_is_trained() -> None:
    model, given = Scripted(torch.jit.script).train(), (torch.randn(3, 5, 8),)
    mapping = get_default_qat_qconfig_mapping("x86")
    its = fx.prepare_qat_fx(copy.deepcopy(model), mapping, given)
    with pytest.warns(QuantizationWarning, match="TorchScript"):
        mine = tc.prepare_qat_fx(model, mapping, given)
    losses = []
    for prepared in (its, mine):
        loss = prepared(*given).square().mean()
        loss.backward()
        losses.append((loss.item(), prepared.get_submodule("before").weight.grad.abs().sum().item()))
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    calibrate(mine.eval(), [given])
    assert 18 < sqnr(model.eval()(*given), tc.convert_fx(mine)(*given)) < 60
