"""Models that FX calibrates or trains, saves and converts; and the models made from their states here."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.ao.quantization.quantize_fx as fx
from torch import Tensor, nn
from torch.fx import GraphModule

import torchq_compat as tc
from tests.helpers.histograms import searched_in_arrays
from tests.helpers.oracle import activation_qparams, fx_activation_qparams, leaves
from tests.parity.comparison import converted_outputs, same_outputs, same_qparams, with_statistics
from tests.parity.configs import BACKENDS, MAPPINGS, QAT_MAPPINGS
from tests.parity.models import MODELS
from torchq_compat.checkpoints import load_fx_state

__all__ = ["DEFAULT", "SLOW", "Saved", "differences_of", "saved_by_fx", "saved_from"]

DEFAULT = ("resnet/x86", "arithmetic/x86", "embedding/embeddings_and_static", "conv2_bn_relu/qat_fbgemm")
SLOW = tuple(
    f"{model}/{mapping}"
    for models, mappings in (
        ("inverted_residual squeeze_excite inception conv_front inplace_arithmetic norms", "x86"),
        ("two_inputs shapes", "x86"),
        ("conv1_bn_relu conv3_bn conv1_relu linear_bn bn_relu", "x86"),
        ("conv_front", "symmetric moving_average histogram own_eps per_channel_symmetric_qnnpack"),
        ("linear_relu", "dynamic per_channel_dynamic"),
        ("embedding_bag", "weight_only_embeddings embeddings_and_dynamic"),
        ("conv1_bn conv3_bn linear_relu", "qat_fbgemm"),
        ("inception", "qat_qnnpack"),
    )
    for model in models.split()
    for mapping in mappings.split()
)


@dataclass(frozen=True)
class Saved:
    """A model of FX.

    Attributes:
        float_model: its float model with other weights: all weights have to come from the state.
        mapping: makes the QConfigMapping.
        reference: FX's converted reference model.
        lowered: FX's converted model, kept because its state does not own the scales of its embeddings:
            torch.ops.quantized.embedding_bag_unpack leaves them in the memory of the packed weight.
        states: by the form of the model that they were saved from.
    """

    float_model: nn.Module
    mapping: Any
    batches: list[tuple[Any, ...]]
    is_qat: bool
    reference: GraphModule
    lowered: GraphModule | None
    states: Mapping[str, Mapping[str, Any]]

    def prepared(self) -> GraphModule:
        """Return the model prepared here, uncalibrated."""
        return copy.deepcopy(self._prepared)

    @cached_property
    def _prepared(self) -> GraphModule:
        prepare = tc.prepare_qat_fx if self.is_qat else tc.prepare_fx
        with warnings.catch_warnings():
            # Warnings that a size is free only under conditions of the model's code are not tested here.
            warnings.simplefilter("ignore")
            return prepare(
                copy.deepcopy(self.float_model),
                self.mapping(),
                self.batches[0],
                backend_config=BACKENDS["default"](),
            )


def saved_by_fx(pair: str) -> Saved:
    """Return the pair ``model/mapping`` of the parity corpus, through FX."""
    torch.manual_seed(0)
    name, mapping = pair.split("/")
    entry, is_qat = MODELS[name], mapping in QAT_MAPPINGS
    make_mapping = {**MAPPINGS, **QAT_MAPPINGS}[mapping]
    return saved_from(entry.make(), make_mapping, [entry.batch() for _ in range(3)], is_qat)


def saved_from(
    model: nn.Module,
    make_mapping: Callable[[], Any],
    batches: list[tuple[Any, ...]],
    is_qat: bool = False,
    lowered: bool = True,
) -> Saved:
    """Calibrate or train ``model`` by FX.

    Args:
        lowered: whether FX can lower it.
    """
    model = with_statistics(model).train(is_qat)
    with warnings.catch_warnings(), torch.no_grad(), searched_in_arrays():
        warnings.simplefilter("ignore")
        prepared = (fx.prepare_qat_fx if is_qat else fx.prepare_fx)(
            copy.deepcopy(model), make_mapping(), batches[0], backend_config=BACKENDS["default"]()
        )
        for batch in batches:
            prepared(*batch)
        prepared.eval()
        reference = fx.convert_to_reference_fx(copy.deepcopy(prepared))
        made = fx.convert_fx(copy.deepcopy(prepared)) if lowered else None
    states = {"prepared": prepared.state_dict(), "reference": reference.state_dict()}
    if made is not None:
        states["lowered"] = made.state_dict()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return Saved(model, make_mapping, batches, is_qat, reference, made, states)


def differences_of(saved: Saved, form: str, *, observer_qparams: bool = False) -> set[str]:
    """Return how the model made here from that state differs from FX's: "qparams", "outputs", or nothing."""
    prepared = saved.prepared()
    load_fx_state(prepared, saved.states[form])
    converted = tc.convert_to_reference_fx(prepared.eval(), observer_qparams=observer_qparams)
    found = set()
    if not same_qparams(fx_activation_qparams(saved.reference), activation_qparams(converted), 1e-6):
        found.add("qparams")
    with torch.no_grad():
        ours = leaves(converted(*saved.batches[0]))
    if not same_outputs(converted_outputs(saved.reference, saved.batches[0]), ours):
        found.add("outputs")
    return found


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of all tensors of a state."""
    return {name: value.clone() for name, value in model.state_dict().items() if isinstance(value, Tensor)}
