"""Prepares and converts a program whose recurrent operators are decomposed, in any shape."""

from __future__ import annotations

import copy

from torch import nn
from torch.fx import GraphModule
from torchao.quantization.pt2e.quantizer import Quantizer

from torchq_compat.custom_modules.recurrent.cell.cell_graph import CellGraphModule
from torchq_compat.errors import AtenLSTMError
from torchq_compat.exported_lstm.opaque import OpaqueRecurrent
from torchq_compat.exported_lstm.opaque_boundary import quantize_boundary
from torchq_compat.exported_lstm.scan_weights import hoist_weights
from torchq_compat.exported_lstm.shared_steps import SharedStepsQuantizer
from torchq_compat.graph.observed_graph import observer_nodes
from torchq_compat.support import metadata
from torchq_compat.support.argument_checks import checked_arguments, instance_of
from torchq_compat.support.torchao_flow import convert_pt2e, prepare_pt2e

__all__ = ["convert_decomposed_lstm", "prepare_decomposed_lstm"]


@checked_arguments(
    model=instance_of(GraphModule), quantizer=instance_of(Quantizer, what="a torchao Quantizer")
)
def prepare_decomposed_lstm(model: GraphModule, quantizer: Quantizer) -> GraphModule:
    """Insert the observers that ``quantizer`` requests, one per part of a cell, shared by all time steps.

    Legacy: ``prepare_pt2e(model, quantizer)``, which this function calls. By itself torchao does not prepare
    submodules, and gives every unrolled step its own observers. Here ``quantizer`` annotates the graph and
    each cell.

    Args:
        model: the result of ``decompose_lstm`` or ``decompose_recurrent``; it is not changed.
        quantizer: any torchao Quantizer. Nodes that move values between steps and layers are not quantized.

    Returns:
        The observed model, called like ``model``.

    Example:
        >>> import torch
        >>> from torch.ao.quantization import get_default_qconfig_mapping
        >>> from torchq_compat import quantizer_from
        >>> from torchq_compat.lstm_utils import decompose_lstm, prepare_decomposed_lstm
        >>> x = torch.randn(5, 2, 4)
        >>> decomposed = decompose_lstm(torch.export.export(torch.nn.LSTM(4, 8).eval(), (x,)))
        >>> prepared = prepare_decomposed_lstm(decomposed, quantizer_from(get_default_qconfig_mapping("x86")))
        >>> prepared(x)[0].shape
        torch.Size([5, 2, 8])
    """
    prepared: GraphModule = prepare_pt2e(copy.deepcopy(model), SharedStepsQuantizer(quantizer))
    for _, module in _opaque_modules(prepared):
        for direction in module.directions():
            direction.cell = CellGraphModule.wrap(prepare_pt2e(direction.cell, quantizer))
    return prepared


@checked_arguments(prepared=instance_of(GraphModule))
def convert_decomposed_lstm(prepared: GraphModule) -> GraphModule:
    """Return the q-dq form of a calibrated model.

    Args:
        prepared: the result of ``prepare_decomposed_lstm``; it is not changed.

    Returns:
        The converted model, called like the float model, with float32 inputs and outputs.

    Raises:
        AtenLSTMError: if a cell of an opaque module was not prepared.

    Example:
        >>> import torch
        >>> from torch.ao.quantization import get_default_qconfig_mapping
        >>> from torchq_compat import lstm_utils, quantizer_from
        >>> x = torch.randn(5, 2, 4)
        >>> decomposed = lstm_utils.decompose_lstm(torch.export.export(torch.nn.LSTM(4, 8).eval(), (x,)))
        >>> quantizer = quantizer_from(get_default_qconfig_mapping("x86"))
        >>> prepared = lstm_utils.prepare_decomposed_lstm(decomposed, quantizer)
        >>> _ = prepared(x)  # calibrate
        >>> lstm_utils.convert_decomposed_lstm(prepared)(x)[0].shape
        torch.Size([5, 2, 8])
    """
    copied = copy.deepcopy(prepared)
    for _, module in _opaque_modules(copied):
        for direction in module.directions():
            if not any(observer_nodes(direction.cell)):
                raise AtenLSTMError(
                    "a cell of the model has no observers.",
                    hint="prepare it with prepare_decomposed_lstm; prepare_pt2e sees no module inside.",
                )
            direction.cell = CellGraphModule.wrap(convert_pt2e(direction.cell))
    converted: GraphModule = convert_pt2e(copied)
    hoist_weights(converted)
    for path, module in _opaque_modules(converted):
        quantize_boundary(converted, path, module)
    # torchao does not delete the float weights at nested paths; a new module has only what the graph reads.
    whole = GraphModule(converted, converted.graph)
    whole.meta.update(converted.meta)
    metadata.UNROLLED_CELLS.drop(whole)
    return whole


def _opaque_modules(graph_module: nn.Module) -> list[tuple[str, OpaqueRecurrent]]:
    return [(path, m) for path, m in graph_module.named_modules() if isinstance(m, OpaqueRecurrent)]
