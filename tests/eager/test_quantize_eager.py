"""quantize_eager beside torch.ao's eager mode."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import pytest
import torch
import torch.ao.quantization as legacy
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.nn.quantized import FloatFunctional
from torch.ao.quantization import DeQuantStub, QuantStub, QuantWrapper

import torchq_compat as tc
from tests.eager.eager_models import NETS, MobileNet, ResNet, both, calibrated, images, sane
from tests.helpers.once import made_once
from tests.helpers.oracle import sqnr
from torchq_compat import quantize_eager
from torchq_compat.errors import ConfigError, ConvertError, ExportError, QuantizationWarning

X86 = legacy.get_default_qconfig("x86")


@pytest.fixture(autouse=True)
def no_warnings_of_torch() -> Any:
    """torch warns that eager mode, its observers and quantized tensors are deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.")
        yield


def step(converted: Any) -> float:
    """Return the step of the last quantized module."""
    return max(float(m.scale) for m in converted.modules() if isinstance(getattr(m, "scale", None), float))


def quantized_at(model: nn.Module) -> dict[str, tuple[float, int]]:
    """Return path -> scale and zero point."""
    return {
        path: (float(module.scale), int(module.zero_point))
        for path, module in model.named_modules()
        if isinstance(getattr(module, "scale", None), (float, Tensor))
    }


def assert_same(theirs: Any, ours: Any, inputs: Tensor, expected: Tensor) -> None:
    """Assert equal qparams and integer weights at equal paths, and results within a step."""
    assert quantized_at(ours).keys() == quantized_at(theirs).keys()
    for path, (scale, zero_point) in quantized_at(theirs).items():
        assert quantized_at(ours)[path] == (pytest.approx(scale, rel=1e-6), zero_point), path
    for path, module in theirs.named_modules():
        if callable(getattr(module, "weight", None)):
            weight = ours.get_submodule(path).weight()
            assert torch.equal(weight.int_repr(), module.weight().int_repr()), path
            assert weight.qscheme() == module.weight().qscheme()
    their_result, our_result = theirs(inputs), ours(inputs)
    steps = (their_result - our_result).abs() / list(quantized_at(ours).values())[-1][0]
    assert float(steps.max()) < 1.01
    assert float(steps.mean()) < 0.2
    assert 0.001 < float((our_result - expected).abs().mean() / expected.abs().mean()) < 0.15


