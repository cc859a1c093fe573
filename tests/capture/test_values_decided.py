"""Values that Python asks for inside a model: those of buffers are known, an ``assert`` goes on.

PYTEST_DONT_REWRITE: an ``assert`` is read from the code of the model.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import QConfigMapping

import torchq_compat as tc
from torchq_compat.capture.checked import decide_values
from torchq_compat.capture.torch_export import capture_freely
from torchq_compat.support import metadata


class Decides(nn.Module):
    def __init__(self, decide: Callable[[Decides, Tensor], Tensor]) -> None:
        super().__init__()
        self.decide = decide
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("count", torch.tensor(2))
        self.register_buffer("sizes", torch.tensor([2, 3]))
        self.plain = torch.tensor(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.decide(self, x)


def counted(m: Decides, x: Tensor) -> Tensor:
    m.count += 1
    return x if m.count < 9 else -x


def counts_later(m: Decides, x: Tensor) -> Tensor:
    result = x if m.sizes[0] < 9 else -x
    m.sizes[0] += 1
    return result


KNOWN: list[Callable[[Decides, Tensor], Tensor]] = [
    lambda m, x: x * 2 if m.count > 1 else x,
    lambda m, x: sum(x * i for i in range(1, int(m.sizes[1]))),
    lambda m, x: x * {2: 0.5}[m.count.item()],
    lambda m, x: x + 1 if (m.sizes > 1).all() and m.sizes.max() == 3 else x,
    lambda m, x: x * float(m.gain),
    lambda m, x: x + 1 if m.plain > 2 else x,
    lambda m, x: x + (1 if m.sizes.float().mean().item() == 2.5 else 0),
]


def test_values_of_buffers_are_those_that_they_have() -> None:
    x, other = torch.randn(2, 3), torch.randn(5, 3)
    for decide in KNOWN:
        model = Decides(decide).eval()
        captured = capture_freely(model, (x,))
        assert torch.equal(captured(other), model(other))
        assert metadata.VALUES_DECIDED.of(captured)


@pytest.mark.parametrize("decide", [counted, counts_later, lambda m, x: x if torch.rand(1) < 2 else -x])
def test_what_changes_is_not_known(decide: Callable[[Decides, Tensor], Tensor]) -> None:
    with pytest.raises(Exception, match="data-dependent"):
        capture_freely(Decides(decide).eval(), (torch.randn(2, 3),))


def test_parameters_in_training_are_not_known() -> None:
    with pytest.raises(Exception, match="data-dependent"):
        capture_freely(Decides(KNOWN[4]).train(), (torch.randn(2, 3),))


def test_a_value_that_nothing_decides_by_is_read_in_every_call() -> None:
    model = Decides(lambda m, x: x + m.count.item()).eval()
    prepared = tc.prepare_fx(model, QConfigMapping(), (torch.randn(2, 3),))
    assert not any(each.kind == "value of a buffer" for each in tc.explain(prepared))
    prepared.count.fill_(7)
    assert torch.equal(prepared(torch.zeros(1, 3)), torch.full((1, 3), 7.0))


def asserts(m: Decides, x: Tensor) -> Tensor:
    low, high = x > -9, x < 9
    assert high.all() or low.all(), "neither"
    assert (high.all() and low.all()) or x.isnan().any()
    assert (x.isnan().any() or low.all()) and high.all()  # noqa: PT018
    assert not (x.isnan().any() or (x > 9).any())  # noqa: PT018
    assert low.all() if m.training else high.all()
    if m.count > 1: assert low.all()  # fmt: skip  # noqa: E701
    return x + 1


def test_asserts_of_several_values_go_on() -> None:
    captured, x = capture_freely(Decides(asserts).eval(), (torch.randn(2, 3),)), torch.randn(5, 3)
    assert torch.equal(captured(x), x + 1)
    lines = [line for line, value in metadata.VALUES_DECIDED.of(captured) or () if value is None]
    assert len(lines) == 6
    assert [value for _, value in metadata.VALUES_DECIDED.of(captured) or () if value is not None] == [1]
    codes = [decision.code for decision in decide_values(metadata.VALUES_DECIDED.of(captured) or ())]
    assert sorted(codes) == ["TQ603"] * 6 + ["TQ604"]
