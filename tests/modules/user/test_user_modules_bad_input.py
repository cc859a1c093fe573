"""Mistakes in a user's custom module: an error of this package with the module's path and a hint, or correct
results; and the user's model is unchanged."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.ao.quantization.fx.custom_config import PrepareCustomConfig
from torch.ao.quantization.quant_type import QuantType

import torchq_compat as tc
from tests.helpers.lstm_flow import uniform
from tests.helpers.oracle import calibrate, leaves, sqnr
from tests.helpers.user_modules import (
    CLASSIC,
    MAPPING,
    Around,
    Custom,
    Mixer,
    ObservedCustom,
    StaticCustom,
    by_ours,
    classic,
    mirror,
    rows,
    settings_for,
    with_weights_of,
)
from torchq_compat.errors import (
    CustomModuleError,
    ExportError,
    InputError,
    QuantizationWarning,
    TorchQCompatError,
)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


class Wrapped(nn.Module):
    def __init__(self, custom: nn.Module) -> None:
        super().__init__()
        self.before = nn.Linear(4, 4)
        self.custom = custom

    def forward(self, x: Tensor) -> Any:
        return self.custom(self.before(x))


X = (torch.randn(5, 4),)


def assert_refused(
    action: Callable[[], Any], problem: str, model: nn.Module, *, hint: str = "", kind: str = "Error"
) -> None:
    before, modules = copy.deepcopy(model.state_dict()), dict(model.named_modules())
    classes = {name: type(module) for name, module in modules.items()}
    with pytest.raises(TorchQCompatError, match=problem) as caught:
        action()
    assert "'custom'" in str(caught.value)
    assert "\nHint: " in str(caught.value)
    assert hint in str(caught.value).partition("\nHint: ")[2]
    assert dict(model.named_modules()) == modules
    assert {name: type(module) for name, module in modules.items()} == classes
    assert not any(hasattr(m, "qconfig") or hasattr(m, "activation_post_process") for m in modules.values())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.state_dict().keys() == before.keys()


def refuse_prepare(model: nn.Module, prepare_config: Any, problem: str, hint: str = "") -> None:
    assert_refused(lambda: tc.prepare_fx(model, MAPPING, X, prepare_config), problem, model, hint=hint)


# The observed class


class Pairs(Mixer):
    """The float class of the observed classes below."""

    def forward(self, x: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        return self.linear(x) * scale, x


class CallsPairs(Wrapped):
    def forward(self, x: Tensor) -> Any:
        first, second = self.custom(self.before(x), 0.5)
        return first + second


class FewerArguments(Pairs):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return self.linear(x), x


class AList(Pairs):
    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        return [self.linear(x), x]


class OneTensor(Pairs):
    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        return self.linear(x)


class AnotherShape(Pairs):
    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        return self.linear(x), x[:, :3]


class AnotherDtype(Pairs):
    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        return self.linear(x).double(), x


class Raises(Pairs):
    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        raise KeyError("temperature")


class NoForward(nn.Module):
    pass


FORWARDS = [
    (FewerArguments, "FewerArguments at 'custom' cannot be called as the float module is: TypeError"),
    (AList, r"AList at 'custom' returns \['tensor', 'tensor'\], where .* \('tensor', 'tensor'\)"),
    (OneTensor, "OneTensor at 'custom' returns tensor, where"),
    (AnotherShape, r"AnotherShape at 'custom' returns \(5, 3\) of float32, where .* \(5, 4\) of float32"),
    (AnotherDtype, r"AnotherDtype at 'custom' returns \(5, 4\) of float64, where .* of float32"),
    (Raises, "Raises at 'custom' cannot be called as the float module is: KeyError: 'temperature'"),
    (NoForward, "NoForward at 'custom' cannot be called as the float module is: NotImplementedError"),
]


@pytest.mark.parametrize(("base", "problem"), FORWARDS)
def test_an_observed_forward_that_does_not_match(base: type[nn.Module], problem: str) -> None:
    from_float = classmethod(lambda cls, module: cls())
    observed = type(base.__name__, (base,), {"from_float": from_float})
    config, _ = settings_for(Pairs, observed, observed)
    refuse_prepare(CallsPairs(Pairs()).eval(), config, problem, hint="its forward has to take")


def no_attribute(cls: type, module: nn.Module) -> Any:
    return module.temperature


MAKERS: list[tuple[Any, str]] = [
    (lambda cls, module: None, r"from_\w+ for the module at 'custom' returned NoneType"),
    (lambda cls, module: torch.zeros(3), r"from_\w+ for the module at 'custom' returned Tensor"),
    (lambda cls, module: ObservedCustom, r"from_\w+ for the module at 'custom' returned type"),
    (no_attribute, r"from_\w+ failed for the module at 'custom': AttributeError: .*'temperature'"),
]


class Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.custom = Custom()

    def forward(self, x: Tensor) -> Tensor:
        return self.custom(x)


@pytest.mark.parametrize(("make", "problem"), MAKERS)
def test_a_from_float_that_makes_no_module(make: Any, problem: str) -> None:
    observed = type("Bad", (ObservedCustom,), {"from_float": classmethod(make)})
    config, _ = settings_for(Custom, observed, StaticCustom)
    model = Narrow().eval()
    assert_refused(
        lambda: tc.prepare_fx(model, MAPPING, rows(1)[0], config), f"Bad.{problem}", model, hint="from_float"
    )


@pytest.mark.parametrize(("make", "problem"), MAKERS)
def test_a_from_observed_that_makes_no_module(make: Any, problem: str) -> None:
    """The prepared model is unchanged, and converts with the right class."""
    quantized = type("Bad", (StaticCustom,), {"from_observed": classmethod(make)})
    _, config = settings_for(Custom, ObservedCustom, quantized)
    _, args, prepared, converted = classic()
    before = copy.deepcopy(prepared.state_dict())
    with pytest.raises(TorchQCompatError, match=f"Bad.{problem}") as caught:
        tc.convert_fx(prepared, config)
    assert "\nHint: from_observed" in str(caught.value)
    assert all(map(torch.equal, prepared.state_dict().values(), before.values()))
    assert torch.equal(tc.convert_fx(prepared, CLASSIC[1])(*args), converted(*args))


def test_a_from_observed_that_uses_up_what_it_gets_leaves_the_prepared_model_alone() -> None:
    class Breaks(StaticCustom):
        @classmethod
        def from_observed(cls, observed: nn.Module) -> nn.Module:
            observed.linear.weight.data.zero_()
            observed.linear = None
            raise RuntimeError("half done")

    _, args, prepared, _ = classic()
    before = prepared(*args)
    with pytest.raises(TorchQCompatError, match="RuntimeError: half done"):
        tc.convert_fx(prepared, settings_for(Custom, ObservedCustom, Breaks)[1])
    assert torch.equal(prepared(*args), before)


def test_a_from_float_that_uses_up_what_it_gets_leaves_the_model_alone() -> None:
    class Breaks(ObservedCustom):
        @classmethod
        def from_float(cls, module: nn.Module) -> nn.Module:
            module.linear.weight.data.zero_()
            del module.linear
            raise RuntimeError("half done")

    model = Narrow().eval()
    config, _ = settings_for(Custom, Breaks, StaticCustom)
    assert_refused(lambda: tc.prepare_fx(model, MAPPING, rows(1)[0], config), "half done", model)


# The quantized class


class CallsMixer(Wrapped):
    pass


class OfOne(Mixer):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), x + 1


def convert_with(forward: Any, **attributes: Any) -> tuple[nn.Module, Any]:
    """Return a model converted to a quantized class with this ``forward``, and the float model."""
    namespace = {
        "takes_floats": True,
        "forward": forward,
        "from_observed": classmethod(lambda cls, module: with_weights_of(cls(), module)),
        **attributes,
    }
    quantized = type("Bad", (Mixer,), namespace)
    prepare_config, convert_config = mirror(OfOne)
    (observed,) = prepare_config.float_to_observed_mapping[QuantType.STATIC].values()
    convert_config.set_observed_to_quantized_mapping(observed, quantized)
    model = Wrapped(OfOne()).eval()
    prepared = tc.prepare_fx(model, MAPPING, X, prepare_config)
    calibrate(prepared, [(torch.randn(16, 4),)])
    return tc.convert_fx(prepared, convert_config), model


QUANTIZED_FORWARDS: list[tuple[Any, str]] = [
    (lambda self, x: [self.linear(x), x], r"Bad at 'custom' returns \['tensor', 'tensor'\], where"),
    (lambda self, x: self.linear(x), r"Bad at 'custom' returns tensor, where"),
    (lambda self, x: None, r"Bad at 'custom' returns None, where"),
]


@pytest.mark.parametrize(("forward", "problem"), QUANTIZED_FORWARDS)
def test_a_quantized_forward_of_another_structure(forward: Any, problem: str) -> None:
    converted, _ = convert_with(forward)
    with pytest.raises(TorchQCompatError, match=problem) as caught:
        converted(*X)
    assert "Hint:" in str(caught.value)


def test_int16_for_a_class_of_legacy_quantized_tensors() -> None:
    observed = type("Observed16", (ObservedCustom,), {"quantized_inputs": {"x": torch.int16}})
    prepare_config, convert_config = settings_for(Custom, observed, StaticCustom)
    model, data = Around().eval(), rows()
    prepared = tc.prepare_fx(model, MAPPING, data[0], prepare_config)
    calibrate(prepared, data)
    with pytest.raises(TorchQCompatError, match=r"StaticCustom at 'custom' is int16, which torch\.ao's") as e:
        tc.convert_fx(prepared, convert_config)(*data[0])
    assert "Hint: set takes_floats = True" in str(e.value)


class Dequantizes(Custom):
    @classmethod
    def from_observed(cls, observed: nn.Module) -> nn.Module:
        return with_weights_of(cls(), observed)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.dequantize())


class Branches(ObservedCustom):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.mean() < 100 else x


def test_what_torch_export_cannot_take_is_named() -> None:
    model, data = Around().eval(), rows()
    _, converted = by_ours(model, data, settings_for(Custom, ObservedCustom, Dequantizes))
    for export in tc.export, torch.export.export:
        with pytest.raises(CustomModuleError, match=r"Dequantizes at 'custom' gets torch\.ao's") as caught:
            export(converted, data[0])
        assert "Hint: set takes_floats = True" in str(caught.value)
    with pytest.warns(QuantizationWarning, match="Branches at 'custom' stays observed"):
        _, observed = by_ours(model, data, (settings_for(Custom, Branches, StaticCustom)[0], None))
    with pytest.raises(ExportError, match="Hint: it calls Branches at 'custom', whose code"):
        tc.export(observed, data[0])
    not_traced = PrepareCustomConfig().set_non_traceable_module_names(["custom"])
    model.custom = Branches(model.custom.linear).eval()
    _, left_float = by_ours(model, data, (not_traced, None))
    with pytest.raises(ExportError, match="Hint: it calls Branches at 'custom', whose code"):
        tc.export(left_float, data[0])


# Settings of the boundary


class Free(Mixer):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), x + 1


SETTINGS: list[tuple[dict[str, Any], str, str]] = [
    ({"quantized_inputs": {"mask": None}}, "quantized_inputs .*'custom' names 'mask'", "they have 'x'."),
    ({"quantized_outputs": {"2": None}}, "quantized_outputs .*'custom' names '2'", "they have '0', '1'."),
    ({"quantized_outputs": {"logits": None}}, "quantized_outputs .*'custom' names 'logits'", "'0', '1'"),
    ({"quantized_inputs": {"x": 8}}, r"quantized_inputs\['x'\] of the module at 'custom' is not an obs", ""),
    ({"quantized_outputs": {"0": torch.float16}}, r"quantized_outputs\['0'\].*'custom'.*float16", ""),
    ({"quantized_inputs": ["x"]}, "quantized_inputs of the module at 'custom' must be a dict", ""),
]


@pytest.mark.parametrize(("attributes", "problem", "hint"), SETTINGS)
def test_settings_that_do_not_fit(attributes: dict[str, Any], problem: str, hint: str) -> None:
    refuse_prepare(Wrapped(Free()).eval(), mirror(Free, **attributes)[0], problem, hint)


# Modules that write to their inputs


class Mutates(Mixer):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        x += 1
        return y


class MutatesAView(Mixer):
    def forward(self, x: Tensor) -> Tensor:
        x[:, 0].zero_()
        return self.linear(x)


@pytest.mark.parametrize("float_class", [Mutates, MutatesAView])
def test_a_module_that_changes_its_input(float_class: type[nn.Module]) -> None:
    refuse_prepare(
        Wrapped(float_class()).eval(),
        mirror(float_class)[0],
        "the module at 'custom' changes its input x in place",
        hint="write the result to a new tensor",
    )


class Aliases(Mixer):
    """Its results: the input itself, a view of it, and one tensor twice."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.linear(x)
        return x, x[:, :2], y, y


