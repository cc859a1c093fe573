"""Batch norms folded into convolutions of every kind, calibrated and trained."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.ao.quantization.quantize_fx as fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import (
    disable_observer,
    get_default_qat_qconfig_mapping,
    get_default_qconfig_mapping,
)
from torch.ao.quantization.backend_config import BackendConfig, BackendPatternConfig, DTypeConfig
from torch.ao.quantization.utils import MatchAllNode

import torchq_compat as tc
from tests.helpers.once import made_once
from tests.helpers.oracle import (
    activation_qparams,
    by_fx,
    by_us,
    calibrate,
    fx_activation_qparams,
    leaves,
    sqnr,
)
from tests.helpers.side_by_side import side_by_side
from torchq_compat.support.decisions import Action

BATCH_NORM = torch.ops.aten.batch_norm.default


def with_statistics(norm: Any) -> nn.Module:
    norm.running_mean.normal_(0, 0.5), norm.running_var.uniform_(0.5, 2)
    if norm.affine:
        nn.init.uniform_(norm.weight, 0.5, 1.5), nn.init.normal_(norm.bias)
    return norm  # type: ignore[no-any-return]


#: Rank, transposed, groups, affine, bias.
PAIRS = (
    (1, False, 2, False, True),
    (1, True, 2, True, False),
    (2, True, 1, False, False),
    (2, True, 2, False, True),
    (2, True, 8, True, True),
    (3, False, 1, True, False),
    (3, True, 2, True, True),
)


def pair(rank: int, transposed: bool, groups: int, affine: bool, bias: bool) -> nn.Module:
    kind = f"Conv{'Transpose' if transposed else ''}{rank}d"
    conv = getattr(nn, kind)(8, 16 if transposed else 8, 3, 2, padding=1, groups=groups, bias=bias)
    norm = getattr(nn, f"BatchNorm{rank}d")(conv.out_channels, affine=affine)
    return nn.Sequential(conv, with_statistics(norm))


@made_once
def all_pairs() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return all pairs side by side, and one input for each rank."""
    torch.manual_seed(0)
    model = side_by_side([pair(*each) for each in PAIRS], [(each[0] - 1,) for each in PAIRS])
    return model, tuple(torch.randn(4, 8, *[6] * rank) for rank in (1, 2, 3))


def norms_of(graph_module: Any) -> list[torch.fx.Node]:
    return [node for node in graph_module.graph.nodes if node.target is BATCH_NORM]


def test_calibrated() -> None:
    model, x = all_pairs()
    model.eval()
    prepared = tc.prepare_fx(model, get_default_qconfig_mapping("x86"), x)
    assert not norms_of(prepared)
    with torch.no_grad():
        expected = model(*x)
        for ours, theirs in zip(prepared(*x), expected, strict=True):
            assert sqnr(theirs, ours) > 110
        converted = tc.convert_fx(prepared)
        for ours, reference, theirs in zip(converted(*x), converted.reference(*x), expected, strict=True):
            assert 28 < sqnr(theirs, ours) < 60
            assert sqnr(reference, ours) > 45


