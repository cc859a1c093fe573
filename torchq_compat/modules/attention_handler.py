"""The handler of nn.MultiheadAttention, which the stages call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from torchq_compat.annotate.observed_graph import ObserverFault
from torchq_compat.capture.call_layouts import CallLayout, input_labels
from torchq_compat.capture.opaque_calls import OpaqueBoundary, OpaqueModule
from torchq_compat.capture.opaque_stub import FakeCall
from torchq_compat.errors import CustomModuleError
from torchq_compat.fx_state.numbered import Wanted
from torchq_compat.fx_state.states import FxState
from torchq_compat.modules import parts_handler
from torchq_compat.modules.attention import (
    AttentionCall,
    AttentionModule,
    AttentionStructure,
    ConvertedMultiheadAttention,
    ObservedMultiheadAttention,
)
from torchq_compat.modules.parts import PartSpecs
from torchq_compat.modules.registry import ConvertRequest, ObserveRequest, WantedByModel, register
from torchq_compat.support.torch_ao import quantizable, quantized

LEGACY_OBSERVED = quantizable.MultiheadAttention
LEGACY_CONVERTED = quantized.MultiheadAttention
QUANTIZED_INPUTS = ("query", "key", "value")


class AttentionHandler(parts_handler.PartOwnerHandler):
    """The handler of nn.MultiheadAttention -> ObservedMultiheadAttention -> ConvertedMultiheadAttention."""

    lowers_graphs = True

    def takes(self, float_class: type[nn.Module], observed_class: type[nn.Module]) -> bool:
        return issubclass(float_class, nn.MultiheadAttention) and issubclass(observed_class, LEGACY_OBSERVED)

    def fake_call(self, module: nn.Module, path: str) -> FakeCall:
        assert isinstance(module, nn.MultiheadAttention)
        structure, appended = AttentionStructure.of(module), _appended(module)

        def fake(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
            call = AttentionCall.read(structure, path, args, kwargs)
            length, batch, _ = call.query.shape
            heads = () if call.average else (structure.num_heads,)
            shape = (batch, *heads, length, call.key.shape[0] + appended)
            weights = call.query.new_empty(shape) if call.need_weights else None
            return call.results(structure, torch.empty_like(call.query), weights)

        return fake

    def owns(self, opaque: nn.Module) -> bool:
        return isinstance(opaque, AttentionModule)

    def loses_forward(self, module: nn.Module) -> bool:
        return parts_handler.has_own_forward(module, nn.MultiheadAttention)

    def observe(self, request: ObserveRequest) -> OpaqueModule:
        attention = request.module
        assert isinstance(attention, nn.MultiheadAttention)
        parts_handler.warn_if_forward_overridden(attention, nn.MultiheadAttention, request.path)
        observed = parts_handler.observed_by_its_class(
            request,
            (ObservedMultiheadAttention, LEGACY_OBSERVED),
            lambda: ObservedMultiheadAttention.observe(attention, PartSpecs(request.specs)),
        )
        if not isinstance(observed, ObservedMultiheadAttention):
            raise CustomModuleError.not_observed_here(type(observed).__name__)
        observed.module_path = request.path
        return observed

    def boundary(self, opaque: OpaqueModule, request: ObserveRequest, layout: CallLayout) -> OpaqueBoundary:
        """Return a boundary that quantizes query, key and value, but not masks, which may hold -inf."""
        labels = input_labels(nn.MultiheadAttention, layout.inputs)
        spec = request.specs.activation
        inputs = tuple(spec if label in QUANTIZED_INPUTS else None for label in labels)
        return replace(super().boundary(opaque, request, layout), input_specs=inputs)

    def observer_faults(self, opaque: OpaqueModule) -> list[tuple[str, ObserverFault]]:
        """Return the faults, except unseen observers of returned weights if no call returns weights."""
        returned = any(layout.outputs.count() > 1 for layout in opaque.opaque_layouts)
        return [
            (name, fault)
            for name, fault in super().observer_faults(opaque)
            if returned or fault is not ObserverFault.UNSEEN or not name.startswith("returned_weights")
        ]

    def convert(self, request: ConvertRequest) -> OpaqueModule:
        made = parts_handler.converted_by_its_class(
            request,
            (ConvertedMultiheadAttention, LEGACY_CONVERTED),
            lambda: ConvertedMultiheadAttention.from_observed(request.observed),
        )
        if not isinstance(made, ConvertedMultiheadAttention):
            raise CustomModuleError.not_observed_here(type(made).__name__)
        return made

    def wanted_of_fx(
        self, opaque: OpaqueModule, state: FxState, prefix: str, wanted_by_model: WantedByModel
    ) -> Wanted:
        """Return the base class's; the observer of the scaled query is torch.ao's alone."""
        assert isinstance(opaque, AttentionModule)
        for name in ("in_proj_weight", "in_proj_bias"):
            state.forgive(
                f"{prefix}.{name}"
            )  # torch.ao's observed module has them still, beside linear_Q, K and V.
        wanted = Wanted(only_fx=(f"{prefix}.q_scaling_product.activation_post_process",))
        for path, graph in opaque.graphs():
            wanted += parts_handler.wanted_by_parts(graph, prefix).below(path)
        return wanted

    def mapping_hint(self, module: nn.Module) -> str | None:
        if not isinstance(module, nn.MultiheadAttention):
            return None
        return parts_handler.hint_to_map(nn.MultiheadAttention, "torch.ao.nn.quantizable.MultiheadAttention")


def _appended(module: nn.MultiheadAttention) -> int:
    """Return the number of keys that the module appends to its input keys."""
    return int(module.bias_k is not None) + int(module.add_zero_attn)


register(AttentionHandler())
