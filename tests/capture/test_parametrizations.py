"""A module whose weight a parametrization computes stays float, as in FX, and a warning says so."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.quantization import get_default_qconfig_mapping
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import torchq_compat as tc
from tests.helpers.oracle import by_fx, calibrate
from torchq_compat.support.user_warnings import QuantizationWarning

MAPPING = get_default_qconfig_mapping("x86")


def convolutions() -> nn.Sequential:
    return nn.Sequential(weight_norm(nn.Conv1d(3, 4, 3)), nn.ReLU(), spectral_norm(nn.Conv1d(4, 4, 1))).eval()


def test_each_is_warned_about_with_the_way_out() -> None:
    model, x = convolutions(), torch.randn(2, 3, 8)
    with pytest.warns(QuantizationWarning) as caught:
        prepared = tc.prepare_fx(model, MAPPING, (x,))
    told = [str(w.message) for w in caught if issubclass(w.category, QuantizationWarning)]
    assert [text.split(" stays float")[0] for text in told] == ["Conv1d at '0'", "Conv1d at '2'"]
    assert all("Hint:" in text and "remove_parametrizations" in text for text in told)
    fx_prepared, _ = by_fx(model, MAPPING, [(x,)])
    calibrate(prepared, [(x,)])
    converted = tc.convert_to_reference_fx(prepared)
    assert not any("quantize_per_channel" in str(node.target) for node in converted.graph.nodes)
    assert not hasattr(fx_prepared.get_submodule("0"), "weight_fake_quant")
    assert parametrize.is_parametrized(model[0])


def test_the_way_out_quantizes() -> None:
    model, x = convolutions(), torch.randn(2, 3, 8)
    for index in (0, 2):
        parametrize.remove_parametrizations(model[index], "weight")
    prepared = tc.prepare_fx(model, MAPPING, (x,))  # no warning, which would be an error
    calibrate(prepared, [(x,)])
    _, expected = by_fx(model, MAPPING, [(x,)])
    assert torch.equal(tc.convert_to_reference_fx(prepared)(x), expected(x))


def test_nothing_is_said_where_it_was_to_stay_float() -> None:
    mapping = get_default_qconfig_mapping("x86").set_module_name("0", None).set_module_name("2", None)
    prepared = tc.prepare_fx(convolutions(), mapping, (torch.randn(2, 3, 8),))
    assert {decision.action.value for decision in tc.explain(prepared).find("0")} == {"float"}


@pytest.mark.parametrize("place", [nn.Sequential, lambda lstm: lstm], ids=["nested", "root"])
@pytest.mark.parametrize("norm", [torch.nn.utils.weight_norm, weight_norm], ids=["hook", "parametrization"])
@pytest.mark.filterwarnings("ignore::torchq_compat.errors.QuantizationWarning")
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_a_recurrent_module_with_computed_weights_is_copied(norm: Any, place: Any) -> None:
    """Such weights have an autograd graph, which torch refuses to copy: as attributes and inside a list."""
    lstm = nn.LSTM(4, 5)
    for name in ("weight_ih_l0", "weight_hh_l0"):
        norm(lstm, name)
    model, x = place(lstm).eval(), torch.randn(6, 2, 4)
    model(x)
    prepared = tc.prepare_fx(model, MAPPING, (x,))
    prepared(x)
    again = copy.deepcopy(prepared)
    converted = copy.deepcopy(tc.convert_to_reference_fx(again))
    decisions = tc.explain(converted).find("0" if place is nn.Sequential else "module")
    assert "float" in [decision.action for decision in decisions]
    assert torch.equal(converted(x)[0], model(x)[0])
