"""The single table of ops that only move data: it holds on quantized tensors, and every stage follows it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import get_default_qconfig_mapping
from torch.fx import Graph

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
from tests.parity.fx_decisions import quantized_by_fx, quantized_by_us
from torchq_compat.ops import preserves_values, those

ATEN = torch.ops.aten
#: Operator -> further arguments, for a tensor of shape 4 x 4 x 4 x 4.
ARGUMENTS: dict[object, tuple[Any, ...]] = {
    ATEN.channel_shuffle.default: (2,),
    ATEN.chunk.default: (2, 1),
    ATEN.dropout.default: (0.5, False),
    ATEN.expand.default: ([2, 4, 4, 4, 4],),
    ATEN.flatten.using_ints: (1,),
    ATEN.index_select.default: (1, torch.tensor([0, 2])),
    ATEN.max_pool2d.default: (2,),
    ATEN.narrow.default: (1, 1, 2),
    ATEN.pad.default: ([1, 1],),
    ATEN.permute.default: ([0, 2, 3, 1],),
    ATEN.pixel_shuffle.default: (2,),
    ATEN.pixel_unshuffle.default: (2,),
    ATEN.repeat.default: ([1, 2, 1, 1],),
    ATEN.repeat_interleave.self_int: (2, 1),
    ATEN.reshape.default: ([8, 32],),
    ATEN.select.int: (1, 2),
    ATEN.slice.Tensor: (1, 0, 2),
    ATEN.split.Tensor: (2, 1),
    ATEN.squeeze.dim: (1,),
    ATEN.squeeze.dims: ([1],),
    ATEN.transpose.int: (1, 2),
    ATEN.unflatten.int: (1, [2, 2]),
    ATEN.unsqueeze.default: (1,),
    ATEN.view.default: ([8, 32],),
    ATEN.broadcast_to.default: ([2, 4, 4, 4, 4],),
    ATEN.flip.default: ([1],),
    ATEN.index.Tensor: ([None, torch.tensor([0, 2])],),
    ATEN.moveaxis.int: (1, 2),
    ATEN.movedim.int: (1, 2),
    ATEN.movedim.intlist: ([1], [2]),
    ATEN.split.sizes: ([1, 3], 1),
    ATEN.split_with_sizes.default: ([1, 3], 1),
    ATEN.swapaxes.default: (1, 2),
    ATEN.swapdims.default: (1, 2),
    ATEN.tensor_split.sections: (2, 1),
    ATEN.tile.default: ([2, 1],),
    ATEN.unbind.int: (1,),
    ATEN.unfold.default: (1, 2, 1),
}
#: Operator -> a function from the tensor to all arguments, if the first one is not the tensor itself.
OTHER_INPUTS = {
    ATEN.max_pool1d.default: lambda x: (x[0], 2),
    ATEN.stack.default: lambda x: ([x, x],),
    ATEN.t.default: lambda x: (x[0, 0],),
    operator.getitem: lambda x: ([x], 0),
}
#: The kernel accepts only channels-last images, which the lowering's trials find out.
UNTRIED = {ATEN.max_pool3d.default}


def quantized() -> Tensor:
    integers = torch.randint(0, 256, (4, 4, 4, 4), dtype=torch.uint8)
    made: Tensor = ATEN._make_per_tensor_quantized_tensor.default(integers, 0.05, 120)
    return made


def floats(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [floats(each) for each in value]
    return value.dequantize() if isinstance(value, Tensor) and value.is_quantized else value


@pytest.mark.parametrize(
    "target", [op for op in (operator.getitem, *those("moves")) if op not in UNTRIED], ids=str
)
def test_results_are_values_of_the_input_and_keep_its_qparams(target: Any) -> None:
    torch.manual_seed(0)
    x = quantized()
    args = OTHER_INPUTS[target](x) if target in OTHER_INPUTS else (x, *ARGUMENTS.get(target, ()))
    found, expected = target(*args), target(*floats(args))
    pairs = zip(found, expected, strict=True) if isinstance(found, (list, tuple)) else [(found, expected)]
    for mine, theirs in pairs:
        assert (mine.q_scale(), mine.q_zero_point()) == (0.05, 120)
        assert torch.equal(mine.dequantize(), theirs)


@pytest.mark.parametrize(
    ("target", "args", "moves"),
    [
        (ATEN.dropout.default, (0.5, True), False),
        (ATEN.dropout.default, (0.5, False), True),
        (ATEN.pad.default, ([1, 1], "reflect"), True),
        (ATEN.pad.default, ([1, 1], "constant", 1.0), False),
        (ATEN.pad.default, ([1, 1], "replicate"), False),
        (ATEN.sigmoid.default, (), False),
    ],
)
def test_calls_that_move_data(target: Any, args: tuple[Any, ...], moves: bool) -> None:
    graph = Graph()
    assert preserves_values(graph.call_function(target, (graph.placeholder("x"), *args))) is moves


class Moving(nn.Module):
    """Ops that only one of the two former tables had, behind a convolution or a recurrent module."""

    def __init__(self, *, is_recurrent: bool) -> None:
        super().__init__()
        self.first: nn.Module = nn.LSTM(8, 8) if is_recurrent else nn.Conv1d(8, 8, 1)
        self.head = nn.Conv1d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y = y[0] if isinstance(y, tuple) else y
        if isinstance(self.first, nn.LSTM):
            return self.head(F.relu(y))
        return self.head(torch.cat(y.repeat(1, 2, 1).chunk(4, 1)[1:3], 1))


def test_pieces_of_an_integer_are_lowered() -> None:
    torch.manual_seed(0)
    model, x = Moving(is_recurrent=False).eval(), torch.randn(4, 8, 8)
    prepared = tc.prepare_fx(model, get_default_qconfig_mapping("x86"), (x,))
    calibrate(prepared, [(x,)] * 2)
    reference, lowered = tc.convert_to_reference_fx(prepared), tc.convert_fx(prepared)
    assert torch.equal(reference(x), lowered(x))
    assert sqnr(model(x), lowered(x)) > 30
    by_integers = {d.kind for d in tc.explain(lowered) if "runs on the integers" in d.reason}
    assert {"aten.repeat.default", "aten.chunk.default"} <= by_integers


def test_a_relu_behind_a_recurrent_module_keeps_its_qparams() -> None:
    torch.manual_seed(0)
    model, x = Moving(is_recurrent=True).eval(), torch.randn(4, 8, 8)
    prepared = tc.prepare_fx(
        model, get_default_qconfig_mapping("qnnpack"), (x,), tc.get_default_prepare_custom_config()
    )
    calibrate(prepared, [(x,)] * 2)
    (decided,) = [d for d in op_decisions(prepared) if d.kind.startswith("relu")]
    assert decided.action == "shared"
    converted = tc.convert_to_reference_fx(prepared, tc.get_default_convert_custom_config())
    assert 20 < sqnr(model(x), converted(x)) < 60


class Reshaped(nn.Module):
    """A reshape, whose default QConfig reuses the observer of its input, behind a float op."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.between = nn.Linear(8, 8), nn.Linear(8, 8), between

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x)).reshape(-1, 8))