def trained(model: nn.Module, x: tuple[Tensor, ...], engine: str) -> Any:
    """Return ``model`` prepared and trained for two steps, with its observers off."""
    prepared = tc.prepare_qat_fx(model.train(), get_default_qat_qconfig_mapping(engine), x)
    optimizer = torch.optim.SGD(prepared.parameters(), lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        torch.stack([y.pow(2).mean() for y in leaves(prepared(*x))]).sum().backward()
        optimizer.step()
    assert all(bool(weight.grad.any()) for weight in prepared.parameters() if weight.dim() > 2)
    return prepared.eval().apply(disable_observer)


def test_trained() -> None:
    """FX raises for transposed convolutions, and for batch norms without affine parameters."""
    model, x = all_pairs()
    prepared = trained(model, x, "x86")
    converted = tc.convert_to_reference_fx(prepared)
    assert len(norms_of(prepared)) == len(PAIRS)
    assert not norms_of(converted)
    with torch.no_grad():
        for ours, theirs in zip(converted(*x), prepared(*x), strict=True):
            assert sqnr(theirs, ours) > 45


@pytest.mark.parametrize("engine", ["fbgemm", "qnnpack", "onednn"])
def test_the_default_mappings_train_transposed_convolutions(engine: str) -> None:
    torch.manual_seed(0)
    x = (torch.randn(4, 8, 6, 6),)
    prepared = trained(pair(2, True, 2, True, True), x, engine)
    with torch.no_grad():
        assert sqnr(prepared(*x), tc.convert_to_reference_fx(prepared)(*x)) > 45


class Subclass(nn.Conv2d):
    """A convolution of a package, which FX traces."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight, self.bias)


class NormReLU(nn.BatchNorm2d):
    """A batch norm of a package, with its activation."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        return F.relu(y)


class OfPackages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm_relu = nn.Conv2d(4, 8, 3), with_statistics(NormReLU(8))
        self.subclass, self.norm = Subclass(8, 8, 3), with_statistics(nn.BatchNorm2d(8))
        self.known, self.known_norm = nn.Conv2d(8, 8, 3), with_statistics(nn.BatchNorm2d(8))
        self.up, self.up_norm = nn.ConvTranspose2d(8, 4, 2), with_statistics(nn.BatchNorm2d(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.subclass(self.norm_relu(self.conv(x))))
        return F.relu(self.up_norm(self.up(F.relu(self.known_norm(self.known(x))))))


def test_what_fx_leaves_apart_is_told_and_can_be_left() -> None:
    torch.manual_seed(0)
    model, x, mapping = OfPackages().eval(), (torch.randn(4, 4, 9, 9),), get_default_qconfig_mapping("x86")
    with pytest.warns(tc.QuantizationWarning, match=r"'norm_relu'.* FX leaves the batch norm apart") as told:
        ours = tc.prepare_fx(model, mapping, x)
    assert [each.message.code for each in told if isinstance(each.message, tc.QuantizationWarning)] == [
        "TQ584"
    ]
    folded = {d.path: d.code for d in tc.explain(ours) if d.action is Action.FOLDED}
    assert folded == {"norm_relu": "TQ584", "norm": "TQ584", "known_norm": ""}, "not that of up, as FX"
    _, theirs = by_fx(model, mapping, [x])
    as_fx = tc.prepare_fx(model, mapping, x, fuse_as_fx=True)
    assert {str(node.args[1].target) for node in norms_of(as_fx)} == {
        "norm_relu.weight", "norm.weight", "up_norm.weight",
    }  # fmt: skip
    calibrate(ours, [x]), calibrate(as_fx, [x])
    converted = tc.convert_to_reference_fx(as_fx)
    assert activation_qparams(converted) == fx_activation_qparams(theirs)
    with torch.no_grad():
        expected = model(*x)
        assert sqnr(theirs(*x), converted(*x)) > 45
        assert sqnr(expected, tc.convert_to_reference_fx(ours)(*x)) > sqnr(expected, theirs(*x))


@pytest.mark.parametrize("off", ["0", "1"])
def test_what_is_switched_off_is_what_fx_switches_off(off: str) -> None:
    """FX folds before it reads a QConfig: that of the batch norm decides nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 3), with_statistics(nn.BatchNorm2d(8)), nn.Conv2d(8, 4, 1)).eval()
    mapping, x = get_default_qconfig_mapping("x86").set_module_name(off, None), (torch.randn(4, 4, 7, 7),)
    _, ours = by_us(model, mapping, [x])
    _, theirs = by_fx(model, mapping, [x])
    assert activation_qparams(ours) == fx_activation_qparams(theirs)
    torch.testing.assert_close(ours(*x), theirs(*x))
    trains = get_default_qat_qconfig_mapping("x86").set_module_name(off, None)
    prepared = tc.prepare_qat_fx(model.train(), trains, x)
    oracle = fx.prepare_qat_fx(copy.deepcopy(model), trains, x)
    torch.testing.assert_close(prepared(*x), oracle(*x))


def test_a_pattern_with_a_batch_norm_that_nothing_fuses_is_matched() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), with_statistics(nn.BatchNorm2d(4))
            self.relu = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.relu(torch.add(self.norm(self.conv(x)), x))
            return result

    dtypes = DTypeConfig(torch.quint8, torch.quint8, torch.qint8, torch.float)
    nested = (nn.ReLU, (torch.add, (nn.BatchNorm2d, nn.Conv2d), MatchAllNode))
    row = BackendPatternConfig()._set_pattern_complex_format(nested).add_dtype_config(dtypes)
    model, x = Residual().eval(), torch.randn(4, 4, 8, 8)
    config = BackendConfig("of its own").set_backend_pattern_config(row)
    prepared = tc.prepare_fx(model, get_default_qconfig_mapping("x86"), (x,), backend_config=config)
    calibrate(prepared, [(x,)])
    quantized = [item.kind for item in tc.explain(prepared) if item.action is Action.QUANTIZED]
    assert quantized == ["Conv2d + add.Tensor + ReLU"]
    assert 30 < sqnr(model(x), tc.convert_fx(prepared, backend_config=config)(x)) < 60
