"""Sizes stay free where torch's operators take plain integers: windows of pools, steps, offsets."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.ao.quantization.quantize_fx as fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import QConfigMapping, get_default_qconfig_mapping

import torchq_compat as tc
from tests.helpers.oracle import calibrate, sqnr
from torchq_compat.errors import InputError, QuantizationWarning

Function = Callable[[Tensor], Tensor]


def grid(x: Tensor) -> Tensor:
    rows, columns = torch.linspace(-1, 1, x.shape[2]), torch.linspace(start=0, end=1, steps=x.shape[3])
    both = torch.stack(torch.meshgrid(rows, columns, indexing="ij"))
    return torch.cat([x, both.expand(x.size(0), -1, -1, -1)], 1)


def upper(x: Tensor) -> Tensor:
    rows, columns = torch.triu_indices(x.size(2), x.size(3), 1)
    return x[:, :, rows, columns]


FUNCTIONS: dict[str, Function] = {
    "mean of the whole": lambda x: F.avg_pool2d(x, x.shape[2:]).flatten(1),
    "mean of lines": lambda x: F.avg_pool2d(x, kernel_size=(1, x.size(3))),
    "window of one number": lambda x: F.lp_pool2d(x.abs() + 0.1, 2.0, x.size(2) // 2),
    "largest of the whole": lambda x: F.max_pool1d(x.flatten(2), x.size(2) * x.size(3)),
    "largest of columns": lambda x: F.max_pool2d(x, (x.size(2), 1)),
    "half windows": lambda x: x.unfold(3, x.size(3) // 2, 1).mean(-1),
    "columns": lambda x: F.unfold(x, (x.size(2), 3)),
    "grid": grid,
    "window function": lambda x: x * torch.hann_window(x.size(3)),
    "upper triangle": upper,
    "diagonal": lambda x: x.diagonal(x.size(3) - x.size(2), 2, 3),
    "one hot": lambda x: x + F.one_hot(torch.arange(x.size(3)), x.size(3)).float().sum(0),
}


class Behind(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.conv, self.function = nn.Conv2d(3, 4, 3, padding=1), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.conv(x))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_other_sizes(name: str) -> None:
    torch.manual_seed(0)
    model = Behind(FUNCTIONS[name]).eval()
    prepared = tc.prepare_fx(model, QConfigMapping(), (torch.randn(2, 3, 8, 10),))
    for shape in ((1, 3, 8, 10), (3, 3, 12, 14), (2, 3, 6, 16)):
        x = torch.randn(shape)
        torch.testing.assert_close(prepared(x), model(x))


KEYWORDS: dict[str, Function] = {
    "factor": lambda x: torch.add(x, x.flip(0), alpha=1 / x.size(3)),
    "size of the result": lambda x: x.repeat_interleave(2, 0, output_size=2 * x.size(0)),
    "degrees of freedom": lambda x: x * x.std(3, correction=x.size(3) // 2, keepdim=True),
    "a list": lambda x: x + x.sum((2, 3), keepdim=True).new_ones(size=[1, 4, 1, 1]),
}


@pytest.mark.parametrize("name", KEYWORDS)
def test_keyword_arguments_of_what_is_quantized(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """torchao's prepare refuses keyword arguments that are nodes, and prints those in lists."""
    torch.manual_seed(0)
    model, x = Behind(KEYWORDS[name]).eval(), torch.randn(2, 3, 8, 10)
    prepared = tc.prepare_fx(model, get_default_qconfig_mapping("x86"), (x,))
    calibrate(prepared, [(x,)])
    converted = tc.convert_fx(prepared)
    assert capsys.readouterr().out == ""
    for shape in ((2, 3, 8, 10), (1, 3, 8, 10), (3, 3, 12, 14)):
        x = torch.randn(shape)
        assert 20 < sqnr(model(x), converted(x)) < 60


def test_every_form_pools_the_whole_of_what_it_is_given() -> None:
    torch.manual_seed(0)
    model, x, other = (
        Behind(FUNCTIONS["mean of the whole"]).eval(),
        torch.randn(2, 3, 8, 10),
        torch.rand(1, 3, 12, 14),
    )
    mapping = get_default_qconfig_mapping("x86")
    prepared, theirs = tc.prepare_fx(model, mapping, (x,)), fx.prepare_fx(copy.deepcopy(model), mapping, (x,))
    calibrate(prepared, [(x,)])
    calibrate(theirs, [(x,)])
    converted, of_fx = tc.convert_fx(prepared), fx.convert_fx(theirs)
    for form in (converted, torch.jit.script(converted), torch.jit.trace(converted, x)):
        for call in (x, other):
            assert torch.equal(form(call), of_fx(call))
            assert 15 < sqnr(model(call), form(call)) < 60
    # The exported program has its operator's integers, and says so.
    with pytest.warns(QuantizationWarning, match=r"x in dimension 2 to 8, x in dimension 3 to 10"):
        program = tc.export(converted, (x,)).module()
    assert torch.equal(program(x), converted.reference(x))
    with pytest.raises(AssertionError, match="== 8"):
        program(other)


def test_a_number_that_python_asks_for_as_well_is_fixed() -> None:
    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            steps = x.size(1)
            return x + torch.linspace(0, 1, steps) * len([0] * steps)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", QuantizationWarning)
        prepared = tc.prepare_fx(Asks().eval(), QConfigMapping(), (torch.randn(2, 8),))
    with pytest.raises(InputError, match=r"size 9 in dimension 1, but .* fixed to 8"):
        prepared(torch.randn(2, 9))