def reshaped_on_both(between: Callable[[Tensor], Tensor]) -> tuple[Any, Any, nn.Module, Tensor]:
    """Return (prepared, converted) by FX, (prepared, converted) by this package, the model and its input."""
    torch.manual_seed(0)
    model, x = Reshaped(between).eval(), torch.randn(4, 4, 8)
    mapping = get_default_qconfig_mapping("x86")
    return by_fx(model, mapping, [(x,)]), by_us(model, mapping, [(x,)]), model, x


@pytest.mark.parametrize(
    "between",
    [
        lambda y: y[:, ::2],
        lambda y: y.split([1, 3], 1)[1],
        lambda y: y.movedim(0, 1)[1:],
        lambda y: y[:, [0, 2]].flip(1),
        lambda y: y.roll(1, 1)[1:],
        lambda y: y.topk(2, 1)[0],
    ],
    ids=["slice", "split", "movedim", "index", "roll", "topk"],
)
def test_a_reshape_shares_with_what_was_observed_before_float_ops_moved_it(
    between: Callable[[Tensor], Tensor],
) -> None:
    theirs, ours, model, x = reshaped_on_both(between)
    assert quantized_by_us(ours[0]) == quantized_by_fx(theirs[0])
    assert activation_qparams(ours[1]) == fx_activation_qparams(theirs[1])
    assert len(activation_qparams(ours[1])) == 3
    # Without q-dq the same values may round to the neighbouring step.
    assert sqnr(theirs[1](x), ours[1](x)) > 40
    assert 25 < sqnr(model(x), ours[1](x)) < 50


def test_a_reshape_does_not_share_with_what_other_values_were_computed_from() -> None:
    """FX searches past the exponential for an observer, and loses what exceeds the linear layer's range."""
    theirs, ours, model, x = reshaped_on_both(lambda y: torch.exp(y))
    assert quantized_by_fx(theirs[0]) - quantized_by_us(ours[0]) == {("", "reshape"): 1}
    (left,) = [d for d in op_decisions(ours[0]) if d.kind.startswith("reshape")]
    assert left.action == "float"
    assert "its input, which is float" in left.reason
    assert sqnr(model(x), theirs[1](x)) + 1 < sqnr(model(x), ours[1](x)) < 50


@pytest.mark.parametrize(
    ("between", "told"),
    [
        (lambda x, fc: fc(x.reshape(-1, 16)), "FX leaves it float"),
        (lambda x, fc: fc(x.reshape(-1, 1, 16).transpose(0, 1)), "FX leaves it float"),
        (lambda x, fc: fc(torch.exp(fc(x.flatten(1))).reshape(-1, 16)), "the qparams of another tensor"),
        (lambda x, fc: fc(x.view(-1, 16)), ""),
        (lambda x, fc: fc(torch.reshape(x, (-1, 16))), ""),
        (lambda x, fc: fc(fc(x.flatten(1)).reshape(-1, 16)), ""),
    ],
    ids=["reshape", "moved", "computed", "view", "function", "quantized"],
)
def test_behind_a_reshape_of_floats(between: Callable[[Tensor, nn.Module], Tensor], told: str) -> None:
    """FX's default mappings give reshape a QConfig without an observer; its reader then has no observer."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return between(x, self.fc)

    model, mapping, x = Net().eval(), get_default_qconfig_mapping("fbgemm"), torch.randn(64, 4, 4)
    theirs, ours = by_fx(model, mapping, [(x,)]), by_us(model, mapping, [(x,)])
    decision = [d for d in op_decisions(ours[0]) if d.kind == "Linear"][-1]
    assert decision.action == "quantized"
    assert told in decision.unlike_fx
    assert bool(decision.unlike_fx) == bool(told)
    # If ``told``, FX quantizes another value besides the result.
    difference = sqnr(theirs[1](x), ours[1](x))
    assert difference < 45 if told else difference > 40
    assert 20 < sqnr(model(x), ours[1](x)) < 55
