"""Models built with observed modules, ``nn.quantizable.LSTM(..., split_gates=True)``, as with torch.ao's."""

from __future__ import annotations

import itertools
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
    """Calls cells with ``step``, and modules over sequences with ``x``."""

    def __init__(self, rnns: list[Any]) -> None:
        super().__init__()
        self.rnns = nn.ModuleList(rnns)

    def forward(self, x: Tensor, step: Tensor) -> list[Any]:
        return [rnn(step if "Cell" in type(rnn).__name__ else x) for rnn in self.rnns]


CASES: list[tuple[Any, dict[str, Any], int]] = [
    (quantizable.LSTM, {"num_layers": 2, "bidirectional": True, "proj_size": 5}, 4),
    (quantizable.GRU, {"batch_first": True}, 3),
    (quantizable.LSTMCell, {}, 4),
    (quantizable.GRUCell, {"bias": False}, 3),
]


def test_built_then_prepared(subtests: pytest.Subtests) -> None:
    rnns, expected = [], []
    args = torch.randn(3, 50, 6), torch.randn(50, 6)  # enough rows that a draw decides no bound
    for split_gates, (cls, options, gates) in itertools.product((False, True), CASES):
        rnn = cls(6, 10, split_gates=split_gates, **options)
        assert rnn.split_gates is split_gates
        projections = sum("igates" in name and "weight" in name for name, _ in rnn.named_parameters())
        rows = options.get("num_layers", 1) * (1 + options.get("bidirectional", False))
        assert projections == rows * (gates if split_gates else 1)
        x = args["Cell" in cls.__name__]
        expected.append(leaves(rnn.as_float()(x)))
        torch.testing.assert_close(leaves(rnn(x)), expected[-1], rtol=0, atol=1e-6)
        rnns.append(rnn)

    model = Model(rnns).eval()
    prepared = tc.prepare_fx(model, get_default_qconfig_mapping("fbgemm"), args)
    prepared(*args)
    converted = tc.convert_to_reference_fx(prepared)
    report, found, unchanged = tc.explain(converted), converted(*args), model(*args)
    for index, rnn in enumerate(rnns):
        with subtests.test(cls=type(rnn).__name__, split_gates=rnn.split_gates):
            assert converted.get_submodule(f"rnns.{index}").split_gates is rnn.split_gates
            for value, result in zip(expected[index], leaves(found[index]), strict=True):
                assert 25 < sqnr(value, result) < 50
            reason = report.find(f"rnns.{index}")[0].reason
            assert reason == "the model was built with it, qconfig from global"
            # The user's model is unchanged.
            torch.testing.assert_close(leaves(unchanged[index]), expected[index], rtol=0, atol=1e-6)


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
    from torchq_compat.annotate.tuple_rerouting import _reroute_tuple_getitem_pattern as original

    assert _reroute_tuple_getitem_pattern is original is tc.reroute_tuples
