"""Views of the float model's modules in a converted one, beside FX's own modules."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
import torch.ao.nn.intrinsic.qat as nniqat
import torch.ao.nn.intrinsic.quantized as nniq
import torch.ao.nn.quantized as nnq
import torch.ao.quantization.quantize_fx as fx
from torch import Tensor, nn
from torch.ao.quantization import (
    MinMaxObserver,
    QConfig,
    QConfigMapping,
    default_dynamic_qconfig,
    default_fake_quant,
    float_qparams_weight_only_qconfig,
    fuse_modules,
    get_default_qat_qconfig_mapping,
    get_default_qconfig_mapping,
)
from torch.ao.quantization._learnable_fake_quantize import _LearnableFakeQuantize

import torchq_compat as tc
from torchq_compat.errors import ModuleAttributeError
from torchq_compat.nn.intrinsic import qat as switches

MAPPING = get_default_qconfig_mapping("x86")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, stride=2, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU()
        self.block = nn.Sequential(nn.Conv2d(8, 4, 1), nn.ReLU())
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.block(self.relu(self.bn1(self.conv1(x)))).mean((2, 3)))


@pytest.fixture(scope="module")
def both() -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(0)
    model, x = Net().eval(), torch.randn(4, 3, 9, 9)
    converted = []
    for prepare, convert in ((fx.prepare_fx, fx.convert_fx), (tc.prepare_fx, tc.convert_fx)):
        prepared = prepare(copy.deepcopy(model), MAPPING, (x,))
        prepared(x)
        converted.append(convert(prepared))
    return converted[0], converted[1], x


@pytest.mark.parametrize("path", ["conv1", "block.0", "fc"])
def test_what_scripts_read_is_what_fx_has(path: str, both: tuple[nn.Module, nn.Module, Tensor]) -> None:
    theirs, ours = (model.get_submodule(path) for model in both[:2])
    assert type(ours).__name__ == type(theirs).__name__.replace("Conv", "QuantizedConv").replace(
        "Linear", "QuantizedLinear"
    )
    assert repr(ours).split("(")[0] == repr(theirs).split("(")[0]
    assert torch.equal(ours.weight().int_repr(), theirs.weight().int_repr())
    assert torch.allclose(ours.weight().q_per_channel_scales(), theirs.weight().q_per_channel_scales())
    assert torch.allclose(ours.bias(), theirs.bias(), rtol=1e-5)
    assert ours.scale == pytest.approx(float(theirs.scale), rel=1e-6)
    assert ours.zero_point == int(theirs.zero_point)
    assert f"scale={ours.scale}, zero_point={ours.zero_point}" in repr(ours)


def test_modules_that_the_script_fused_are_read_as_those_fused_in_prepare(
    both: tuple[nn.Module, nn.Module, Tensor],
) -> None:
    torch.manual_seed(0)
    model, x = Net().eval(), both[2]
    by_type = QConfigMapping()
    for kind in (nn.Conv2d, nn.BatchNorm2d, nn.ReLU):
        by_type.set_object_type(kind, MAPPING.global_qconfig)
    for fused in (tc.fuse_fx(model), fuse_modules(model, [["conv1", "bn1", "relu"], ["block.0", "block.1"]])):
        decisions = tc.explain(tc.prepare_fx(fused, by_type, (x,))).find("conv1")
        assert next(iter(decisions)).action == "quantized"
        prepared = tc.prepare_fx(fused, MAPPING, (x,))
        prepared(x)
        converted = tc.convert_fx(prepared)
        for path in ("conv1", "block.0", "fc"):
            ours, other = (item.get_submodule(path) for item in (converted, both[1]))
            assert (type(ours), ours.scale, ours.zero_point) == (type(other), other.scale, other.zero_point)
            assert torch.equal(ours.weight().int_repr(), other.weight().int_repr())
            assert torch.equal(ours.bias(), other.bias())


def test_modules_come_in_the_order_of_the_float_model(both: tuple[nn.Module, nn.Module, Tensor]) -> None:
    theirs, ours, x = both
    expected = [path for path, _ in theirs.named_modules() if path and "_packed" not in path]
    assert [path for path, _ in ours.named_modules() if path in expected] == expected
    prepared = tc.prepare_fx(Net().eval(), MAPPING, (x,))
    wanted = ["conv1", "relu", "block", "block.0", "block.1", "fc"]
    assert [path for path, _ in prepared.named_modules() if path in wanted] == wanted


def test_a_bias_is_called_and_saved_as_a_tensor(both: tuple[nn.Module, nn.Module, Tensor]) -> None:
    _, ours, x = both
    assert ours.fc.bias is ours.fc.bias()
    assert ours.fc.bias is ours.get_parameter("fc.bias")
    assert type(copy.deepcopy(ours).fc.bias) is type(ours.fc.bias)
    assert {type(value) for value in ours.state_dict().values()} == {Tensor}
    file = io.BytesIO()
    torch.export.save(torch.export.export(ours, (x,)), file)
    assert b"BiasParameter" not in file.getvalue()
    without = nn.Sequential(nn.Linear(9, 2, bias=False)).eval()
    prepared = tc.prepare_fx(without, MAPPING, (x,))
    prepared(x)
    assert tc.convert_fx(prepared).get_submodule("0").bias() is None


def test_settings_and_what_is_gone(both: tuple[nn.Module, nn.Module, Tensor]) -> None:
    theirs, ours, _ = both
    assert (ours.conv1.stride, ours.conv1.out_channels, ours.fc.in_features) == ((2, 2), 8, 4)
    for name in ("bn1", "relu"):
        assert not hasattr(theirs, name)
        assert not hasattr(ours, name)
    with pytest.raises(ModuleAttributeError, match="'conv1' of the converted model is a view"):
        _ = ours.conv1.running_mean
    with pytest.raises(ModuleAttributeError, match="cannot be called"):
        ours.conv1(torch.randn(1, 3, 9, 9))


@pytest.mark.parametrize("path", ["fc", "block.0", "block"])
def test_a_module_put_where_a_view_stands_is_refused(
    path: str, both: tuple[nn.Module, nn.Module, Tensor]
) -> None:
    """FX would call it; no graph of ours does."""
    _, model, x = both
    expected = model(x)
    parent, name = model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]
    puts = (setattr, lambda module, key, value: module.add_module(key, value))
    for put in puts:
        with pytest.raises(ModuleAttributeError, match=rf"'{path}(\.0)?' is a view.*'{name}'"):
            put(parent, name, nn.Identity())
        put(parent, name, model.get_submodule(path))
    copied = copy.deepcopy(model)
    with pytest.raises(ModuleAttributeError, match="before prepare_fx"):
        copied.set_submodule(path, nn.Identity())
    model.added = nn.Identity()
    assert torch.equal(model(x), expected)
    del model.added


def test_views_hold_nothing(both: tuple[nn.Module, nn.Module, Tensor]) -> None:
    _, ours, x = both
    names = {name for name, _ in ours.named_parameters()} | {name for name, _ in ours.named_buffers()}
    assert {name for name in ours.state_dict() if not name.endswith("_extra_state")} == names
    assert names == {str(node.target) for node in ours.reference.graph.nodes if node.op == "get_attr"}, (
        "a view has a tensor that the graph does not read"
    )
    copied = copy.deepcopy(ours)
    assert list(copied.state_dict()) == list(ours.state_dict())
    assert torch.equal(copied(x), ours(x))
    state = {**ours.state_dict()}
    state["_extra_state"] = state["_extra_state"] * torch.tensor([2.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    copied.load_state_dict(state)
    assert copied.conv1.scale == pytest.approx(2 * ours.conv1.scale)
    assert "QuantizedConvReLU2d(3, 8, kernel_size=(3, 3), stride=(2, 2)" in str(ours)
    exported = torch.export.export(ours, (x,)).module()
    assert torch.allclose(exported(x), ours.reference(x))


def test_modules_are_instances_of_fxs_classes(both: tuple[nn.Module, nn.Module, Tensor]) -> None:
    classes = (nniq.ConvReLU2d, nnq.Conv2d, nnq.Linear, nn.Conv2d, nn.Linear, nn.ReLU)
    counts = [
        [sum(isinstance(module, one) for module in model.modules()) for one in classes] for model in both[:2]
    ]
    assert counts[0] == counts[1] == [2, 2, 1, 0, 0, 0]
    copied = copy.deepcopy(both[1])
    assert isinstance(copied.fc, nnq.Linear)
    assert type(copied.fc).__name__ == "QuantizedLinear"


def test_dynamo_finds_what_the_views_hold(both: tuple[nn.Module, nn.Module, Tensor]) -> None:
    """FX's classes have a method ``bias``, the views a parameter."""
    _, ours, x = both
    assert callable(nnq.Linear.bias)
    assert torch.equal(torch.compile(ours, backend="eager", fullgraph=True)(x), ours(x))


