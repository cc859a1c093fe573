"""Quantizers that wrap another Quantizer."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule
from torchao.quantization.pt2e.quantizer import Quantizer

__all__ = ["OuterGraphQuantizer", "WrappingQuantizer"]


class WrappingQuantizer(Quantizer):  # type: ignore[misc]
    """A base class of Quantizers that forwards every call of torchao's prepare to ``quantizer``."""

    def __init__(self, quantizer: Quantizer) -> None:
        super().__init__()
        self.quantizer = quantizer

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        transformed: GraphModule | None = self.quantizer.transform_for_annotation(model)
        return model if transformed is None else transformed

    def annotate(self, model: GraphModule) -> GraphModule:
        annotated: GraphModule | None = self.quantizer.annotate(model)
        # torchao continues with the graph it passed; some Quantizers return None.
        return model if annotated is None else annotated

    def validate(self, model: GraphModule) -> None:
        self.quantizer.validate(model)

    def prepare_obs_or_fq_callback(self, model: GraphModule, observers: dict[Any, Any]) -> None:
        self.quantizer.prepare_obs_or_fq_callback(model, observers)


class OuterGraphQuantizer(WrappingQuantizer):
    """A Quantizer that annotates only the outer graph, for which torchao calls it first.

    torchao then calls it for the bodies of scans and while loops, which stay float: observers in them cannot
    run during training, and cannot be converted.
    """

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
