"""The support table covers all of torch.ao, and the committed page is the generated one."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path

import torch.ao.quantization.fake_quantize as fake_quantize
import torch.ao.quantization.observer as observer
import torch.ao.quantization.quantize_fx as fx
from torch.ao.quantization import QConfigMapping
from torch.ao.quantization.backend_config import (
    BackendConfig,
    BackendPatternConfig,
    DTypeWithConstraints,
    ObservationType,
)
from torch.ao.quantization.fx.custom_config import ConvertCustomConfig, FuseCustomConfig, PrepareCustomConfig

from migration.generate.support_table import Status, features, support_page

GUIDE = Path(__file__).parents[2] / "migration"
CONFIGS = (
    BackendConfig,
    BackendPatternConfig,
    ConvertCustomConfig,
    FuseCustomConfig,
    PrepareCustomConfig,
    QConfigMapping,
)
FUNCTIONS = (fx.prepare_fx, fx.convert_fx, fx.fuse_fx)


def fx_features() -> Iterator[str]:
    """What FX supports, read from torch.ao."""
    for config in CONFIGS:
        for name in vars(config):
            if name.startswith(("set_", "_set_", "add_")):
                yield f"{config.__name__}.{name}"
    for function in FUNCTIONS:
        parameters = list(inspect.signature(function).parameters)
        yield from (f"{function.__name__}: {name}" for name in parameters if function is not fx.fuse_fx)
        yield from (f"fuse_fx: {name}" for name in parameters[1:] if function is fx.fuse_fx)
    for home, base in (
        (observer, observer.ObserverBase),
        (fake_quantize, fake_quantize.FakeQuantizeBase),
    ):
        for name, found in vars(home).items():
            is_class = inspect.isclass(found) and issubclass(found, base) and found.__name__ == name
            if is_class and not name.endswith("Base"):
                yield name
    yield from (f"ObservationType.{kind.name}" for kind in ObservationType)
    yield from (f"DTypeWithConstraints.{field.name}" for field in dataclasses.fields(DTypeWithConstraints))


def test_every_feature_of_fx_has_a_row() -> None:
    assert set(fx_features()) - {feature.name for feature in features()} == set()


def test_what_differs_or_is_refused_says_how_or_why() -> None:
    assert all(feature.note for feature in features() if feature.status is not Status.SUPPORTED)
    names = [feature.name for feature in features()]
    assert len(names) == len(set(names))


def test_the_committed_page_is_the_generated_one() -> None:
    page = support_page(GUIDE / "known_differences.toml", GUIDE / "quantizers.json")
    assert (GUIDE / "support.md").read_text() == page, "python -m migration.generate"


def test_the_guide_points_to_the_page() -> None:
    assert "](support.md)" in (GUIDE / "README.md").read_text()
