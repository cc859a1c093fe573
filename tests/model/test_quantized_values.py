"""The integers that an op reads, in graphs of any depth."""

from __future__ import annotations

import torch
from torch import nn
from torch.fx import Graph, GraphModule

from torchq_compat.model.quantized_interface import quantized_values
from torchq_compat.read.qdq import DEQUANTIZE, QUANTIZE

ATEN = torch.ops.aten


def test_a_way_to_the_input_that_is_longer_than_pythons_stack() -> None:
    graph, root = Graph(), nn.Module()
    root.weight = nn.Parameter(torch.ones(2, 2))
    value = graph.placeholder("x")
    for _ in range(3000):
        value = graph.call_function(ATEN.neg.default, (value,))
    weight = graph.call_function(ATEN.neg.default, (graph.get_attr("weight"),))
    for name in ("value", "weight"):
        qparams = (0.5, 3, 0, 255, torch.uint8)
        read = graph.call_function(QUANTIZE, (value if name == "value" else weight, *qparams))
        read = graph.call_function(DEQUANTIZE, (read, *qparams))
        value, weight = (read, weight) if name == "value" else (value, read)
    op = graph.call_function(ATEN.linear.default, (value, weight))
    graph.output(op)
    found = quantized_values(GraphModule(root, graph), op, "fc", (), ())
    assert [(each.path, each.role, each.scale) for each in found] == [
        ("fc.input", "input", 0.5),
        ("fc.weight", "weight", 0.5),
    ]
