"""Single steps and batches of one in an exported program, where torch guards against them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import get_default_qconfig_mapping

import torchq_compat as tc
from tests.helpers.oracle import leaves
from torchq_compat.errors import QuantizationWarning


class BothWays(nn.Module):
    """torch guards against one step and one sequence because of the strides of the output."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(12, 2)

    def forward(self, batch: dict[str, Tensor]) -> Any:
        y, (h, _) = self.lstm(batch["x"])
        return self.fc(y), h


class Halves(nn.Module):
    """A module that takes halves of the steps, which a single step does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 6, batch_first=True)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        first, second = self.gru(batch["x"])[0].chunk(2, 1)
        return first[:, :1] + second[:, :1]


def exported(model: nn.Module) -> tuple[Any, nn.Module]:
    """Return (the reference, its program) for an example of 3 sequences of 5 steps."""
    torch.manual_seed(0)
    example = ({"x": torch.randn(3, 6, 4)},)
    config = tc.get_default_prepare_custom_config()
    prepared = tc.prepare_fx(model.eval(), get_default_qconfig_mapping("x86"), example, config)
    prepared(*example)
    reference = tc.convert_to_reference_fx(prepared)
    return reference, tc.export(reference, example).module()


class ChannelsLast(nn.Module):
    """Channels in the last dimension: torch guards by ``size > 1``, because of the strides of the image."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 6, 1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.conv(batch["x"][..., None, :].permute(0, 3, 1, 2))


def test_an_image_with_channels_last() -> None:
    reference, program = exported(ChannelsLast())
    for batch, steps in ((1, 6), (3, 1), (1, 1), (2, 9)):
        call = {"x": torch.randn(batch, steps, 4)}
        assert torch.equal(reference(call), program(call))


class RowsAndColumns(nn.Module):
    """torch guards against one sequence by comparing two products of sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.LSTM(4, 3, batch_first=True, bidirectional=True)
        self.columns = nn.LSTM(6, 3, batch_first=True)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = torch.stack([batch["x"], batch["x"] * 2], 1)
        rows = self.rows(x.flatten(0, 1))[0].unflatten(0, x.shape[:2])
        return self.columns(rows.transpose(1, 2).flatten(0, 1))[0]


def test_one_of_two_products_of_sizes() -> None:
    reference, program = exported(RowsAndColumns())
    for batch, steps in ((1, 6), (3, 6), (2, 9)):
        call = {"x": torch.randn(batch, steps, 4)}
        assert torch.equal(reference(call), program(call))


def test_sizes_of_one_give_the_bits_of_the_reference() -> None:
    reference, program = exported(BothWays())
    for batch, steps in ((1, 6), (3, 1), (1, 1), (2, 9)):
        call = {"x": torch.randn(batch, steps, 4)}
        pairs = list(zip(leaves(reference(call)), leaves(program(call)), strict=True))
        assert len(pairs) == 2
        assert all(torch.equal(a, b) for a, b in pairs)
    with pytest.raises(AssertionError, match=r"Guard failed.*\[2\] == 4"):
        program({"x": torch.randn(3, 6, 5)})


def test_a_size_that_the_model_refuses_the_program_refuses() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", QuantizationWarning)
        reference, program = exported(Halves())
    call = {"x": torch.randn(1, 8, 4)}
    assert torch.equal(reference(call), program(call))
    call = {"x": torch.randn(3, 1, 4)}
    with pytest.raises(tc.errors.InputError):
        reference(call)
    with pytest.raises(AssertionError, match="Guard failed"):
        program(call)
