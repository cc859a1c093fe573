"""Models built with observed modules, ``nn.quantizable.LSTM(..., split_gates=True)``, as with torch.ao's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import get_default_qconfig_mapping

import torchq_compat as tc
from tests.helpers.oracle import leaves, sqnr
from torchq_compat.errors import ArgumentError, ConfigError
from torchq_compat.nn import quantizable


class Model(nn.Module):
    def __init__(self, rnn: nn.Module) -> None:
        super().__init__()
        self.rnn = rnn

    def forward(self, x: Tensor) -> Any:
        return self.rnn(x)


@pytest.mark.parametrize("split_gates", [False, True])
@pytest.mark.parametrize(
    ("cls", "options", "gates"),
    [
        (quantizable.LSTM, {"num_layers": 2, "bidirectional": True}, 4),
        (quantizable.LSTM, {"proj_size": 5}, 4),
        (quantizable.GRU, {"batch_first": True}, 3),
        (quantizable.LSTMCell, {}, 4),
        (quantizable.GRUCell, {"bias": False}, 3),
    ],
)
def test_built_then_prepared(cls: Any, options: dict[str, Any], gates: int, split_gates: bool) -> None:
    torch.manual_seed(0)
    rnn = cls(6, 10, split_gates=split_gates, **options)
    assert rnn.split_gates is split_gates
    projections = sum("igates" in name and "weight" in name for name, _ in rnn.named_parameters())
    rows = options.get("num_layers", 1) * (1 + options.get("bidirectional", False))
    assert projections == rows * (gates if split_gates else 1)
    x = torch.randn(4, 6) if "Cell" in cls.__name__ else torch.randn(5, 4, 6)
    expected = leaves(rnn.as_float()(x))
    torch.testing.assert_close(leaves(rnn(x)), expected, rtol=0, atol=1e-6)

    model = Model(rnn).eval()
    prepared = tc.prepare_fx(model, get_default_qconfig_mapping("fbgemm"), (x,))
    prepared(x)
    converted = tc.convert_to_reference_fx(prepared)
    assert converted.rnn.split_gates is split_gates
    for value, result in zip(expected, leaves(converted(x)), strict=True):
        assert 25 < sqnr(value, result) < 50
    assert tc.explain(converted).find("rnn")[0].reason == "the model was built with it, qconfig from global"
    torch.testing.assert_close(leaves(model(x)), expected, rtol=0, atol=1e-6)  # the user's model is unchanged


def test_state_goes_to_another_one() -> None:
    first, second = (quantizable.LSTM(6, 10, 2, split_gates=True) for _ in range(2))
    second.load_state_dict(first.state_dict())
    x = torch.randn(5, 4, 6)
    assert torch.equal(first(x)[0], second(x)[0])


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="RNN has no gates to split"):
        quantizable.RNN(4, 4, split_gates=True)
    with pytest.raises(ArgumentError, match="split_gates must be"):
        quantizable.LSTM(4, 4, split_gates="yes")


def test_the_legacy_name_of_tuple_rerouting() -> None:
    from torchq_compat import _reroute_tuple_getitem_pattern
    from torchq_compat.multi_output.tuple_rerouting import _reroute_tuple_getitem_pattern as original

    assert _reroute_tuple_getitem_pattern is original is tc.reroute_tuples
