"""Models whose forward reads attributes and parameters of their custom modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.ao.quantization import get_default_qat_qconfig_mapping, get_default_qconfig_mapping

import torchq_compat as tc
from tests.helpers.histograms import coarse_qconfig_mapping
from tests.helpers.lstm_flow import uniform
from tests.helpers.oracle import MAP_LSTM, by_us, leaves, sqnr
from tests.helpers.user_modules import Mixer, by_ours, mirror
from torchq_compat.errors import QuantizationWarning

MAPPING = coarse_qconfig_mapping("qnnpack")
MAPPING_BUT_LSTM = get_default_qconfig_mapping("qnnpack").set_object_type(nn.LSTM, None)


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 8, 2)
        for parameter in self.lstm.parameters():
            parameter.data *= 2

    def call(self, x: Tensor, state: Tensor) -> Any:
        return self.lstm(x, (state, state))


class Sizes(Reads):
    def forward(self, x: Tensor) -> Any:
        lstm = self.lstm
        directions = 2 if lstm.bidirectional else 1
        return self.call(x, torch.zeros(lstm.num_layers * directions, x.size(1), lstm.hidden_size))


class FirstParameter(Reads):
    def forward(self, x: Tensor) -> Any:
        return self.call(x, next(self.parameters()).new_zeros(2, x.size(1), 8))


class DtypeAndDevice(Reads):
    def forward(self, x: Tensor) -> Any:
        weight = self.lstm.weight_ih_l0
        return self.call(x, torch.ones(2, x.size(1), 8, dtype=weight.dtype, device=weight.device) / 4)


class Values(Reads):
    def forward(self, x: Tensor) -> Any:
        output, _ = self.lstm(x)
        return output, output @ self.lstm.weight_hh_l1.t(), self.lstm.bias_ih_l0.abs().max()


class ClassOfModule(Reads):
    def forward(self, x: Tensor) -> Any:
        output, state = self.lstm(x)
        return output, state[0] if isinstance(self.lstm, nn.LSTM) else state


class Flattens(Reads):
    def forward(self, x: Tensor) -> Any:
        self.lstm.flatten_parameters()
        return self.lstm(x)


class Training(Reads):
    def forward(self, x: Tensor) -> Any:
        output, _ = self.lstm(x)
        return output if self.lstm.training else output * 2


class HasAttribute(Reads):
    def forward(self, x: Tensor) -> Any:
        return self.lstm(x)[0] * (3 if hasattr(self.lstm, "temperature") else 1)


class LeavesNothing(Reads):
    """Calls its LSTM once for each of the models whose reading leaves no tensor behind."""

    def forward(self, x: Tensor) -> Any:
        models = (Sizes, DtypeAndDevice, ClassOfModule, Flattens, Training, HasAttribute)
        return {model.__name__: model.forward(self, x) for model in models}  # type: ignore[attr-defined]


@pytest.mark.parametrize("model_class", [LeavesNothing, FirstParameter, Values])
def test_what_a_model_reads_of_its_lstm(model_class: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = model_class().eval()
    data = [(uniform(1.5, steps, size, 4),) for steps, size in ((3, 16), (6, 9), (4, 32))]
    prepared, converted = by_us(model, MAPPING, data, MAP_LSTM)
    for args in data:
        exact, observed, found = (
            pytree.tree_flatten_with_path(m(*args))[0] for m in (model, prepared, converted)
        )
        for (path, a), (_, b), (_, c) in zip(exact, observed, found, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
            assert 25 < sqnr(a, c) < 60 or a.dim() == 0, path
    # The float LSTM is gone; only the tensors that the model reads remain.
    kept = {name for name, _ in converted.named_buffers() if name.startswith("lstm_")}
    assert kept == KEPT.get(model_class, set())
    assert not any(isinstance(m, nn.LSTM) for m in converted.modules())
    copied = [d for d in tc.explain(prepared) if d.kind == "parameter"]
    assert {d.path.replace(".", "_") for d in copied} == {name for name in kept if "like" not in name}


KEPT = {FirstParameter: {"lstm_weight_ih_l0_like"}, Values: {"lstm_weight_hh_l1", "lstm_bias_ih_l0"}}


def test_a_float_lstm_keeps_the_parameters_that_are_read() -> None:
    """A parameter that is both read by the model and used by the LSTM is not copied."""
    model = Values().eval()
    x = torch.randn(3, 16, 4)
    prepared = tc.prepare_fx(model, MAPPING_BUT_LSTM, (x,), MAP_LSTM)
    prepared.lstm.weight_hh_l1.data.mul_(2)
    model.lstm.weight_hh_l1.data.mul_(2)
    for a, b in zip(leaves(model(x)), leaves(prepared(x)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


class Helpful(Mixer):
    scale = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale

    def undo(self, y: Tensor) -> Tensor:
        return y / self.scale - self.linear.bias


class UsesHelper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.custom = Helpful()

    def forward(self, x: Tensor) -> Any:
        y = self.custom(x)
        return y, self.custom.undo(y) * self.custom.scale


def test_a_method_of_a_custom_module_beside_its_forward() -> None:
    torch.manual_seed(0)
    model, data = UsesHelper().eval(), [(uniform(1.0, 16, 4),) for _ in range(4)]
    prepared, converted = by_ours(model, data, mirror(Helpful))
    for a, b, c in zip(*(m(*data[0]) for m in (model, prepared, converted)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)
        assert 25 < sqnr(a, c) < 60


class ReadsWithoutCalling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.custom = Helpful()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) @ self.custom.linear.weight


def test_a_custom_module_that_is_read_and_never_called_keeps_its_names() -> None:
    torch.manual_seed(0)
    model, data = ReadsWithoutCalling().eval(), [(uniform(1.0, 16, 4),) for _ in range(4)]
    with pytest.warns(QuantizationWarning, match="Observed is not used"):
        prepared, converted = by_ours(model, data, mirror(Helpful))
    for stage in (prepared, converted):
        assert "custom.linear.weight" in stage.state_dict()
        assert not any("original" in name for name in stage.state_dict())
    torch.testing.assert_close(prepared(*data[0]), model(*data[0]), atol=1e-6, rtol=0)
    assert 25 < sqnr(model(*data[0]), converted(*data[0])) < 60


def test_training_warns_of_a_weight_the_model_reads_itself() -> None:
    with pytest.warns(QuantizationWarning, match=r"parameter at 'lstm\.") as caught:
        tc.prepare_qat_fx(
            Values().train(),
            get_default_qat_qconfig_mapping("qnnpack"),
            (torch.randn(3, 16, 4),),
            MAP_LSTM,
        )
    (warning,) = caught
    assert "which training the custom module does not change" in str(warning.message)
    assert str(warning.message).count("'lstm.") == 2