def test_a_state_answers_fxs_keys_and_has_its_own(both: tuple[nn.Module, nn.Module, Tensor]) -> None:
    theirs, ours = (model.state_dict() for model in both[:2])
    for key in ("conv1.scale", "conv1.weight", "fc.zero_point", "conv1_input_scale_0"):
        assert key not in ours
        assert torch.allclose(_plain(ours[key]), _plain(theirs[key]))
    for key in ("fc._packed_params._packed_params", "conv9.scale", "conv1_input_scale_7", "training"):
        with pytest.raises(KeyError, match=key) as raised:
            ours[key]
        assert "Hint: the module at a layer's path" in str(raised.value.__cause__)


def _plain(value: Tensor) -> Tensor:
    return (value.dequantize() if value.is_quantized else value).double()


def test_embedding_and_dynamic_linear() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Embedding(10, 4)
            self.decoder = nn.Linear(4, 10)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.decoder(self.encoder(tokens))

    tokens = torch.randint(10, (5, 2))
    dynamic = {"": None, "object_type": [(nn.Linear, default_dynamic_qconfig)]}
    float_encoder = tc.convert_fx(tc.prepare_fx(Words().eval(), dynamic, (tokens,)))
    assert float_encoder.encoder.weight.shape == (10, 4)
    assert type(float_encoder.decoder).__name__ == "DynamicQuantizedLinear"
    with pytest.raises(ModuleAttributeError):
        _ = float_encoder.decoder.scale
    rules = [*dynamic["object_type"], (nn.Embedding, float_qparams_weight_only_qconfig)]  # type: ignore[misc]
    quantized = tc.convert_fx(tc.prepare_fx(Words().eval(), {"": None, "object_type": rules}, (tokens,)))
    assert quantized.encoder.weight().dtype is torch.quint8


