"""Models that are custom modules themselves, identities of any structure, names in graphs, other engines."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.quantization.quantize_fx as fx
from torch import Tensor, nn
from torch.ao.quantization import (
    default_dynamic_qconfig,
    float_qparams_weight_only_qconfig,
    get_default_qconfig_mapping,
)
from torch.ao.quantization.backend_config import get_native_backend_config, get_tensorrt_backend_config
from torch.ao.quantization.fx.custom_config import ConvertCustomConfig, PrepareCustomConfig
from torch.ao.quantization.quant_type import QuantType
from torch.fx import GraphModule
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e, prepare_qat_pt2e
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import X86InductorQuantizer

import torchq_compat as tc
from tests.helpers.histograms import coarse_qconfig_mapping
from tests.helpers.oracle import leaves, quantize_nodes, sqnr
from torchq_compat.nn import quantizable

X = torch.randn(7, 4, 8, generator=torch.Generator().manual_seed(0))
MAPPING = get_default_qconfig_mapping("x86")


def flat(result: Any) -> Tensor:
    return torch.cat([leaf.flatten() for leaf in leaves(result)])


ROOTS: list[tuple[nn.Module, tuple[Any, ...]]] = [
    (nn.LSTM(8, 16, 2, bidirectional=True), (X, (torch.zeros(4, 4, 16), torch.zeros(4, 4, 16)))),
    (nn.GRU(8, 16), (X,)),
    (nn.RNN(8, 16), (X,)),
    (nn.LSTMCell(8, 16), (X[0],)),
    (nn.MultiheadAttention(8, 2), (X, X, X)),
]


@pytest.mark.parametrize(("model", "args"), ROOTS, ids=lambda each: type(each).__name__)
def test_a_model_that_is_a_custom_module_is_quantized(model: nn.Module, args: tuple[Any, ...]) -> None:
    model.eval()
    expected = flat(model(*args)).detach()
    mapping = coarse_qconfig_mapping("x86")
    prepared = tc.prepare_fx(model, mapping, args, tc.get_default_prepare_custom_config())
    assert sqnr(expected, flat(prepared(*args))) > 100
    prepared(*args)
    reference = tc.convert_to_reference_fx(prepared)
    for converted in (reference, tc.convert_fx(prepared)):
        assert 22 < sqnr(expected, flat(converted(*args))) < 50
        if isinstance(model, nn.RNNBase):
            assert isinstance(converted.get_submodule("layers.0.layer_fw.cell"), GraphModule)
    assert {d.action.value for d in tc.explain(reference) if d.path == "module"} == {"quantized"}
    other = copy.deepcopy(reference)
    other.load_state_dict(reference.state_dict())
    assert torch.equal(flat(other(*args)), flat(reference(*args)))


def test_a_model_that_nothing_maps_says_so() -> None:
    with pytest.warns(UserWarning, match="LSTM at 'module' stays float"):
        tc.prepare_fx(nn.LSTM(8, 16).eval(), MAPPING, (X,))


class Passing(nn.Module):
    def __init__(self, run: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.same, self.fc, self.run = nn.Identity(1, unused=2), nn.Linear(8, 8), run

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def total(values: Any) -> Tensor:
    first, second = values
    return first + second


PASSINGS = {
    "tuple": lambda m, x: total(m.same((m.fc(x), x))),
    "dict": lambda m, x: total(m.same({"a": m.fc(x), "b": x}).values()),
    "nested": lambda m, x: m.same({"a": (m.fc(x), [x, 3])})["a"][0],
    "none": lambda m, x: m.fc(x) if m.same(None) is None else x,
    "size": lambda m, x: m.fc(x).reshape(m.same(x.shape)),
    "returned": lambda m, x: m.same((m.fc(x), x)),
    "keyword": lambda m, x: m.fc(m.same(input=x)),
}


@pytest.mark.parametrize("run", PASSINGS.values(), ids=PASSINGS)
def test_identity_hands_on_any_structure(run: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    model = Passing(run).eval()
    expected = flat(model(X)).detach()
    prepared = tc.prepare_fx(model, MAPPING, (X,))
    assert sqnr(expected, flat(prepared(X))) > 100
    converted = tc.convert_to_reference_fx(prepared)
    assert len(quantize_nodes(converted)) >= 2
    assert 25 < sqnr(expected, flat(converted(X))) < 50


class Named(nn.Module):
    """Shared observers, a recurrent module, and a reshape between."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.lstm, self.head = nn.Linear(8, 8), nn.LSTM(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.fc(x).flatten(1).reshape(x.shape))[0])


