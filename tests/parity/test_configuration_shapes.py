"""What legacy scripts do around prepare and convert: parts prepared separately, attributes preserved."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.ao.quantization.quantize_fx as fx
from torch import Tensor, nn
from torch.ao.quantization import get_default_qconfig_mapping
from torch.ao.quantization.fx.custom_config import ConvertCustomConfig, FuseCustomConfig, PrepareCustomConfig

import torchq_compat as tc
from tests.helpers.oracle import calibrate
from tests.parity.models import MODELS


def detector() -> nn.Module:
    torch.manual_seed(0)
    return MODELS["detector"].make().eval()


def quantize_parts(engine: Any, model: nn.Module, batch: tuple[Tensor, ...]) -> nn.Module:
    """Prepare and convert each quantizable part in its place, as d2go's default does."""
    mapping = get_default_qconfig_mapping("qnnpack")
    features = model.backbone(*batch)
    examples = {"backbone": batch, "roi_heads": (torch.nn.functional.adaptive_max_pool2d(features, 4),)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, example in examples.items():
            setattr(model, name, engine.prepare_fx(getattr(model, name), mapping, example))
        calibrate(model, [batch])
        for name in examples:
            setattr(model, name, engine.convert_to_reference_fx(getattr(model, name)))
    return model


def test_parts_prepared_and_converted_apart() -> None:
    batch = MODELS["detector"].batch()
    theirs, ours = (quantize_parts(engine, detector(), batch) for engine in (fx, tc))
    with torch.no_grad():
        for mine, reference, exact in zip(ours(*batch), theirs(*batch), detector()(*batch), strict=True):
            step = float(reference.max() - reference.min()) / 255
            assert float(((mine - reference).abs() <= 1.01 * step).float().mean()) >= 0.999
            assert not torch.equal(mine, exact)


class WithAttributes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.vocabulary = {"a": 1}
        self.image_size = 32

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


NAMES = ["vocabulary", "image_size"]


@pytest.mark.parametrize("as_dict", [False, True], ids=["object", "dict"])
def test_preserved_attributes_survive_fuse_prepare_deepcopy_and_convert(as_dict: bool) -> None:
    def config(kind: Any) -> Any:
        return {"preserved_attributes": NAMES} if as_dict else kind().set_preserved_attributes(NAMES)

    def attributes(model: Any) -> list[Any]:
        return [model.vocabulary, model.image_size]

    x = torch.randn(3, 4)
    kept = [{"a": 1}, 32]
    fused = tc.fuse_fx(WithAttributes().eval(), config(FuseCustomConfig))
    assert attributes(fused) == kept
    prepared = tc.prepare_fx(fused, get_default_qconfig_mapping("x86"), (x,), config(PrepareCustomConfig))
    copied = copy.deepcopy(prepared)
    assert attributes(prepared) == attributes(copied) == kept
    copied(x)
    converted = tc.convert_fx(copied, config(ConvertCustomConfig))
    assert attributes(converted) == attributes(copy.deepcopy(converted)) == kept
    copied.image_size = 64
    assert tc.convert_fx(copied).image_size == 64, "what the script set on the prepared model"
    assert prepared.image_size == 32


def test_attributes_nobody_asked_to_preserve_are_reported() -> None:
    prepared = tc.prepare_fx(
        WithAttributes().eval(),
        get_default_qconfig_mapping("x86"),
        (torch.randn(3, 4),),
        PrepareCustomConfig().set_preserved_attributes(["image_size"]),
    )
    assert not hasattr(prepared, "vocabulary")
    assert tc.explain(prepared).find("vocabulary")[0].action == "dropped"


def test_in_place_arithmetic_is_seen_by_later_readers() -> None:
    """FX traces ``y += x`` out of place, so other names miss it; here the float model is the reference."""

    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.fc(x)
            z = y
            y += x
            return z * 2

    torch.manual_seed(0)
    model, x = InPlace().eval(), torch.randn(64, 4)
    prepared = tc.prepare_fx(model, get_default_qconfig_mapping("qnnpack"), (x,))
    torch.testing.assert_close(prepared(x), model(x))
    converted = tc.convert_fx(prepared)
    step = float(model(x).max() - model(x).min()) / 255
    assert float((converted(x) - model(x)).abs().max()) < 3 * step