@pytest.fixture(scope="module")
def trained() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model, x = Net().train(), torch.randn(4, 3, 9, 9)
    both = []
    for prepare in (fx.prepare_qat_fx, tc.prepare_qat_fx):
        prepared = prepare(copy.deepcopy(model), get_default_qat_qconfig_mapping("x86"), (x,))
        prepared(x)
        both.append(prepared)
    return both[0], both[1]


@pytest.mark.parametrize("path", ["conv1", "block.0", "fc"])
@pytest.mark.parametrize("is_copy", [False, True])
def test_the_weight_fake_quantize_of_a_prepared_module_is_fxs(
    path: str, is_copy: bool, trained: tuple[nn.Module, nn.Module]
) -> None:
    theirs, ours = trained[0].get_submodule(path), trained[1]
    view = (copy.deepcopy(ours) if is_copy else ours).get_submodule(path)
    assert torch.allclose(view.weight_fake_quant.scale, theirs.weight_fake_quant.scale)
    assert (view.weight_fake_quant in set(ours.modules())) is not is_copy
    assert torch.equal(view.weight, theirs.weight)
    assert repr(view).startswith(f"{type(view).__name__}({view.extra_repr()}")


def test_qparams_by_fxs_names_are_fxs(both: tuple[nn.Module, nn.Module, Tensor]) -> None:
    torch.manual_seed(0)
    model, x = Net().eval(), torch.randn(4, 3, 9, 9)  # The model of ``both``.
    prepared = fx.prepare_fx(model, MAPPING, (x,))
    prepared(x)
    reference, ours = fx.convert_to_reference_fx(prepared), both[1]
    names = [name for name, _ in reference.named_buffers() if "_scale_" in name or "_zero_point_" in name]
    names = [name for name in names if "weight" not in name and not name.startswith("_")]
    assert {"conv1_input_scale_0", "conv1_scale_0", "block_0_zero_point_0"} <= {*names}
    for name in names:
        value, expected = getattr(ours, name), getattr(reference, name)
        assert value.shape == expected.shape
        assert value.dtype == expected.dtype
        assert value.item() == pytest.approx(expected.item(), rel=1e-6)


