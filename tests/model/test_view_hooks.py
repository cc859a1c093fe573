"""Forward hooks at modules of prepared and converted models, beside FX's."""

from __future__ import annotations

import copy
import gc
import warnings
from typing import Any

import pytest
import torch
import torch.ao.quantization.quantize_fx as fx
from torch import Tensor, nn
from torch.ao.quantization import get_default_qat_qconfig_mapping, get_default_qconfig_mapping

import torchq_compat as tc
from tests.helpers.once import made_once
from torchq_compat.errors import ModuleAttributeError
from torchq_compat.model.view_hooks import HOOKED

Seen = dict[str, list[tuple[tuple[Tensor, ...], Tensor]]]
PATHS = ("conv1", "conv2", "act", "norm", "fc", "out")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn, self.relu = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
        self.conv2, self.act, self.norm = nn.Conv2d(8, 8, 3), nn.Hardswish(), nn.GroupNorm(2, 8)
        self.fc, self.out = nn.Linear(8, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.norm(self.act(self.conv2(self.relu(self.bn(self.conv1(x))))))
        return {"logits": self.out(self.fc(x.mean((2, 3))))}


def watch(model: nn.Module, seen: Seen, paths: tuple[str, ...] = PATHS) -> list[Any]:
    def keep(path: str) -> Any:
        return lambda module, args, result: seen.setdefault(path, []).append((args, result))

    return [model.get_submodule(path).register_forward_hook(keep(path)) for path in paths]


@made_once
def on(name: str, *, is_qat: bool = False) -> tuple[Any, Any, Tensor]:
    """Return a prepared model, it converted and the input of both, equal for "fx" and "ours"."""
    side: Any = fx if name == "fx" else tc
    torch.manual_seed(0)
    model, x = Net().train(is_qat), torch.randn(4, 3, 9, 9)
    mapping = get_default_qat_qconfig_mapping("x86") if is_qat else get_default_qconfig_mapping("x86")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = (side.prepare_qat_fx if is_qat else side.prepare_fx)(model, mapping, (x,))
        prepared(x)
        return prepared, side.convert_fx(copy.deepcopy(prepared).eval()), x


def floats(value: Tensor) -> Tensor:
    return value.dequantize() if value.is_quantized else value


def test_converted_as_in_fx() -> None:
    (_, ours, x), (_, theirs, _) = on("ours"), on("fx")
    mine, expected = Seen(), Seen()
    handles = watch(ours, mine)
    watch(theirs, expected)
    plain = ours(x)["logits"]
    theirs(x)
    assert mine.keys() == expected.keys() == set(PATHS)
    for path in PATHS:
        ((args, result),), ((fx_args, fx_result),) = mine[path], expected[path]
        assert len(args) == len(fx_args) == 1
        for one, other in ((args[0], fx_args[0]), (result, fx_result)):
            assert one.dtype == other.dtype or path == "norm"  # It runs in floats here.
            step = other.q_scale() if other.is_quantized else 1e-2
            assert float((floats(one) - floats(other)).abs().max()) < 2.01 * step
            assert float(floats(one).std()) > 0
    assert mine["conv1"][0][1].dtype is torch.quint8
    for handle in handles:
        handle.remove()
    assert torch.equal(ours(x)["logits"], plain)
    assert all(len(calls) == 1 for calls in mine.values())
    assert not any("hook" in str(node.target) for node in ours.graph.nodes)


@pytest.mark.parametrize("is_qat", [False, True])
def test_prepared_sees_what_the_modules_compute(is_qat: bool) -> None:
    prepared, _, x = on("ours", is_qat=is_qat)
    seen = Seen()
    watch(prepared, seen)
    result = prepared(x)["logits"]
    ((conv_args, conv),), ((out_args, out),) = seen["conv1"], seen["out"]
    assert conv_args[0].shape == x.shape
    assert conv.shape == (4, 8, 7, 7)
    assert out_args[0].shape == (4, 4)
    assert float((out - result).abs().max()) < 0.02
    if is_qat:
        out.sum().backward()
        assert prepared.get_parameter("conv1.weight").grad is not None


def test_reference_and_copies() -> None:
    _, converted, x = on("ours")
    seen = Seen()
    watch(converted, seen, ("fc",))
    converted.reference(x)
    assert seen["fc"][0][1].dtype is torch.float32
    copied = copy.deepcopy(converted)
    copied(x)
    assert len(seen["fc"]) == 2
    converted.load_state_dict(copied.state_dict())
    converted.eval()
    converted(x)
    assert len(seen["fc"]) == 3
    exported = tc.export(converted, (x,))
    exported.module()(x)
    assert len(seen["fc"]) == 3


def test_a_module_called_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(torch.relu(self.fc(x)))

    model, x = Twice().eval(), torch.randn(8, 4)
    prepared = tc.prepare_fx(model, get_default_qconfig_mapping("x86"), (x,))
    prepared(x)
    converted, seen = tc.convert_fx(prepared), Seen()
    watch(converted, seen, ("fc",))
    result = converted(x)
    assert len(seen["fc"]) == 2
    assert torch.equal(seen["fc"][1][1].dequantize(), result)
    assert not torch.equal(seen["fc"][0][1].dequantize(), result)


def test_what_hooks_return_and_raise() -> None:
    _, converted, x = on("ours")
    before = converted(x)["logits"]
    handle = converted.fc.register_forward_hook(
        lambda module, args, kwargs, result: torch.quantize_per_tensor(
            torch.zeros(result.shape), result.q_scale(), result.q_zero_point(), torch.quint8
        ),
        with_kwargs=True,
    )
    changed = converted(x)["logits"]
    assert not torch.equal(changed, before)
    assert float(changed.std(0).max()) == 0
    handle.remove()
    assert torch.equal(converted(x)["logits"], before)

    def stop(module: nn.Module, args: Any) -> None:
        raise ValueError("seen enough")

    handle = converted.fc.register_forward_pre_hook(stop)
    with pytest.raises(ValueError, match="seen enough"):
        converted(x)
    handle.remove()
    handle = converted.fc.register_forward_pre_hook(lambda module, args: args)
    with pytest.raises(ModuleAttributeError, match="returns other inputs"):
        converted(x)
    handle.remove()
    assert torch.equal(converted(x)["logits"], before)


def test_models_that_are_gone_are_forgotten() -> None:
    _, converted, _ = on("ours")
    converted.fc.register_forward_hook(print)
    others = len(HOOKED)
    assert others > 0
    del converted
    for generation in (1, 2):  # A model of now is found at once; all objects of all tests take a second.
        gc.collect(generation)
        if len(HOOKED) < others:
            break
    assert len(HOOKED) < others