def test_names_in_a_graph_name_modules() -> None:
    torch.manual_seed(0)
    prepared = tc.prepare_fx(Named().eval(), MAPPING, (X,), tc.get_default_prepare_custom_config())
    prepared(X)
    for graph_module in (prepared, tc.convert_to_reference_fx(prepared), tc.convert_fx(prepared)):
        before, state = graph_module(X), set(graph_module.state_dict())
        modules = dict(graph_module.named_modules())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            graph_module.graph.lint()
        calls = [node for node in graph_module.graph.nodes if node.op == "call_module"]
        assert calls
        for node in calls:
            assert modules[node.target] is graph_module.get_submodule(node.target)
        ops = [
            n for n in graph_module.graph.nodes if n.op == "call_function" and "quantize" not in str(n.target)
        ]
        assert all(node.stack_trace and node.meta["nn_module_stack"] for node in ops)
        assert "torch" in graph_module.print_readable(print_output=False)
        graph_module.delete_all_unused_submodules()
        graph_module.recompile()
        assert torch.equal(graph_module(X), before)
        assert set(graph_module.state_dict()) == state


ENGINES = [fx.convert_fx, fx.convert_to_reference_fx, fx._convert_to_reference_decomposed_fx, convert_pt2e]


def test_other_engines_do_not_take_on_our_models() -> None:
    prepared = tc.prepare_fx(nn.Sequential(nn.Linear(8, 8)).eval(), MAPPING, (X,))
    prepared(X)
    models = [
        prepared,
        copy.deepcopy(prepared),
        tc.convert_to_reference_fx(prepared),
        tc.convert_fx(prepared),
    ]
    for model in models:
        for convert in ENGINES:
            with pytest.raises(tc.TorchQCompatError, match="import prepare_fx, convert_fx"):
                convert(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for prepare in (fx.prepare_fx, fx.prepare_qat_fx):
                with pytest.raises(tc.TorchQCompatError, match="by torchq_compat"):
                    prepare(model, MAPPING, (X,))
            with pytest.raises(tc.TorchQCompatError, match="by torchq_compat"):
                fx.fuse_fx(model)
        for prepare in (prepare_pt2e, prepare_qat_pt2e):
            with pytest.raises(tc.TorchQCompatError, match="by torchq_compat"):
                prepare(model, X86InductorQuantizer())
        with pytest.raises(tc.TorchQCompatError, match="takes a float model"):
            tc.prepare_fx(model, MAPPING, (X,))
    for model in models[:2]:
        with pytest.raises(tc.TorchQCompatError, match="the module at '0' is prepared"):
            tc.prepare_fx(nn.Sequential(model), MAPPING, (X,))
    assert torch.fx.symbolic_trace(models[2])(X).shape == X.shape


def test_models_of_fx_are_not_prepared_again() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = fx.prepare_fx(nn.Sequential(nn.Linear(8, 8)).eval(), MAPPING, (X,))
        prepared(X)
        models = [
            prepared,
            fx.convert_fx(copy.deepcopy(prepared)),
            fx.convert_to_reference_fx(copy.deepcopy(prepared)),
        ]
    for model, stage in zip(models, ["prepared", "converted", "converted"], strict=True):
        with pytest.raises(tc.TorchQCompatError, match=f"the model is {stage} already"):
            tc.prepare_fx(model, MAPPING, (X,))


class Halving(quantizable.GRU):
    def forward(self, x: Tensor, hx: Tensor | None = None) -> Any:
        output, state = super().forward(x, hx)
        return output * 0.5, state


class OfTorch(torch.ao.nn.quantizable.LSTM):
    def forward(self, x: Tensor, hidden: Any = None) -> Any:
        return super().forward(x, hidden)


@pytest.mark.parametrize(("model", "observed"), [(nn.GRU(8, 8), Halving), (nn.LSTM(8, 8), OfTorch)])
def test_an_observed_class_that_is_not_called_is_told_of(model: nn.Module, observed: type[nn.Module]) -> None:
    config = PrepareCustomConfig().set_float_to_observed_mapping(type(model), observed)
    with pytest.warns(UserWarning, match=f"{observed.__name__} at '0' has a forward of its own"):
        tc.prepare_fx(nn.Sequential(model).eval(), MAPPING, (X,), config)


class Louder(nn.Module):
    """An observed class that computes something other than the float class."""

    @classmethod
    def from_float(cls, module: nn.Module) -> nn.Module:
        made = cls()
        made.inner = module
        return made

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * 2  # type: ignore[no-any-return]


def test_what_an_observed_class_computes_differently_is_explained() -> None:
    config = PrepareCustomConfig().set_float_to_observed_mapping(Opaque, Louder)
    model = nn.Sequential(Opaque(), nn.Linear(8, 8)).eval()
    with pytest.warns(UserWarning, match="observed class at '0' is quantized: without observers it computes"):
        prepared = tc.prepare_fx(model, MAPPING, (X,), config)
    with pytest.warns(UserWarning, match="has no entry for its class"):
        converted = tc.convert_to_reference_fx(calibrated(prepared))
    for kept in (prepared, copy.deepcopy(prepared), converted):
        (told,) = [d for d in tc.explain(kept) if d.kind == "observed class"]
        assert told.warn
        assert "something else than the float model" in told.reason


def calibrated(prepared: GraphModule) -> GraphModule:
    prepared(X)
    return prepared


def test_another_backend_config_at_convert_is_told_of() -> None:
    """FX's lowering uses the backend config of convert."""
    backend = get_tensorrt_backend_config()
    prepared = calibrated(tc.prepare_fx(nn.Sequential(nn.Linear(8, 8)).eval(), MAPPING, (X,)))
    with pytest.warns(UserWarning, match="backend_config 'tensorrt' is not that of prepare_fx"):
        tc.convert_to_reference_fx(prepared, backend_config=backend)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tc.convert_to_reference_fx(prepared, backend_config=get_native_backend_config())
        tc.convert_to_reference_fx(prepared, backend_config=get_native_backend_config().to_dict())


class Opaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.fc(x))