def test_what_has_no_qparams_by_fxs_name_is_told(both: tuple[nn.Module, nn.Module, Tensor]) -> None:
    ours = both[1]
    for name in ("bn1_scale_0", "conv1_input_scale_1", "_packed_weight_0"):
        assert not hasattr(ours, name)
        with pytest.raises(ModuleAttributeError, match=rf"{name}.*FX's graphs\.\nHint: .*explain"):
            getattr(ours, name)


def test_a_users_weight_fake_quantize_is_returned_as_the_user_made_it() -> None:
    qconfig = QConfig(
        default_fake_quant,
        _LearnableFakeQuantize.with_args(
            observer=MinMaxObserver,
            quant_min=-128,
            quant_max=127,
            dtype=torch.qint8,
            qscheme=torch.per_tensor_symmetric,
        ),
    )
    prepared = tc.prepare_qat_fx(
        Net().train(), QConfigMapping().set_global(qconfig), (torch.randn(4, 3, 9, 9),)
    )
    assert isinstance(prepared.fc.weight_fake_quant, _LearnableFakeQuantize)
    assert prepared.fc.weight_fake_quant.scale in set(prepared.parameters())


def test_views_of_a_prepared_model_hold_its_parameters_and_no_more(
    trained: tuple[nn.Module, nn.Module],
) -> None:
    ours = trained[1]
    assert ours.conv1.out_channels == 8
    assert not hasattr(ours.bn1, "weight_fake_quant")
    assert "(conv1): ConvBnReLU2d(3, 8, kernel_size=(3, 3), stride=(2, 2), bias=False)" in str(ours)
    read = {str(node.target) for node in ours.graph.nodes if node.op == "get_attr"}
    assert {name for name, _ in ours.named_parameters()} <= read
    assert list(copy.deepcopy(ours).state_dict()) == list(ours.state_dict())
    with pytest.raises(ModuleAttributeError, match="'fc' of the prepared model is a view of what was Linear"):
        _ = ours.fc.running_mean
    with pytest.raises(ModuleAttributeError, match="cannot be called"):
        ours.fc(torch.randn(1, 4))
    converted = tc.convert_fx(copy.deepcopy(ours).eval())
    assert not hasattr(converted, "bn1")
    assert not hasattr(converted.fc, "weight_fake_quant")


