"""Break ``aten.lstm.input`` up in a program that is already exported.

The maintainers' answer in the PyTorch issue on operators with several outputs: an LSTM has internal states
and internal linears; break it into ``aten.linear`` and annotate those.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from torchq_compat.capture.torch_export import capture_flat
from torchq_compat.custom_modules.recurrent.cell.lstm_cell import LSTMCellFloat
from torchq_compat.custom_modules.recurrent.loop_shape import LoopShape
from torchq_compat.errors import AtenLSTMError
from torchq_compat.exported_lstm.aten_lstm import AtenLSTM, Direction, aten_lstms
from torchq_compat.exported_lstm.opaque import write_opaque
from torchq_compat.exported_lstm.rolled import write_rolled
from torchq_compat.exported_lstm.unrolled import write_unrolled
from torchq_compat.exported_lstm.writer import NodeWriter
from torchq_compat.multi_output.edges_and_nodes import Output, canonical
from torchq_compat.support.versions import EXPORT_MODULE_TAKES_CHECK_GUARDS

__all__ = ["decompose_lstm"]

GUARDS = "_guards_fn"


Write = Callable[[NodeWriter, AtenLSTM, dict[str, GraphModule]], tuple[Node, Node, Node]]
WRITE: dict[LoopShape, Write] = {
    LoopShape.ROLLED: write_rolled,
    LoopShape.UNROLLED: write_unrolled,
    LoopShape.OPAQUE: write_opaque,
}


def decompose_lstm(
    program: ExportedProgram | GraphModule, shape: LoopShape | str = LoopShape.ROLLED
) -> GraphModule:
    """Decompose every ``aten.lstm.input`` of ``program`` into ops that any quantizer can annotate.

    Prepare what it returns, which computes the same, with ``prepare_decomposed_lstm`` and any torchao
    Quantizer; the parts get the same qparams whatever the shape.

    Args:
        program: a float32 program, or a module of one; it is not changed, and the parts own copies of the
            LSTM's weights.
        shape: ``"rolled"``: a ``scan`` over time whose body is the cell. ``"unrolled"``: the cell's nodes
            once per step. ``"opaque"``: one ``call_module``, which loops in Python around cells that are
            graphs of their own; its boundary is quantized when it is converted. Rolled and opaque accept any
            sequence length, also where export had fixed it: the program's guards on its inputs are dropped,
            and the other nodes decide what they accept.

    Raises:
        AtenLSTMError: no LSTM in the program, weights that are computed in it or not float32, an unknown
            shape, or a dynamic length to unroll.

    Returns:
        A new module that takes and returns what ``program`` does.

    Example:
        >>> import torch
        >>> from torchq_compat.lstm_utils import decompose_lstm
        >>> lstm, x = torch.nn.LSTM(4, 8).eval(), torch.randn(5, 2, 4)
        >>> decomposed = decompose_lstm(torch.export.export(lstm, (x,)))
        >>> torch.testing.assert_close(decomposed(x)[0], lstm(x)[0])
    """
    if shape not in list(LoopShape):
        raise AtenLSTMError(
            f"shape {shape!r} is not known.",
            hint=f"the shapes are: {', '.join(LoopShape)}.",
        )
    graph_module = _own_module(program)
    lstms = aten_lstms(graph_module)
    if not lstms:
        raise AtenLSTMError(
            "the program has no aten.lstm.input.",
            hint="export the float model with torch.export.export and do not run_decompositions before.",
        )
    for lstm in lstms:
        cells = {direction.path: _cell(graph_module, direction) for direction in lstm.directions}
        _replace(lstm.node, WRITE[LoopShape(shape)](NodeWriter(graph_module, lstm.node), lstm, cells))
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
    raise AtenLSTMError(
        f"an ExportedProgram or a GraphModule is needed, got {type(program).__name__}.",
        hint="call torch.export.export(model, example_inputs) first.",
    )


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