class Quantized(nn.Module):
    seen: Any = None

    @classmethod
    def from_observed(cls, module: nn.Module) -> nn.Module:
        made = cls()
        made.inner = module
        return made

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x.dtype
        return torch.quantize_per_tensor(self.inner(x.dequantize()), 2 / 256, 128, torch.quint8)


def test_a_convert_mapping_for_a_non_traceable_class_is_carried_out() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Opaque(), nn.Linear(8, 4)).eval()
    config = PrepareCustomConfig().set_non_traceable_module_classes([Opaque])
    to = ConvertCustomConfig().set_observed_to_quantized_mapping(Opaque, Quantized)
    prepared = tc.prepare_fx(model, MAPPING, (X,), config)
    prepared(X)
    converted = tc.convert_to_reference_fx(prepared, to)
    expected = model(X).detach()
    found = sqnr(expected, converted(X))
    assert converted.get_submodule("1.quantized").seen is torch.quint8
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        oracle = fx.prepare_fx(copy.deepcopy(model), MAPPING, (X,), config)
        oracle(X)
        by_the_oracle = fx.convert_to_reference_fx(oracle, to)
    assert abs(found - sqnr(expected, by_the_oracle(X))) < 1.5
    assert 25 < found < 45
    assert "Quantized" in next(d.reason for d in tc.explain(converted) if d.path == "1")


class OnFloats(Quantized):
    def forward(self, x: Tensor) -> Tensor:
        self.seen = x.dtype
        return (self.inner(x) * 128).round() / 128


@pytest.mark.parametrize("kind", [QuantType.DYNAMIC, QuantType.WEIGHT_ONLY])
def test_convert_mappings_for_non_traceable_classes_of_other_kinds(kind: QuantType) -> None:
    """As in FX, the module is called with floats."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Opaque(), nn.Linear(8, 4)).eval()
    qconfig = default_dynamic_qconfig if kind is QuantType.DYNAMIC else float_qparams_weight_only_qconfig
    mapping = get_default_qconfig_mapping("x86").set_object_type(Opaque, qconfig)
    config = PrepareCustomConfig().set_non_traceable_module_classes([Opaque])
    to = ConvertCustomConfig().set_observed_to_quantized_mapping(Opaque, OnFloats, kind)
    prepared = calibrated(tc.prepare_fx(model, mapping, (X,), config))
    converted = tc.convert_to_reference_fx(prepared, to)
    theirs = fx.convert_to_reference_fx(fx.prepare_fx(copy.deepcopy(model), mapping, (X,), config), to)
    assert type(theirs.get_submodule("1")) is OnFloats
    lowered = tc.convert_fx(prepared, to)
    assert sqnr(converted(X), lowered(X)) > 45
    assert 25 < sqnr(model(X), converted(X)) < 45
    assert converted.get_submodule("1.quantized").seen is torch.float32
    static = ConvertCustomConfig().set_observed_to_quantized_mapping(Opaque, Quantized)
    with pytest.warns(tc.QuantizationWarning, match="for static qconfigs, and its qconfig is"):
        tc.convert_to_reference_fx(prepared, static)
