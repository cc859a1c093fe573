"""Quantizers as users write them: of every arithmetic op, and of functions of the nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.observer import MinMaxObserver
from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, QuantizationSpec, Quantizer

from tests.helpers.oracle import calibrate

ATEN = torch.ops.aten
ARITHMETIC = (
    ATEN.linear.default,
    ATEN.add.Tensor,
    ATEN.mul.Tensor,
    ATEN.relu.default,
    ATEN.sigmoid.default,
    ATEN.tanh.default,
)


def int8_spec(observer: Any = MinMaxObserver, qscheme: Any = torch.per_tensor_affine) -> QuantizationSpec:
    return QuantizationSpec(torch.int8, observer, -128, 127, qscheme)


def annotate(node: Node, inputs: dict[Any, Any] | None = None, output: Any = None) -> None:
    """Annotate by hand, as the tutorials do."""
    node.meta["quantization_annotation"] = QuantizationAnnotation(
        input_qspec_map=inputs or {}, output_qspec=output, _annotated=True
    )


class ByHand(Quantizer):
    """Calls ``write`` on every node; validates nothing."""

    def __init__(self, write: Callable[[Node], object]) -> None:
        super().__init__()
        self.write = write

    def annotate(self, model: GraphModule) -> GraphModule:
        for node in list(model.graph.nodes):
            self.write(node)
        return model

    def validate(self, model: GraphModule) -> None:
        pass


def of_arithmetic() -> ByHand:
    """8 bits at the inputs, weights and outputs of every arithmetic op."""

    def write(node: Node) -> None:
        if node.target in ARITHMETIC:
            # A bias stays float.
            inputs = node.all_input_nodes[:2]
            annotate(node, dict.fromkeys(inputs, int8_spec()), int8_spec())

    return ByHand(write)


def prepared_by_torchao(
    model: nn.Module, quantizer: Quantizer, batches: list[Any], *, strict: bool = False
) -> GraphModule:
    """Prepare ``model`` by torch.export and torchao's own prepare, and calibrate it."""
    prepared: GraphModule = prepare_pt2e(
        torch.export.export(model, batches[0], strict=strict).module(), quantizer
    )
    calibrate(prepared, batches)
    return prepared
