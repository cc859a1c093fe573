"""``convert_fx(qconfig_mapping=...)``: quantization switched off after calibration, as in FX."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.quantization.quantize_fx as fx
from torch import Tensor, nn
from torch.ao.quantization import (
    QConfigMapping,
    get_default_qat_qconfig_mapping,
    get_default_qconfig,
    get_default_qconfig_mapping,
)

import torchq_compat as tc
from tests.helpers.histograms import searched_in_arrays
from tests.helpers.once import made_once
from tests.helpers.oracle import MAP_LSTM, activation_qparams, calibrate, fx_activation_qparams, sqnr
from torchq_compat.errors import ConfigError


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.fc1 = nn.Linear(4, 6)
        self.fc2 = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc1(self.front(x).mean((2, 3)))
        return self.fc2(y) + y


def base(name: str = "x86") -> QConfigMapping:
    return (
        get_default_qconfig_mapping(name)
        .set_module_name_regex("fr.*", get_default_qconfig(name))
        .set_module_name("fc2", get_default_qconfig(name))
        .set_object_type(operator.add, get_default_qconfig(name))
    )


OFF: dict[str, Callable[[QConfigMapping], QConfigMapping]] = {
    "nothing": lambda mapping: mapping,
    "module name": lambda mapping: mapping.set_module_name("fc2", None),
    "new module name": lambda mapping: mapping.set_module_name("fc1", None),
    "regex": lambda mapping: mapping.set_module_name_regex("fr.*", None),
    "function": lambda mapping: mapping.set_object_type(operator.add, None),
    "module type": lambda mapping: mapping.set_object_type(nn.Linear, None).set_module_name("fc2", None),
    "all of them": lambda mapping: (
        mapping.set_object_type(nn.Linear, None)
        .set_module_name("fc2", None)
        .set_module_name_regex("fr.*", None)
        .set_object_type(operator.add, None)
    ),
}
REFUSED: dict[str, Callable[[QConfigMapping], QConfigMapping]] = {
    "global qconfig": lambda mapping: mapping.set_global(None),
    "global qconfig is another": lambda mapping: mapping.set_global(get_default_qconfig("qnnpack")),
    "missing": lambda _: get_default_qconfig_mapping("x86"),
    "has another qconfig": lambda mapping: mapping.set_module_name("fc2", get_default_qconfig("qnnpack")),
    "'fc1'": lambda mapping: mapping.set_module_name("fc1", get_default_qconfig("qnnpack")),
}
X = torch.randn(2, 3, 7, 7, generator=torch.Generator().manual_seed(0))


@made_once
def prepared_by(engine: str) -> Any:
    prepare = {"FX": fx.prepare_fx, "ours": tc.prepare_fx}[engine]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = prepare(model(), base(), (X,))
        calibrate(prepared, [(X,)])
    return prepared


def quantized_paths(model: nn.Module) -> set[str]:
    return {decision.path for decision in tc.explain(model) if decision.action == "quantized"}


def model() -> nn.Module:
    torch.manual_seed(0)
    return Model().eval()


@pytest.mark.parametrize("switch_off", OFF.values(), ids=list(OFF))
def test_as_fx(switch_off: Callable[[QConfigMapping], QConfigMapping]) -> None:
    ours, theirs = prepared_by("ours"), prepared_by("FX")
    mine = tc.convert_to_reference_fx(ours, qconfig_mapping=switch_off(base()))
    with searched_in_arrays():
        reference = fx.convert_to_reference_fx(theirs, qconfig_mapping=switch_off(base()))
    assert activation_qparams(mine) == fx_activation_qparams(reference)
    with torch.no_grad():
        # A step is about 0.006 here; float ops are equal up to rounding.
        assert float((mine(X) - reference(X)).abs().max()) < 0.001
    switched_off = quantized_paths(ours) - quantized_paths(mine)
    assert bool(switched_off) == (switch_off is not OFF["nothing"])


@pytest.mark.parametrize(("what", "mapping"), REFUSED.items(), ids=list(REFUSED))
def test_refused_where_fx_refuses(what: str, mapping: Callable[[QConfigMapping], QConfigMapping]) -> None:
    with pytest.raises(AssertionError):
        fx.convert_to_reference_fx(prepared_by("FX"), qconfig_mapping=mapping(base()))
    with pytest.raises(ConfigError, match=f"(?s)qconfig_mapping.*{what}.*Hint:"):
        tc.convert_to_reference_fx(prepared_by("ours"), qconfig_mapping=mapping(base()))


def test_explain_says_what_convert_switched_off() -> None:
    prepared = prepared_by("ours")
    converted = tc.convert_fx(prepared, qconfig_mapping=base().set_module_name("fc2", None))
    (decision,) = tc.explain(converted).find("fc2")
    assert decision.action == "float"
    assert "given to convert (module_name 'fc2')" in decision.reason
    assert tc.explain(prepared).find("fc2")[0].action == "quantized"


def test_everything_off_is_the_float_model() -> None:
    converted = tc.convert_fx(prepared_by("ours"), qconfig_mapping=OFF["all of them"](base()))
    assert quantized_paths(converted) == set()
    torch.testing.assert_close(converted(X), model()(X), atol=0.05, rtol=0.05)


def test_trained_conv_and_batch_norm_switched_off_are_float() -> None:
    trained = tc.prepare_qat_fx(model().train(), get_default_qat_qconfig_mapping("x86"), (X,))
    trained(X)
    mapping = get_default_qat_qconfig_mapping("x86").set_module_name("front", None)
    converted = tc.convert_fx(trained.eval(), qconfig_mapping=mapping)
    dtypes = {name: value.dtype for name, value in converted.state_dict().items()}
    quantized = tc.convert_fx(trained)
    assert sum(dtype is torch.int8 for dtype in dtypes.values()) == 2
    assert sum(value.dtype is torch.int8 for value in quantized.state_dict().values()) == 3
    assert float((converted(X) - quantized(X)).abs().max()) < 0.1


def test_custom_module_cannot_be_switched_off_at_convert() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.lstm(x)[0]

    mapping = get_default_qconfig_mapping("qnnpack")
    prepared = tc.prepare_fx(Tagger().eval(), mapping, (torch.randn(3, 2, 4),), MAP_LSTM)
    prepared(torch.randn(3, 2, 4))
    for switch_off in (
        lambda mapping: mapping.set_module_name("lstm", None),
        lambda mapping: mapping.set_object_type(nn.LSTM, None),
    ):
        with pytest.raises(ConfigError, match="custom module at 'lstm'"):
            tc.convert_fx(prepared, qconfig_mapping=switch_off(get_default_qconfig_mapping("qnnpack")))


def test_a_layer_beside_a_rolled_loop_is_switched_off() -> None:
    """The observers of the step are called by the loop, not by the graph that they are removed from."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.front, self.step, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.front(x)
            h, ys = x.new_zeros(x.size(0), 8), []
            for t in range(x.size(1)):
                h = torch.tanh(x[:, t] + self.step(h))
                ys.append(h)
            result: Tensor = self.head(torch.stack(ys, 1))
            return result

    model, x, mapping = Recurrent().eval(), torch.randn(8, 5, 6), get_default_qconfig_mapping("x86")
    prepared = tc.prepare_fx(model, mapping, (x,))
    calibrate(prepared, [(x,)])
    for name in ("front", "head"):
        off = get_default_qconfig_mapping("x86").set_module_name(name, None)
        converted = tc.convert_fx(prepared, qconfig_mapping=off)
        assert 25 < sqnr(model(x), converted(x)) < 60
