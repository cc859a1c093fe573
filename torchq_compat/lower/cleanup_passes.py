"""Drop pairs of operators that cancel from an exported program, so that a backend finds its patterns."""

from __future__ import annotations

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from torchq_compat.qspecs.qdq import DEQUANTIZE, QUANTIZE
from torchq_compat.qspecs.qparams import PerTensorQParams

__all__ = ["clean_up"]

TRANSPOSE = torch.ops.aten.transpose.int


def clean_up(program: ExportedProgram) -> None:
    """Drop the operators of ``program`` that change no bit."""
    _drop_repeated_quantization(program.graph)
    _drop_double_transposes(program.graph)
    program.graph.eliminate_dead_code()
    program.graph_module.recompile()


def _drop_repeated_quantization(graph: Graph) -> None:
    """Replace a dequantize and a quantize after it, with equal qparams, by the integers before both."""
    for node in graph.find_nodes(op="call_function", target=QUANTIZE):
        source = node.args[0]
        if isinstance(source, Node) and _is_repeated(node, source):
            _read_instead(node, source.args[0])


def _is_repeated(quantize: Node, source: Node) -> bool:
    if source.target is not DEQUANTIZE or source.kwargs:
        return False
    qparams = PerTensorQParams.of_node(quantize)
    return qparams.is_kept_by_float32 and qparams == PerTensorQParams.of_node(source)


def _drop_double_transposes(graph: Graph) -> None:
    for node in graph.find_nodes(op="call_function", target=TRANSPOSE):
        source = node.args[0]
        if isinstance(source, Node) and source.target is TRANSPOSE and source.args[1:] == node.args[1:]:
            _read_instead(node, source.args[0])


def _read_instead(node: Node, other: object) -> None:
    """Replace ``node`` by ``other``, except in the output: the program's signature names its results."""
    assert isinstance(other, Node)
    node.replace_all_uses_with(other, delete_user_cb=lambda user: user.op != "output")
