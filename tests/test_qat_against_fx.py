"""QAT beside FX live, from the same weights, on the same batches: losses, qparams, and what is converted."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.ao.quantization.quantize_fx as fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.nn.intrinsic.qat import freeze_bn_stats
from torch.ao.quantization import (
    QConfigMapping,
    disable_fake_quant,
    disable_observer,
    get_default_qat_qconfig_mapping,
)
from torch.fx import GraphModule

import torchq_compat as tc
from tests.oracle import activation_qparams, fx_activation_qparams, sqnr

Batch = tuple[Any, ...]
CLASSES = 4


def prepare_both(
    model: nn.Module, mapping: QConfigMapping, example: Batch
) -> tuple[GraphModule, GraphModule]:
    """(by us, by FX), of equal weights."""
    ours = tc.prepare_qat_fx(model, mapping, example)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ours, fx.prepare_qat_fx(padded_in_numbers(model).train(), mapping, example)


def padded_in_numbers(model: nn.Module) -> nn.Module:
    """A copy without padding by name, with which FX's fused modules raise."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if getattr(module, "padding", None) == "same":
            module.padding = tuple(size // 2 for size in module.kernel_size)
    return model


def train(prepared: nn.Module, batches: Sequence[Batch]) -> list[float]:
    """Losses of one step of SGD per batch; the targets depend on the step's number alone."""
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        result = prepared(*batch)
        target = torch.randint(0, CLASSES, (len(result),), generator=torch.Generator().manual_seed(step))
        loss = F.cross_entropy(result, target)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


def fx_reference(prepared: GraphModule) -> GraphModule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fx.convert_to_reference_fx(copy.deepcopy(prepared).eval())


def rounded(qparams: set[tuple[float, int]]) -> set[tuple[float, int]]:
    return {(round(scale, 6), zero_point) for scale, zero_point in qparams}


def assert_same_qparams(converted: GraphModule, reference: GraphModule) -> None:
    mine = rounded(activation_qparams(converted))
    assert len(mine) > 1
    assert mine == rounded(fx_activation_qparams(reference))


def assert_converts_to_what_was_trained(prepared: GraphModule, batch: Batch) -> GraphModule:
    """Disables the observers, as scripts do before they convert; FX observes weights once more otherwise."""
    prepared.apply(disable_observer).eval()
    converted = tc.convert_fx(prepared)
    plain = copy.deepcopy(prepared).apply(disable_fake_quant)
    with torch.no_grad():
        assert sqnr(prepared(*batch), converted(*batch)) > 30
        assert sqnr(plain(*batch), converted(*batch)) < 60
    return converted


class Normalized(nn.Module):
    """An op, its batch norm with constants that are not the default ones, and a linear classifier."""

    def __init__(self, op: nn.Module, norm: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.op, self.bn = op, norm
        self.fc = nn.Linear(op(torch.zeros(shape))[0].numel(), CLASSES)
        for parameter in norm.parameters():
            nn.init.uniform_(parameter, 0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc(F.relu(self.bn(self.op(x))).flatten(1))
        return result


#: Name -> (op with or without bias, its batch norm, shape of the input).
PAIRS: dict[str, tuple[Callable[[bool], nn.Module], type[nn.Module], tuple[int, ...]]] = {
    "linear": (lambda bias: nn.Linear(6, 8, bias=bias), nn.BatchNorm1d, (16, 6)),
    "conv1d": (lambda bias: nn.Conv1d(3, 8, 3, bias=bias), nn.BatchNorm1d, (8, 3, 9)),
    "conv1d same": (lambda bias: nn.Conv1d(3, 8, 3, padding="same", bias=bias), nn.BatchNorm1d, (8, 3, 9)),
    "conv2d": (lambda bias: nn.Conv2d(3, 8, 3, stride=2, bias=bias), nn.BatchNorm2d, (8, 3, 7, 7)),
    "conv2d same": (
        lambda bias: nn.Conv2d(4, 8, 3, padding="same", groups=2, bias=bias),
        nn.BatchNorm2d,
        (8, 4, 6, 6),
    ),
    "conv3d": (
        lambda bias: nn.Conv3d(2, 8, 3, padding=1, dilation=2, bias=bias),
        nn.BatchNorm3d,
        (4, 2, 5, 5, 5),
    ),
}


def freeze_in_fx(module: nn.Module) -> None:
    """freeze_bn_stats of torch.ao knows the fused convolutions; the fused linear has the method alone."""
    if isinstance(module, torch.ao.nn.intrinsic.qat.LinearBn1d):
        module.freeze_bn_stats()
    else:
        freeze_bn_stats(module)


@pytest.mark.parametrize("backend", ["qnnpack", "x86"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("pair", PAIRS)
def test_an_op_and_its_batch_norm(pair: str, bias: bool, backend: str) -> None:
    """Trained on the folded weight, as FX does; after six steps with frozen statistics."""
    make, norm, shape = PAIRS[pair]
    torch.manual_seed(0)
    model = Normalized(make(bias), norm(8, eps=1e-2, momentum=0.3), shape)
    batches = [(torch.randn(shape),) for _ in range(10)]
    ours, theirs = prepare_both(model, get_default_qat_qconfig_mapping(backend), batches[0])
    assert train(ours, batches[:6]) == pytest.approx(train(theirs, batches[:6]), rel=1e-4)
    statistics = ours.bn.running_var.clone()
    assert not torch.equal(statistics, model.bn.running_var)
    ours.apply(freeze_bn_stats)
    theirs.apply(freeze_in_fx)
    assert train(ours, batches[6:]) == pytest.approx(train(theirs, batches[6:]), rel=1e-4)
    assert torch.equal(statistics, ours.bn.running_var)
    converted = assert_converts_to_what_was_trained(ours, (torch.randn(64, *shape[1:]),))
    assert_same_qparams(converted, fx_reference(theirs))
    assert not any(node.target is torch.ops.aten.batch_norm.default for node in converted.graph.nodes)


def test_a_batch_norm_across_another_dimension_is_not_folded_into_the_linear() -> None:
    """Linear works on the last dimension, batch norm on the second. FX folds the one into the other."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.op, self.bn = nn.Linear(6, 5), nn.BatchNorm1d(5)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.bn(self.op(x)).mean(1)
            return result

    torch.manual_seed(0)
    batches = [(torch.randn(16, 5, 6),) for _ in range(10)]
    ours = tc.prepare_qat_fx(Wide().train(), get_default_qat_qconfig_mapping("qnnpack"), batches[0])
    train(ours, batches)
    converted = assert_converts_to_what_was_trained(ours, batches[0])
    assert any(node.target is torch.ops.aten.batch_norm.default for node in converted.graph.nodes)
