"""144 states of FX: twelve kinds of models, two engines, calibrated and trained, saved from three stages."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.quantization import get_default_qat_qconfig_mapping, get_default_qconfig_mapping
from torch.ao.quantization.qconfig import (
    default_embedding_qat_qconfig,
    default_embedding_qat_qconfig_4bit,
    float_qparams_weight_only_qconfig,
    float_qparams_weight_only_qconfig_4bit,
)

import torchq_compat as tc
from tests.fx_state.more_models import Patches, TokensAndMask
from tests.fx_state.pairs import Saved, differences_of, saved_from
from tests.parity.models import MODELS
from torchq_compat.checkpoints import load_fx_state
from torchq_compat.errors import CheckpointError
from torchq_compat.support.quantized_tensors import using_engine


def transposed() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.ConvTranspose2d(8, 4, 3, 2), nn.Conv2d(4, 2, 1))


def transposed_bn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ConvTranspose2d(8, 4, 3, 2), nn.BatchNorm2d(4), nn.ReLU())


class NormOfAPackage(nn.BatchNorm2d):
    """FX folds torch.nn's own class alone; it traces into modules of other packages."""

    __module__ = "torch.nn.of_a_package"


def image() -> tuple[Any, ...]:
    return (torch.randn(4, 3, 10, 10),)


def tokens() -> tuple[Any, ...]:
    return torch.randint(0, 30, (2, 5)), torch.arange(5).expand(2, 5).contiguous(), torch.ones(2, 5)


NAMES = [
    "resnet",
    "inverted_residual",
    "inception",
    "conv1_bn_relu",
    "linear_relu",
    "arithmetic",
    "embedding",
    "embedding_bag",
]
KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]] = {
    **{name: (MODELS[name].make, MODELS[name].batch) for name in NAMES},
    "transposed": (transposed, image),
    "transposed_bn": (transposed_bn, image),
    "patches": (Patches, lambda: (torch.randn(2, 3, 16, 16),)),
    "tokens": (TokensAndMask, tokens),
}
#: Engine -> the bits of embeddings and of bags.
ENGINES = {"fbgemm": (8, 4), "qnnpack": (4, 8)}
FORMS = ("prepared", "reference", "lowered")
DEFAULT = {("embedding", "fbgemm", True), ("embedding_bag", "fbgemm", True), ("transposed", "qnnpack", True)}
#: A dropout scales by 1 / (1 - p) in training. FX's lowered dropout hands its input on, and the state has no
#: scale for its result; the outputs are equal.
KNOWN = {("patches", engine, True, "lowered"): {"qparams"} for engine in ENGINES}


def mapping(engine: str, is_qat: bool) -> Any:
    made = get_default_qat_qconfig_mapping(engine) if is_qat else get_default_qconfig_mapping(engine)
    eight = default_embedding_qat_qconfig if is_qat else float_qparams_weight_only_qconfig
    four = default_embedding_qat_qconfig_4bit if is_qat else float_qparams_weight_only_qconfig_4bit
    for kind, bits in zip((nn.Embedding, nn.EmbeddingBag), ENGINES[engine], strict=True):
        made.set_object_type(kind, eight if bits == 8 else four)
    return made


def saved(kind: str, engine: str, is_qat: bool) -> Saved:
    torch.manual_seed(0)
    make, batch = KINDS[kind]
    with using_engine(engine):
        batches = [batch() for _ in range(3)]
        return saved_from(make(), lambda: mapping(engine, is_qat), batches, is_qat)


CELLS = list(itertools.product(KINDS, ENGINES, (False, True)))


@pytest.mark.parametrize(
    ("kind", "engine", "is_qat"),
    [pytest.param(*cell, marks=() if cell in DEFAULT else pytest.mark.slow) for cell in CELLS],
)
def test_equal(kind: str, engine: str, is_qat: bool) -> None:
    state = saved(kind, engine, is_qat)
    for form in FORMS:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", tc.QuantizationWarning)
            # FX converts to the qparams of the observers.
            found = differences_of(state, form, observer_qparams=True)
        assert found == KNOWN.get((kind, engine, is_qat, form), set()), form
        codes = {each.message.code for each in told if isinstance(each.message, tc.QuantizationWarning)}
        # FX trains the weights of transposed convolutions in floats.
        assert ("TQ431" in codes) == (is_qat and "transposed" in kind and form == "prepared")


def test_there_are_144() -> None:
    assert len(CELLS) * len(FORMS) == 144


def test_batch_norms_that_are_folded_here_alone_are_named() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), NormOfAPackage(8), nn.ReLU())
    state = saved_from(model, lambda: mapping("fbgemm", False), [image()])
    with pytest.raises(CheckpointError, match="fuse_as_fx=True"):
        load_fx_state(state.prepared(), state.states["prepared"])
