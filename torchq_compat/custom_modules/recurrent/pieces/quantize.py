"""Prepare and convert a program whose LSTMs are in pieces, whatever their shape."""

from __future__ import annotations

import copy

from torch import nn
from torch.fx import GraphModule
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer import Quantizer

from torchq_compat.custom_modules.recurrent.aten_lstm_errors import AtenLSTMError
from torchq_compat.custom_modules.recurrent.cell_graph import CellGraphModule
from torchq_compat.custom_modules.recurrent.pieces.boundary import quantize_boundary
from torchq_compat.custom_modules.recurrent.pieces.hoist import hoist_weights
from torchq_compat.custom_modules.recurrent.pieces.opaque import OpaqueLSTM
from torchq_compat.custom_modules.recurrent.pieces.shared_steps import SharedStepsQuantizer
from torchq_compat.observed_graph import observer_nodes

__all__ = ["convert_pieces", "prepare_pieces"]


def prepare_pieces(model: GraphModule, quantizer: Quantizer) -> GraphModule:
    """Observers where ``quantizer`` wants them, one per part of a cell and shared by all time steps.

    Legacy: ``prepare_pt2e(model, quantizer)``, which it calls; but torchao does not look inside a module, and
    gives each step of an unrolled LSTM observers of its own. ``quantizer`` is asked to annotate the graph and
    each cell.

    Args:
        model: what ``break_up_lstm`` returned; it is not changed.
        quantizer: any torchao Quantizer. What moves values between steps and layers is not quantized.
    """
    prepared: GraphModule = prepare_pt2e(copy.deepcopy(model), SharedStepsQuantizer(quantizer))
    for _, module in _opaque_lstms(prepared):
        for direction in module.directions():
            direction.cell = CellGraphModule.wrap(prepare_pt2e(direction.cell, quantizer))
    return prepared


def convert_pieces(prepared: GraphModule) -> GraphModule:
    """The q-dq form of a calibrated model; ``prepared`` is left as it is.

    Raises:
        AtenLSTMError: an opaque LSTM whose cells were not prepared.
    """
    copied = copy.deepcopy(prepared)
    for _, module in _opaque_lstms(copied):
        for direction in module.directions():
            if not any(observer_nodes(direction.cell)):
                raise AtenLSTMError.not_prepared()
            direction.cell = CellGraphModule.wrap(convert_pt2e(direction.cell))
    converted: GraphModule = convert_pt2e(copied)
    hoist_weights(converted)
    for path, module in _opaque_lstms(converted):
        quantize_boundary(converted, path, module)
    # torchao leaves the float weights of nested paths behind; a new module takes only what the graph reads.
    whole = GraphModule(converted, converted.graph)
    whole.meta.update(converted.meta)
    return whole


def _opaque_lstms(graph_module: nn.Module) -> list[tuple[str, OpaqueLSTM]]:
    return [(path, m) for path, m in graph_module.named_modules() if isinstance(m, OpaqueLSTM)]
