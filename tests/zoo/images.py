"""Image and video models of torchvision and timm, as built by their packages, on small images."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tests.zoo.entry import Entry, Inputs

__all__ = ["image_models"]

#: Name -> (keywords of the builder, side length of the image, whether another length is tried).
TORCHVISION: dict[str, tuple[dict[str, Any], int, bool]] = {
    "resnet18": ({}, 64, True),
    "mobilenet_v2": ({}, 64, True),
    "mobilenet_v3_small": ({}, 64, True),
    "googlenet": ({"aux_logits": False, "init_weights": False}, 64, True),
    "shufflenet_v2_x0_5": ({}, 64, True),
    "squeezenet1_1": ({}, 64, True),
    "densenet121": ({}, 64, True),
    "efficientnet_b0": ({}, 64, True),
    "regnet_y_400mf": ({}, 64, True),
    "mnasnet0_5": ({}, 64, True),
    "convnext_tiny": ({}, 64, True),
    "swin_t": ({}, 64, True),
    "swin_v2_t": ({}, 64, True),
    "resnext50_32x4d": ({}, 64, True),
}
TIMM: dict[str, tuple[dict[str, Any], int, bool]] = {
    "botnet26t_256": ({"img_size": 64}, 64, False),
    "nf_resnet26": ({}, 64, True),
    "mobilenetv4_conv_small": ({}, 64, True),
    "hardcorenas_a": ({}, 64, True),
    "fbnetc_100": ({}, 64, True),
    "levit_128s": ({"img_size": 64}, 64, False),
    "poolformer_s12": ({}, 64, True),
    "mobilevit_xxs": ({}, 64, False),
    "resnetv2_50": ({"layers": (1, 1, 1, 1)}, 64, True),
    "resnetv2_50x1_bit": ({}, 64, True),
}
CLASSES = 10


def image(batch: int, height: int, width: int) -> Inputs:
    return (torch.randn(batch, 3, height, width),)


def image_models() -> Iterator[Entry]:
    for name, (keywords, side, is_free) in TORCHVISION.items():
        yield _entry(
            name, "torchvision.models", _torchvision(name, num_classes=CLASSES, **keywords), side, is_free
        )
    for name, (keywords, side, is_free) in TIMM.items():
        yield _entry(name, "timm", _timm(name, num_classes=CLASSES, **keywords), side, is_free)
    yield _entry("mixer_small", "timm.models.mlp_mixer", _mixer, 64, False)
    yield _entry("vit_small", "torchvision.models.VisionTransformer", _vit, 64, False)
    yield _entry("maxvit_small", "torchvision.models.MaxVit", _maxvit, 64, False)
    yield _entry("lraspp_mobilenet_v3_large", "torchvision.models.segmentation", _lraspp, 64, True)
    yield Entry(
        "r3d_18",
        "torchvision.models.video",
        _r3d,
        lambda batch, frames, side: (torch.randn(batch, 3, frames, side, side),),
        {"batch": 2, "frames": 8, "side": 32},
        ({"batch": 1}, {"frames": 4}, {"side": 48}),
    )


def _entry(name: str, source: str, make: Callable[[], nn.Module], side: int, is_free: bool) -> Entry:
    others = ({"batch": 1}, {"batch": 5}, *([{"height": side + 32, "width": side + 16}] if is_free else []))
    return Entry(name, source, make, image, {"batch": 2, "height": side, "width": side}, others)


def _torchvision(name: str, **keywords: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import torchvision

        return torchvision.models.get_model(name, weights=None, **keywords)

    return make


def _timm(name: str, **keywords: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import timm

        return timm.create_model(name, pretrained=False, **keywords)

    return make


def _vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(64, 16, 3, 4, 64, 128, num_classes=CLASSES)


def _maxvit() -> nn.Module:
    from torchvision.models import MaxVit

    return MaxVit((64, 64), 16, 2, [16, 32], [1, 1], 16, 0.0, num_classes=CLASSES)


def _mixer() -> nn.Module:
    from timm.models.mlp_mixer import MlpMixer

    return MlpMixer(num_classes=CLASSES, img_size=64, patch_size=16, num_blocks=3, embed_dim=64)


def _lraspp() -> nn.Module:
    from torchvision.models.segmentation import lraspp_mobilenet_v3_large

    return lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=4)


def _r3d() -> nn.Module:
    from torchvision.models.video import r3d_18

    return r3d_18(weights=None, num_classes=CLASSES)
