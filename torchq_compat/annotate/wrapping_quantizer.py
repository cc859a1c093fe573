"""A Quantizer around another one: what it does not say itself, the other one says."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule
from torchao.quantization.pt2e.quantizer import Quantizer

__all__ = ["WrappingQuantizer"]


class WrappingQuantizer(Quantizer):  # type: ignore[misc]
    """Hands every question of torchao's prepare on to ``quantizer``; subclasses add to the answers."""

    def __init__(self, quantizer: Quantizer) -> None:
        super().__init__()
        self.quantizer = quantizer

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        transformed: GraphModule = self.quantizer.transform_for_annotation(model)
        return transformed

    def annotate(self, model: GraphModule) -> GraphModule:
        annotated: GraphModule = self.quantizer.annotate(model)
        return annotated

    def validate(self, model: GraphModule) -> None:
        self.quantizer.validate(model)

    def prepare_obs_or_fq_callback(self, model: GraphModule, observers: dict[Any, Any]) -> None:
        self.quantizer.prepare_obs_or_fq_callback(model, observers)