class UsesAliases(Wrapped):
    def forward(self, x: Tensor) -> Any:
        z = self.before(x)
        same, view, y, again = self.custom(z)
        return same + z, view * 2, y - again, torch.cat([y, again], 1), same


def test_outputs_that_alias_inputs() -> None:
    model, data = UsesAliases(Aliases()).eval(), [(uniform(1.0, 16, 4),) for _ in range(4)]
    prepared, converted = by_ours(model, data, mirror(Aliases))
    for args in data:
        for a, b, c in zip(*(leaves(m(*args)) for m in (model, prepared, converted)), strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=0)
            assert torch.equal(a, c) if not a.any() else 25 < sqnr(a, c) < 60


# What cannot be passed


class Box:
    """A container that is not registered with pytree."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class GivesABox(Mixer):
    def forward(self, x: Tensor) -> Any:
        return Box(self.linear(x))


class TakesABox(Mixer):
    def forward(self, box: Box) -> Tensor:
        return self.linear(box.value)


class UnpacksABox(Wrapped):
    def forward(self, x: Tensor) -> Any:
        return self.custom(self.before(x)).value


class PacksABox(Wrapped):
    def forward(self, x: Tensor) -> Any:
        return self.custom(Box(self.before(x)))


@pytest.mark.parametrize(
    ("model", "float_class"), [(UnpacksABox, GivesABox), (PacksABox, TakesABox)], ids=["out", "in"]
)
def test_a_container_nobody_registered(model: type[Wrapped], float_class: type[nn.Module]) -> None:
    refuse_prepare(
        model(float_class()).eval(),
        mirror(float_class)[0],
        r"the module at 'custom' is given, or returns, a "
        r"tests.modules.user.test_user_modules_bad_input.Box",
        hint="make Box a dataclass, or register it with torch.utils._pytree",
    )


class Crate(Box):
    """A container that is registered."""


pytree.register_pytree_node(Crate, lambda crate: ([crate.value], None), lambda values, _: Crate(*values))


class GivesACrate(Mixer):
    def forward(self, x: Tensor) -> Any:
        return Crate(self.linear(x))


def test_a_container_that_is_registered() -> None:
    model, data = UnpacksABox(GivesACrate()).eval(), [(uniform(1.0, 16, 4),) for _ in range(4)]
    prepared, converted = by_ours(model, data, mirror(GivesACrate))
    torch.testing.assert_close(prepared(*data[0]), model(*data[0]), atol=1e-6, rtol=0)
    assert 25 < sqnr(model(*data[0]), converted(*data[0])) < 60


class GivesASize(Mixer):
    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return self.linear(x), x.shape[0] * 2


class UsesASize(Wrapped):
    def forward(self, x: Tensor) -> Any:
        y, size = self.custom(self.before(x))
        return y / size


def test_a_module_that_returns_a_size() -> None:
    model, x = UsesASize(GivesASize()).eval(), X[0]
    with pytest.warns(QuantizationWarning, match="at 'input x' .*fixed: at .* by .*shape"):
        prepared = tc.prepare_fx(model, MAPPING, (x,), mirror(GivesASize)[0])
    torch.testing.assert_close(prepared(x), model(x), atol=1e-6, rtol=0)
    with pytest.raises(InputError, match=r"has size \d+ in dimension 0"):
        prepared(torch.cat([x, x]))


class NeedsData(Mixer):
    quantized_inputs: ClassVar = {}

    def forward(self, x: Tensor) -> Tensor:
        return x[x[:, 0] > 0].new_zeros(1) if float(x.sum()) > 0 else self.linear(x)


def test_shapes_that_depend_on_data() -> None:
    refuse_prepare(
        Wrapped(NeedsData()).eval(),
        mirror(NeedsData)[0],
        "the shapes of the results of NeedsData at 'custom' are no sizes of its inputs",
        hint="register a torchq_compat.custom_modules.UserModuleHandler",
    )


# Arguments and results of the model itself are torch.export's concern


class Unregistered:
    def __init__(self, value: Tensor) -> None:
        self.value = value


class ReturnsIt(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return Unregistered(x * 2)


class TakesIt(nn.Module):
    def forward(self, given: Any) -> Any:
        return given.value * 2


@pytest.mark.parametrize(("model", "args"), [(ReturnsIt(), X), (TakesIt(), (Unregistered(X[0]),))])
def test_an_unknown_container_at_the_edge_of_the_model(model: nn.Module, args: tuple[Any, ...]) -> None:
    with pytest.raises(TorchQCompatError, match=r"Unregistered") as caught:
        tc.prepare_fx(model, MAPPING, args)
    assert "Hint: register what the model takes or returns: torch.export.register_dataclass" in str(
        caught.value
    )