def by_class_of_batch_norm(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()


def by_fused_class(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, (nniqat.ConvBn2d, nniqat.ConvBnReLU2d)):
            module.freeze_bn_stats()


def by_fused_name(model: nn.Module) -> None:
    for module in model.modules():
        if type(module).__name__.startswith("ConvBn"):
            module.freeze_bn_stats()
    model.train()  # They stay frozen.


def by_path(model: nn.Module) -> None:
    model.conv1.bn.eval()


def by_fused_module(model: nn.Module) -> None:
    model.conv1.eval()


def frozen_and_thawed(model: nn.Module) -> None:
    model.conv1.freeze_bn_stats().update_bn_stats()


def with_momentum(momentum: float | None) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        model.conv1.bn.reset_running_stats()
        model.conv1.bn.momentum = momentum

    return change


@pytest.mark.parametrize(
    ("change", "moves"),
    [
        (by_class_of_batch_norm, False),
        (by_fused_class, False),
        (by_fused_name, False),
        (by_path, False),
        (by_fused_module, False),
        (frozen_and_thawed, True),
        (with_momentum(0.5), True),
        (with_momentum(None), True),
    ],
)
@pytest.mark.parametrize("is_copy", [False, True])
def test_loops_over_modules_switch_batch_norms_as_in_fx(
    change: Callable[[nn.Module], None], moves: bool, is_copy: bool, trained: tuple[nn.Module, nn.Module]
) -> None:
    means = []
    for model, name in zip(trained, ("conv1.bn", "bn1"), strict=True):
        prepared = copy.deepcopy(model).train()
        change(prepared)
        prepared = copy.deepcopy(prepared) if is_copy else prepared
        before = prepared.get_buffer(f"{name}.running_mean").clone()
        for seed in range(2):
            torch.manual_seed(seed)
            prepared(torch.randn(4, 3, 9, 9))
        means.append(prepared.get_buffer(f"{name}.running_mean"))
        assert torch.equal(means[-1], before) is not moves
    assert torch.allclose(means[0], means[1], atol=1e-6)


def test_one_batch_norm_is_frozen_and_the_others_train() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)) for _ in range(2)))
    x = torch.randn(4, 3, 5, 5)
    prepared = tc.prepare_qat_fx(model, get_default_qat_qconfig_mapping("x86"), (x,))
    convs, norms = ([prepared.get_submodule(f"{block}.{index}") for block in (0, 1)] for index in (0, 1))
    assert all(isinstance(conv, nniqat.ConvBn2d) and isinstance(conv, nn.Conv2d) for conv in convs)
    assert all(isinstance(norm, nn.BatchNorm2d) and not isinstance(norm, nn.Conv2d) for norm in norms)
    convs[0].freeze_bn_stats()  # type: ignore[operator]
    prepared.eval()
    prepared.get_submodule("0").train()
    assert not prepared(x).equal(prepared.train()(x))
    assert [int(norm.num_batches_tracked) for norm in norms] == [0, 1]  # type: ignore[arg-type]
    assert [norm.training for norm in norms] == [False, True]
    switches.freeze_bn_stats(convs[1])
    prepared(x)
    assert [int(norm.num_batches_tracked) for norm in norms] == [0, 1]  # type: ignore[arg-type]


def test_a_switched_batch_norm_is_so_in_a_compiled_model() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)).train()
    x = torch.randn(4, 3, 5, 5)
    prepared = tc.prepare_qat_fx(model, get_default_qat_qconfig_mapping("x86"), (x,))
    compiled, norm = torch.compile(prepared, backend="eager"), prepared.get_submodule("1")
    counts = []
    for mode in (True, False, True):
        norm.train(mode)
        compiled(x)
        counts.append(int(norm.num_batches_tracked))  # type: ignore[arg-type]
    assert counts == [1, 1, 2]


def test_a_module_prepared_without_training_has_no_weight_fake_quantize() -> None:
    x = torch.randn(4, 3, 9, 9)
    prepared = tc.prepare_fx(Net().eval(), MAPPING, (x,))
    assert not hasattr(prepared.fc, "weight_fake_quant")
    assert str(prepared.fc) == "Linear(in_features=4, out_features=2, bias=True)"
    view = prepared.fc
    view.note = 5
    assert view.note == 5


@pytest.mark.parametrize("kind", ["full_backward", "full_backward_pre"])
def test_a_hook_that_nothing_would_call_is_refused(
    kind: str, both: tuple[nn.Module, nn.Module, Tensor]
) -> None:
    _, converted, x = both
    prepared = tc.prepare_fx(Net().eval(), MAPPING, (x,))
    for model in (converted, prepared):
        with pytest.raises(ModuleAttributeError, match=r"a backward hook at 'conv1' would never be called"):
            getattr(model.conv1, f"register_{kind}_hook")(print)
    seen: list[str] = []
    prepared.register_forward_hook(lambda *_: seen.append("model"))
    prepared.activation_post_process_0.register_forward_hook(lambda *_: seen.append("observer"))
    prepared(x)
    assert seen == ["observer", "model"]