@pytest.mark.parametrize("net", NETS)
def test_calibrated_as_eager_mode(net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, batches = sane(net()).eval(), images()
    expected = model(batches[0])
    for engine in ("fbgemm", "qnnpack"):
        # Without VNNI the kernels of x86 saturate in the whole range, which qnnpack's qconfig has.
        monkeypatch.setattr(torch.backends.quantized, "engine", engine)

        def flow(functions: Any, model: Any, engine: str = engine) -> Any:
            functions.fuse_modules(model, model.chains(), inplace=True)
            model.qconfig = legacy.get_default_qconfig(engine)
            prepared = calibrated(functions, model, batches)
            return prepared, functions.convert(prepared)

        (their_prepared, theirs), (prepared, ours) = both(flow, model)
        our_state, their_state = prepared.state_dict(), their_prepared.state_dict()
        assert our_state.keys() == their_state.keys()
        assert all(torch.equal(our_state[name], value) for name, value in their_state.items())
        assert_same(theirs, ours, batches[0], expected)
        half_moved = legacy.convert(prepared)
        assert torch.equal(half_moved(batches[0]), theirs(batches[0]))


@pytest.mark.parametrize("net", NETS)
def test_trained_as_eager_mode(net: Any) -> None:
    """Training draws the same numbers: states are equal bit for bit."""
    torch.manual_seed(0)
    model, batches = sane(net()).train(), images()

    def flow(functions: Any, model: Any) -> Any:
        functions.fuse_modules_qat(model, model.chains(), inplace=True)
        model.qconfig = legacy.get_default_qat_qconfig("fbgemm")
        prepared = functions.prepare_qat(model)
        optimizer = torch.optim.SGD(prepared.parameters(), lr=0.05)
        for index, batch in enumerate(batches):
            if index == 2:
                prepared.apply(legacy.disable_observer)
                prepared.apply(nn.intrinsic.qat.freeze_bn_stats)
            results = prepared(batch)
            optimizer.zero_grad()
            torch.stack([each.square().mean() for each in [*results]]).sum().backward()
            optimizer.step()
        prepared.eval()
        return prepared.state_dict(), prepared(batches[0]), functions.convert(prepared)

    (their_state, expected, theirs), (our_state, ours_prepared, ours) = both(flow, model)
    assert torch.equal(expected, ours_prepared)
    assert all(torch.equal(our_state[name], value) for name, value in their_state.items())
    their_result, our_result = theirs(batches[0]), ours(batches[0])
    assert float((their_result - our_result).abs().max()) < 1.01 * list(quantized_at(ours).values())[-1][0]
    assert 0 < float((our_result - expected).abs().max()) < 0.2 * float(expected.abs().max())


class Functions(nn.Module):
    """A module of every kind that computes in floats between two grids, and functions that need no module."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.layers = nn.Sequential(
            *(nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), nn.ELU(0.7), nn.BatchNorm2d(4)),
            *(nn.Hardswish(), nn.GroupNorm(2, 4), nn.LeakyReLU(0.2), nn.InstanceNorm2d(4, affine=True)),
            nn.ConvTranspose2d(4, 4, 2, 2),
        )
        self.norm, self.fc, self.functional = nn.LayerNorm(4), nn.Linear(4, 4), FloatFunctional()
        self.clamps = nn.Sequential(nn.ReLU6(), nn.Hardtanh(-1.0, 1.5), nn.Hardsigmoid())

    def forward(self, x: Tensor) -> Tensor:
        # torch.ao's clamps are wrong on the memory order of a convolution's result.
        x = self.clamps(self.layers(self.quant(x)).contiguous())
        x = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
        x = F.avg_pool2d(torch.cat([x, x.flip(-1)], 3), 2).permute(0, 2, 3, 1)
        x = self.fc(self.norm(x))
        x = self.functional.mul(x, torch.sigmoid(x))
        x = self.functional.add_scalar(self.functional.mul_scalar(x, -0.5), 0.1)
        return self.dequant(torch.tanh(x.clamp(-0.6, 0.6)))  # type: ignore[no-any-return]


def test_functions_round_as_kernels_of_quantized_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    model, batches = sane(Functions()).eval(), images()
    # An observer per operation of a FloatFunctional is eager mode's own limit: one here sees two of them.
    model.qconfig = legacy.get_default_qconfig("qnnpack")  # type: ignore[assignment]
    model.layers[7].qconfig = legacy.default_qconfig  # torch.ao has no per-channel transposed convolutions

    def flow(functions: Any, model: Any) -> Any:
        return functions.convert(calibrated(functions, model, batches))

    monkeypatch.setattr(torch.backends.quantized, "engine", "qnnpack")
    theirs, ours = both(flow, model)
    their_result, our_result = theirs(batches[0]), ours(batches[0])
    assert {*quantized_at(theirs)} == {*quantized_at(ours)}
    assert float((their_result - our_result).abs().max()) < 8.01 / 128  # a step of the linear, by its slope
    assert float((their_result - our_result).abs().mean()) < 0.25 / 128
    assert float((our_result - model(batches[0])).abs().mean()) < 0.05 < float(our_result.std())


@made_once
def converted_resnet() -> tuple[Any, Any, list[Tensor]]:
    """Return a calibrated model, it converted, and its images."""
    model, batches = sane(ResNet()).eval(), images()
    quantize_eager.fuse_modules(model, model.chains(), inplace=True)  # type: ignore[operator]
    model.qconfig = X86  # type: ignore[assignment]
    prepared = calibrated(quantize_eager, model, batches)
    return prepared, quantize_eager.convert(prepared), batches


def test_the_converted_model_is_a_model() -> None:
    """It keeps its class and its hooks; it is copied, pickled, moved to evaluation, and exported as q-dq."""
    prepared, converted, batches = converted_resnet()
    expected = converted(batches[0])
    assert type(converted).__name__ == "ResNet"
    assert isinstance(converted, ResNet)
    assert not any(hasattr(module, "qconfig") for module in converted.modules())
    file = io.BytesIO()
    torch.save(converted, file)
    file.seek(0)
    for copied in (copy.deepcopy(converted), torch.load(file, weights_only=False)):
        assert torch.equal(copied(batches[0]), expected)
    # A mean of 25 integers is never halfway between two of them, where it is rounded either way.
    odd = batches[0][..., :11, :11]
    exported = torch.export.export(converted, (odd,))
    assert torch.equal(exported.module()(odd), converted(odd))
    names = [str(node.target) for node in exported.graph.nodes]
    assert sum("quantized_decomposed.quantize_per_tensor" in name for name in names) == 6
    assert sum("quantized_decomposed.dequantize_per_channel" in name for name in names) == 3
    seen: list[Tensor] = []
    prepared.conv1.register_forward_hook(lambda module, inputs, result: seen.append(result))
    quantize_eager.convert(prepared)(batches[0])
    assert len(seen) == 1
    assert len(seen[0].unique()) <= 256


def test_states_load() -> None:
    """Of eager mode's prepared model into the prepared, of its converted one into the converted."""
    torch.manual_seed(2)
    model, batches = sane(MobileNet()).eval(), images()
    model.qconfig = X86  # type: ignore[assignment]

    def flow(functions: Any, model: Any) -> Any:
        functions.fuse_modules(model, model.chains(), inplace=True)
        return functions.prepare(model)

    theirs, ours = both(flow, model)
    for batch in batches:
        theirs(batch)
    ours.load_state_dict(theirs.state_dict())
    converted = quantize_eager.convert(ours)
    expected = converted(batches[0])
    their_converted = legacy.convert(theirs)
    assert float((their_converted(batches[0]) - expected).abs().max()) < 1.01 * step(converted)
    other = sane(MobileNet()).eval()
    other.qconfig = X86  # type: ignore[assignment]
    with pytest.warns(QuantizationWarning, match="TQ405"):
        empty = quantize_eager.convert(both(flow, other)[1])
    assert not torch.equal(empty(batches[0]), expected)
    for state in (their_converted.state_dict(), converted.state_dict()):
        loaded = copy.deepcopy(empty)
        loaded.load_state_dict(state)
        assert torch.equal(loaded(batches[0]), expected)


class Parts(nn.Module):
    """A model that is quantized in part."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.first, self.middle, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dequant(self.first(self.quant(x)))
        return self.last(self.middle(x).sin())  # type: ignore[no-any-return]


def test_what_has_no_qconfig_stays_float_in_place_or_not() -> None:
    torch.manual_seed(3)
    model, x = Parts().eval(), torch.randn(64, 4)
    model.qconfig, model.middle.qconfig, model.last.qconfig = X86, None, None  # type: ignore[assignment]
    prepared = quantize_eager.prepare(model)
    assert not hasattr(model.first, "activation_post_process")
    assert not hasattr(prepared.last, "activation_post_process")
    assert quantize_eager.prepare(model, inplace=True) is model
    model(x)
    converted = quantize_eager.convert(model)
    assert converted is not model
    assert quantize_eager.convert(model, inplace=True) is model
    assert isinstance(model.first.weight(), Tensor)  # type: ignore[operator]
    assert type(model.last) is type(model.middle) is nn.Linear
    assert torch.equal(model(x), converted(x))
    between = model.dequant(model.first(model.quant(x)))
    assert len(between.unique()) <= 256
    report = {decision.path: decision for decision in tc.explain(model)}
    assert report["last"].action == report["middle"].action == "float"
    assert report["first"].details["scale"] == model.first.scale
    assert "qconfig is None" in report["last"].reason


def test_the_small_functions_as_torch_ao() -> None:
    torch.manual_seed(4)
    x = torch.randn(64, 4)

    def run(functions: Any, model: Any) -> Any:
        model.qconfig = X86
        model[1].qconfig = None
        functions.propagate_qconfig_(model)
        wrapped = functions.add_quant_dequant(model)
        assert [type(each).__name__ for each in wrapped] == ["QuantWrapper", "ReLU", "QuantWrapper"]
        return functions.quantize(wrapped.eval(), lambda prepared, data: prepared(data), [x])

    theirs, ours = both(run, nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    assert float((theirs(x) - ours(x)).abs().max()) < 1.01 * step(ours)
    assert [path for path, _ in ours.named_modules()] == [
        path for path, _ in theirs.named_modules() if "_packed_params" not in path
    ]
    leaf = QuantWrapper(nn.Linear(4, 2))
    leaf.qconfig = legacy.get_default_qat_qconfig("x86")  # type: ignore[assignment]

    def training(functions: Any, model: Any) -> Any:
        return functions.quantize_qat(model, lambda prepared: prepared(x).sum().backward(), [])

    theirs, ours = both(training, leaf)
    assert torch.equal(theirs(x), ours(x))
    observed = quantize_eager.prepare(leaf.eval()).module
    observed(x)
    mapping = legacy.get_default_static_quant_module_mappings()
    made = quantize_eager.swap_module(observed, mapping, {})
    assert torch.equal(
        made.weight().int_repr(), legacy.swap_module(observed, mapping, {}).weight().int_repr()
    )  # type: ignore[operator]


def test_embeddings() -> None:
    torch.manual_seed(5)
    model = nn.ModuleDict({"one": nn.Embedding(20, 8), "bag": nn.EmbeddingBag(20, 8, mode="sum")}).eval()
    model.qconfig = legacy.float_qparams_weight_only_qconfig  # type: ignore[assignment]
    theirs, ours = both(lambda functions, model: functions.convert(functions.prepare(model)), model)
    indices, offsets = torch.randint(0, 20, (12,)), torch.tensor([0, 5])
    assert torch.allclose(ours["one"](indices), theirs["one"](indices), atol=1e-6)
    assert torch.allclose(ours["bag"](indices, offsets), theirs["bag"](indices, offsets), atol=1e-6)
    assert torch.equal(ours["one"].weight().int_repr(), theirs["one"].weight().int_repr())
    loaded = copy.deepcopy(ours)
    loaded["one"].integers.zero_()
    loaded.load_state_dict(theirs.state_dict())
    assert torch.equal(loaded["one"](indices), ours["one"](indices))


class Wrong(nn.Module):
    """Eager mode refuses this model once it is converted: it adds quantized values."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(self.quant(x))
        return self.dequant(self.second(y + y))  # type: ignore[no-any-return]


def converted_of(model: nn.Module, x: Tensor, qconfig: Any = X86) -> nn.Module:
    model.qconfig = qconfig
    return quantize_eager.convert(calibrated(quantize_eager, model.eval(), [x]))


def test_what_eager_mode_refuses_is_told() -> None:
    torch.manual_seed(6)
    model, x = Wrong(), torch.randn(64, 4)
    converted = converted_of(model, x)
    with pytest.warns(QuantizationWarning) as caught:
        result = converted(x)
    assert sorted(warning.message.code for warning in caught) == ["TQ425", "TQ426"]  # type: ignore[union-attr]
    assert "second" in str(caught[0].message) + str(caught[1].message)
    assert float((result - model(x)).abs().max()) < 0.1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        converted(x)


class ByHand(nn.Module):
    """A script that builds a quantized module of torch.ao itself, and asks a quantized tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.dequant = nn.Conv2d(3, 3, 1), DeQuantStub()
        self.by_hand: Any = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        q = torch.quantize_per_tensor(x, 0.05, 128, torch.quint8)
        q = self.by_hand(self.conv(q.dequantize() if self.by_hand.training else q))
        if not self.by_hand.training:
            assert q.int_repr().dtype is torch.uint8
            assert q.q_scale() > 0
        return self.dequant(q)  # type: ignore[no-any-return]


def test_kernels_called_by_hand_run_and_are_told() -> None:
    torch.manual_seed(7)
    model, x = ByHand().train(), torch.randn(2, 3, 4, 4)
    model.qconfig = X86  # type: ignore[assignment]

    def flow(functions: Any, model: Any) -> Any:
        converted = functions.convert(calibrated(functions, model, [x]))
        inner = nn.Conv2d(3, 3, 1)
        inner.weight.data, inner.bias.data = torch.eye(3).view(3, 3, 1, 1), torch.zeros(3)
        inner.qconfig, inner.activation_post_process = legacy.default_qconfig, legacy.MinMaxObserver()  # type: ignore[assignment]
        inner.activation_post_process(torch.tensor([-2.0, 2.0]))
        converted.by_hand = torch.ao.nn.quantized.Conv2d.from_float(inner)
        return converted.eval()

    theirs, ours = both(flow, model)
    with pytest.warns(QuantizationWarning, match="TQ427"):
        result = ours(x)
    assert float((result - theirs(x)).abs().max()) < 1.01 * 4 / 255
    assert 0 < float((result - model(x)).abs().mean()) < 0.05


def test_bad_input_is_refused() -> None:
    model, x = Parts(), torch.randn(8, 4)
    with pytest.raises(ConfigError, match="evaluation mode"):
        quantize_eager.prepare_qat(model.eval())
    model.first.qconfig = "x86"  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="qconfig of 'first' is a str"):
        quantize_eager.prepare(model)
    with pytest.raises(ConvertError, match=r"'quant'.*no integers"):
        converted_of(Parts(), x, legacy.QConfig(legacy.PlaceholderObserver, legacy.default_weight_observer))
    with pytest.raises(ConvertError, match=r"'first' is of torch.quint8"):
        converted_of(Parts(), x, legacy.QConfig(legacy.default_observer, legacy.default_observer))
    with pytest.raises(ConvertError, match="NaN or infinity"):
        converted_of(Parts(), torch.full((2, 4), torch.inf), legacy.default_qconfig)
    with pytest.raises(ConfigError, match="fuse_modules"):
        quantize_eager.fuse_modules(model, ["first", "nothing"])
    with pytest.raises(ConfigError, match="converted already"):
        quantize_eager.prepare(converted_of(Parts(), x))
    with pytest.raises(tc.ArgumentError, match="model must be"):
        quantize_eager.prepare("model")  # type: ignore[arg-type]
    fx = tc.prepare_fx(nn.Sequential(nn.Linear(4, 2)).eval(), legacy.get_default_qconfig_mapping("x86"), (x,))
    with pytest.raises(ConfigError, match="prepare_fx"):
        quantize_eager.convert(fx)


def test_a_model_without_qconfig_is_told_and_stays_what_it_is() -> None:
    with pytest.warns(QuantizationWarning, match="nothing is observed.*TQ424"):
        quantize_eager.prepare(Parts())
    with pytest.warns(QuantizationWarning, match="nothing is quantized.*TQ424"):
        kept = quantize_eager.convert(nn.Sequential(nn.Linear(4, 2)))
    assert type(kept) is nn.Sequential
    assert torch.jit.script(kept)(torch.ones(1, 4)).shape == (1, 2)


def test_classes_that_save_nothing_and_slopes_per_channel() -> None:
    torch.manual_seed(0)
    model = quantize_eager.QuantWrapper(nn.Sequential(nn.Linear(6, 8), nn.ELU(), nn.PReLU(8, 0.6))).eval()
    x = torch.randn(40, 6)
    model.qconfig = legacy.get_default_qconfig("qnnpack")  # type: ignore[assignment]
    prepared = legacy.prepare(model)
    expected = prepared(x)
    ours = quantize_eager.convert(prepared)
    result = ours(x)
    ours.load_state_dict(legacy.convert(prepared).state_dict())
    assert torch.equal(ours(x), result)
    model.qconfig = X86  # type: ignore[assignment]
    prepared = legacy.prepare(model)
    prepared(x)
    for converted in (ours, quantize_eager.convert(prepared)):
        assert 30 < sqnr(expected, converted(x)) < 60


AVERAGES: dict[str, tuple[nn.Module, bool]] = {
    "global": (nn.AdaptiveAvgPool2d(1), True),
    "padded": (nn.AvgPool2d(2, 1, 1), True),
    "without padding": (nn.AvgPool2d(2, 1, 1, count_include_pad=False), False),
    "by three": (nn.AvgPool2d(2, divisor_override=3), False),
    "clamp": (nn.ReLU6(), False),
}


@pytest.mark.parametrize("engine", ["fbgemm", "qnnpack"])
def test_averages_have_the_bits_of_eager_mode(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four integers, a quarter of all averages lie halfway between two."""
    monkeypatch.setattr(torch.backends.quantized, "engine", engine)
    torch.manual_seed(0)
    x = torch.randn(8, 3, 4, 4)
    for name, (layer, is_right_on_qnnpack) in AVERAGES.items():
        model = quantize_eager.QuantWrapper(nn.Sequential(nn.Conv2d(3, 8, 3), layer)).eval()
        model.qconfig = legacy.get_default_qconfig(engine)  # type: ignore[assignment]
        prepared = legacy.prepare(model)
        with torch.no_grad():
            expected = prepared(x)
            theirs = legacy.convert(copy.deepcopy(prepared))(x)
            ours = quantize_eager.convert(prepared)(x)
        if engine == "fbgemm" or is_right_on_qnnpack:
            assert torch.equal(ours, theirs), name
        else:
            assert sqnr(expected, ours) > 30 > sqnr(expected, theirs) + 15, name


def test_lowered_to_integers_and_scripted() -> None:
    _, converted, batches = converted_resnet()
    # Scripts compile what they convert before they call it: the calibration knows the inputs.
    at_once = torch.jit.script(converted)
    expected = converted(batches[0])
    uncalled: nn.Module = ResNet().eval()
    uncalled.qconfig = legacy.default_qconfig  # type: ignore[assignment]
    with pytest.warns(QuantizationWarning, match="TQ405"):
        uncalled = quantize_eager.convert(quantize_eager.prepare(uncalled))
    with pytest.raises(ExportError, match="was not called"):
        torch.jit.script(uncalled)
    lowered = quantize_eager.lower(converted, (batches[0],))
    by_integers = [decision for decision in lowered.lowering if "convolution" in decision.reason]
    assert len(by_integers) == 2
    assert all(decision.action == "lowered" for decision in lowered.lowering)
    more = torch.randn(2, 3, 16, 12)
    for model in (lowered, at_once, torch.jit.script(converted)):
        for images_, result in ((batches[0], expected), (more, converted(more))):
            assert float((model(images_) - result).abs().max()) < 1.01 * converted.fc.scale
    with pytest.raises(ConfigError, match=r"not returned by quantize_eager\.convert"):
        quantize_eager.lower(ResNet(), (batches[0],))


def test_convert_and_script_draw_no_numbers_and_stubs_show_tensors() -> None:
    prepared, _, batches = converted_resnet()
    torch.manual_seed(5)
    expected = torch.get_rng_state()
    converted = quantize_eager.convert(prepared)
    converted(batches[0])
    torch.jit.script(converted)
    assert torch.equal(torch.get_rng_state(), expected)
    eager = legacy.convert(copy.deepcopy(prepared))
    for name in ("scale", "zero_point"):  # As scripts print them.
        assert torch.equal(getattr(converted.quant, name), getattr(eager.quant, name))
    assert repr(converted.quant).startswith("Quantize(")


def test_halfway_between_steps_the_lowered_model_has_the_bits_of_the_graph() -> None:
    """A first quantize at a scale of a power of two meets many values halfway between two steps."""
    model = QuantWrapper(nn.Linear(4, 4)).eval()
    model.qconfig = legacy.default_qconfig
    prepared = quantize_eager.prepare(model)
    prepared(torch.tensor([[-2.0, 1.96875, 0.0, 1.0]]))  # 0.03125 times 127
    converted = quantize_eager.convert(prepared)
    x = (torch.arange(-60, 60).float() + 0.5).reshape(30, 4) * float(converted.quant.scale)
    lowered = quantize_eager.lower(converted, (x,))
    assert torch.equal(lowered.reference(x), torch.export.export(converted, (x,)).module()(x))
    assert float((lowered(x) - lowered.reference(x)).abs().max()) < 1.01 * converted.module.scale
