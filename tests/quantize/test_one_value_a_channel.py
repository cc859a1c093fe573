"""QAT with a single sample as the example, where the last batch norm gets one value per channel."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.ao.quantization.quantize_fx as fx
from torch import Tensor, nn
from torch.ao.quantization import get_default_qat_qconfig_mapping

import torchq_compat as tc
from torchq_compat.errors import TorchQCompatError
from torchq_compat.quantize.first_call import at_once


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.fc = nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.relu(self.bn(self.conv(x))).flatten(1))


def test_it_trains_with_the_losses_of_fx() -> None:
    mapping, example = get_default_qat_qconfig_mapping("x86"), (torch.randn(1, 3, 4, 4),)
    model, batches = Net().eval(), [torch.randn(6, 3, 4, 4) for _ in range(3)]
    losses = []
    for side in (tc, fx):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            prepared = side.prepare_qat_fx(copy.deepcopy(model).train(side is fx), mapping, example)
        optimizer = torch.optim.SGD(prepared.train().parameters(), lr=0.1)
        losses.append([])
        for batch in batches:
            optimizer.zero_grad()
            loss = prepared(batch).square().mean()
            loss.backward()
            optimizer.step()
            losses[-1].append(float(loss))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][0] != losses[0][-1]
    assert prepared.eval()(example[0]).shape == (1, 2)


def test_sizes_given_by_hand_are_kept() -> None:
    with pytest.raises(TorchQCompatError, match="more than 1 value per channel"):
        at_once(tc.prepare_qat_fx)(
            Net().train(),
            get_default_qat_qconfig_mapping("x86"),
            (torch.randn(1, 3, 4, 4),),
            dynamic_shapes=((None,),),
        )
