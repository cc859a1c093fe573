"""A Quantizer around another one: what it does not say itself, the other one says."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule
from torchao.quantization.pt2e.quantizer import Quantizer

__all__ = ["OuterGraphQuantizer", "WrappingQuantizer"]


class WrappingQuantizer(Quantizer):  # type: ignore[misc]
    """Hands every question of torchao's prepare on to ``quantizer``; subclasses add to the answers."""

    def __init__(self, quantizer: Quantizer) -> None:
        super().__init__()
        self.quantizer = quantizer

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        transformed: GraphModule | None = self.quantizer.transform_for_annotation(model)
        return model if transformed is None else transformed

    def annotate(self, model: GraphModule) -> GraphModule:
        annotated: GraphModule | None = self.quantizer.annotate(model)
        # torchao goes on with the graph it handed in; some Quantizers return nothing.
        return model if annotated is None else annotated

    def validate(self, model: GraphModule) -> None:
        self.quantizer.validate(model)

    def prepare_obs_or_fq_callback(self, model: GraphModule, observers: dict[Any, Any]) -> None:
        self.quantizer.prepare_obs_or_fq_callback(model, observers)


class OuterGraphQuantizer(WrappingQuantizer):
    """Answers for the graph that comes first. torchao asks about the bodies of scans and while loops in it
    next; they stay float: observers inside of them cannot be run where something is trained, nor be
    converted."""

    def __init__(self, quantizer: Quantizer) -> None:
        super().__init__(quantizer)
        self._is_inside = False

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        return model if self._is_inside else super().transform_for_annotation(model)

    def annotate(self, model: GraphModule) -> GraphModule:
        return model if self._is_inside else super().annotate(model)

    def validate(self, model: GraphModule) -> None:
        if not self._is_inside:
            super().validate(model)

    def prepare_obs_or_fq_callback(self, model: GraphModule, observers: dict[Any, Any]) -> None:
        if not self._is_inside:
            super().prepare_obs_or_fq_callback(model, observers)
        self._is_inside = True
