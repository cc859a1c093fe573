"""Break ``aten.lstm.input`` up in a program that is already exported.

The maintainers' answer in the PyTorch issue on operators with several outputs: an LSTM has internal states
and internal linears; break it into ``aten.linear`` and annotate those.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from torchq_compat.capture.export import capture_flat
from torchq_compat.custom_modules.loop_shape import LoopShape
from torchq_compat.custom_modules.recurrent.aten_lstm import AtenLSTM, Direction, aten_lstms
from torchq_compat.custom_modules.recurrent.aten_lstm_errors import AtenLSTMError
from torchq_compat.custom_modules.recurrent.lstm_cell import LSTMCellFloat
from torchq_compat.custom_modules.recurrent.pieces.opaque import write_opaque
from torchq_compat.custom_modules.recurrent.pieces.rolled import write_rolled
from torchq_compat.custom_modules.recurrent.pieces.unrolled import write_unrolled
from torchq_compat.custom_modules.recurrent.pieces.writer import PieceWriter
from torchq_compat.multi_output.points import Output, canonical
from torchq_compat.versions import EXPORT_MODULE_TAKES_CHECK_GUARDS

__all__ = ["break_up_lstm"]

GUARDS = "_guards_fn"


Write = Callable[[PieceWriter, AtenLSTM, dict[str, GraphModule]], tuple[Node, Node, Node]]
WRITE: dict[LoopShape, Write] = {
    LoopShape.ROLLED: write_rolled,
    LoopShape.UNROLLED: write_unrolled,
    LoopShape.OPAQUE: write_opaque,
}


def break_up_lstm(
    program: ExportedProgram | GraphModule, shape: LoopShape | str = LoopShape.ROLLED
) -> GraphModule:
    """``program`` with every ``aten.lstm.input`` in pieces; it computes the same.

    Prepare what it returns with ``prepare_pieces`` and any torchao Quantizer; whatever the shape, the pieces
    get the same qparams.

    Args:
        program: a float32 program, or a module of one; it is not changed, and the pieces own copies of the
            LSTM's weights.
        shape: ``"rolled"``: a ``scan`` over time whose body is the cell. ``"unrolled"``: the cell's nodes
            once per step. ``"opaque"``: one ``call_module``, which loops in Python around cells that are
            graphs of their own; its boundary is quantized when it is converted. Rolled and opaque accept any
            sequence length, also where export had fixed it: the program's guards on its inputs are dropped,
            and the other nodes decide what they accept.

    Raises:
        AtenLSTMError: no LSTM in the program, weights that are computed in it or not float32, an unknown
            shape, or a dynamic length to unroll.
    """
    if shape not in list(LoopShape):
        raise AtenLSTMError.unknown_shape(shape, ", ".join(LoopShape))
    graph_module = _own_module(program)
    lstms = aten_lstms(graph_module)
    if not lstms:
        raise AtenLSTMError.none_found()
    for lstm in lstms:
        cells = {direction.path: _cell(graph_module, direction) for direction in lstm.directions}
        _replace(lstm.node, WRITE[LoopShape(shape)](PieceWriter(graph_module, lstm.node), lstm, cells))
    _drop_guards(graph_module)
    graph_module.graph.eliminate_dead_code()
    graph_module.graph.lint()
    rewritten = GraphModule(graph_module, graph_module.graph)
    rewritten.meta.update(graph_module.meta)
    return rewritten


def _own_module(program: ExportedProgram | GraphModule) -> GraphModule:
    if isinstance(program, ExportedProgram):
        options = {"check_guards": False} if EXPORT_MODULE_TAKES_CHECK_GUARDS else {}
        module = program.module(**options)
        assert isinstance(module, GraphModule)
        return module
    if isinstance(program, GraphModule):
        return copy.deepcopy(program)
    raise AtenLSTMError.not_a_program(program)


def _cell(graph_module: GraphModule, direction: Direction) -> GraphModule:
    weights = direction.values(graph_module)
    cell = LSTMCellFloat(weights, split_gates=False)
    return capture_flat(cell, cell.example_inputs())


def _replace(node: Node, results: Sequence[Node]) -> None:
    for user in list(node.users):
        picked = canonical(user)
        assert isinstance(picked, Output)  # torch.export returns and passes on getitems only
        user.replace_all_uses_with(results[picked.index])
        node.graph.erase_node(user)
    node.graph.erase_node(node)


def _drop_guards(graph_module: GraphModule) -> None:
    """Checks of the captured sizes, which a loop over time does not need."""
    for node in list(graph_module.graph.nodes):
        if node.op == "call_module" and node.target == GUARDS:
            graph_module.graph.erase_node(node)
