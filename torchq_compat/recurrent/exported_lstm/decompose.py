"""Decomposes the recurrent operators of an exported program, and quantizes what results."""

import copy
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.quantizer import Quantizer

from torchq_compat.annotate.observed_graph import observer_nodes
from torchq_compat.capture.checked import capture_by_structure
from torchq_compat.errors import AnnotationError
from torchq_compat.recurrent.cell_graph import CellGraphModule
from torchq_compat.recurrent.exported_lstm import shapes
from torchq_compat.recurrent.exported_lstm.aten_recurrent import (
    KINDS,
    LSTM_OP,
    AtenRecurrent,
    NodeWriter,
    aten_recurrents,
    refuse_packed,
)
from torchq_compat.recurrent.over_time import LoopShape
from torchq_compat.support import metadata
from torchq_compat.support.argument_checks import checked_arguments, instance_of
from torchq_compat.support.graph_nodes import replace_results
from torchq_compat.support.process_state import convert_pt2e, prepare_pt2e

# Decomposes the recurrent operators of an exported program.
#
# This is the maintainers' answer in the PyTorch issue on operators with several outputs: an LSTM has
# internal states and internal linears; break it into ``aten.linear`` and annotate those.


GUARDS = "_guards_fn"


Write = Callable[[NodeWriter, AtenRecurrent, dict[str, GraphModule]], tuple[Node, ...]]
WRITE: dict[LoopShape, Write] = {
    LoopShape.ROLLED: shapes.write_rolled,
    LoopShape.UNROLLED: shapes.write_unrolled,
    LoopShape.OPAQUE: shapes.write_opaque,
}


@checked_arguments()
def decompose_lstm(
    program: ExportedProgram | GraphModule, shape: LoopShape | str = LoopShape.ROLLED
) -> GraphModule:
    """Decompose every ``aten.lstm.input`` of ``program`` into ops that any quantizer can annotate.

    Prepare the result, which computes the same as ``program``, with ``prepare_decomposed_lstm`` and any
    torchao Quantizer; the parts get the same qparams in every shape. ``pt2e.decompose_recurrent``
    also decomposes GRU and RNN.

    Args:
        program: a float32 program, or its module; it is not changed, and the parts own copies of the LSTM's
            weights.
        shape: ``"rolled"``: a ``scan`` over time whose body is the cell. ``"unrolled"``: the cell's nodes
            once per step. ``"opaque"``: one ``call_module``, which runs each cell's own graph in a Python
            loop; its boundary is quantized by convert. Rolled and opaque accept any sequence length, even if
            export fixed the length: the program's guards on its inputs are dropped, and what other nodes
            accept is up to them.

    Raises:
        AnnotationError: no LSTM in the program, an LSTM of a PackedSequence, weights that are computed in the
            program or not float32, an unknown shape, or a dynamic length with ``"unrolled"``.

    Returns:
        A new module with the inputs and outputs of ``program``.

    Example:
        >>> import torch
        >>> from torchq_compat.pt2e import decompose_lstm
        >>> lstm, x = torch.nn.LSTM(4, 8).eval(), torch.randn(5, 2, 4)
        >>> decomposed = decompose_lstm(torch.export.export(lstm, (x,)))
        >>> torch.testing.assert_close(decomposed(x)[0], lstm(x)[0])
    """
    return _decompose(program, shape, (LSTM_OP,))


@checked_arguments()
def decompose_recurrent(
    program: ExportedProgram | GraphModule, shape: LoopShape | str = LoopShape.ROLLED
) -> GraphModule:
    """Decompose every LSTM, GRU and RNN of ``program`` into ops that any quantizer can annotate.

    These are ``aten.lstm.input``, ``aten.gru.input``, ``aten.rnn_tanh.input`` and ``aten.rnn_relu.input``.
    Prepare the result, which computes the same as ``program``, with ``prepare_decomposed_lstm``.

    Args:
        program: see ``pt2e.decompose_lstm``.
        shape: ``"rolled"``, ``"unrolled"`` or ``"opaque"``, see ``pt2e.decompose_lstm``.

    Returns:
        A graph module with the inputs and outputs of ``program``.

    Raises:
        AnnotationError: no such operator in the program; otherwise as ``pt2e.decompose_lstm``.

    Example:
        >>> import torch
        >>> from torchq_compat.pt2e import decompose_recurrent
        >>> program = torch.export.export(torch.nn.GRU(4, 8), (torch.randn(5, 1, 4),))
        >>> decompose_recurrent(program)(torch.randn(9, 1, 4))[0].shape
        torch.Size([9, 1, 8])
    """
    return _decompose(program, shape, KINDS)


def _decompose(
    program: ExportedProgram | GraphModule, shape: LoopShape | str, operators: Collection[Any]
) -> GraphModule:
    if shape not in list(WRITE):
        raise AnnotationError.of("TQ944.shape", shape=shape, shapes=", ".join(WRITE))
    graph_module = _own_module(program)
    refuse_packed(graph_module)
    result = aten_recurrents(graph_module, operators)
    if not result:
        raise _nothing_to_decompose(graph_module, operators)
    for item in result:
        cells: dict[str, GraphModule] = {}
        for direction in item.directions:
            cell = item.kind.float_cell(direction.values(graph_module), split_gates=False)
            cells[direction.path] = capture_by_structure(cell, cell.example_inputs())
        replace_results(item.node, WRITE[LoopShape(shape)](NodeWriter(graph_module, item.node), item, cells))
    # A loop over time does not need the checks of captured sizes.
    for node in graph_module.graph.find_nodes(op="call_module", target=GUARDS):
        graph_module.graph.erase_node(node)
    graph_module.graph.eliminate_dead_code()
    graph_module.graph.lint()
    rewritten = GraphModule(graph_module, graph_module.graph)
    rewritten.meta.update(graph_module.meta)
    return rewritten


#: The most operators that an error names.
MOST_NAMED = 8


def _nothing_to_decompose(graph_module: GraphModule, operators: Collection[Any]) -> AnnotationError:
    """Return the error for a program without ``operators``, which names the operators it has."""
    counts = Counter(str(node.target) for node in graph_module.graph.nodes if node.op == "call_function")
    most = counts.most_common(MOST_NAMED)
    named = [f"{target} x{count}" if count > 1 else target for target, count in most]
    has = ", ".join(named) + (" and others" if len(counts) > MOST_NAMED else "")
    others = {str(aten_recurrent.node.target) for aten_recurrent in aten_recurrents(graph_module)}
    return AnnotationError.of(
        "TQ944.other_recurrent_operators" if others else "TQ944.nothing_to_decompose",
        operators=", ".join(map(str, operators)),
        present=has or "no operators at all",
        others=", ".join(sorted(others)),
    )


def _own_module(program: ExportedProgram | GraphModule) -> GraphModule:
    if isinstance(program, ExportedProgram):
        module = program.module(check_guards=False)
        assert isinstance(module, GraphModule)
        return module
    if isinstance(program, GraphModule):
        return copy.deepcopy(program)
    raise AnnotationError.of("TQ944.program_type", program=program)


# Prepares and converts a program whose recurrent operators are decomposed, in any shape.


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
        >>> from torchq_compat.pt2e import decompose_lstm, prepare_decomposed_lstm
        >>> x = torch.randn(5, 2, 4)
        >>> decomposed = decompose_lstm(torch.export.export(torch.nn.LSTM(4, 8).eval(), (x,)))
        >>> prepared = prepare_decomposed_lstm(decomposed, quantizer_from(get_default_qconfig_mapping("x86")))
        >>> prepared(x)[0].shape
        torch.Size([5, 2, 8])
    """
    prepared: GraphModule = prepare_pt2e(copy.deepcopy(model), shapes.SharedStepsQuantizer(quantizer))
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
        AnnotationError: if a cell of an opaque module was not prepared.

    Example:
        >>> import torch
        >>> from torch.ao.quantization import get_default_qconfig_mapping
        >>> from torchq_compat import pt2e, quantizer_from
        >>> x = torch.randn(5, 2, 4)
        >>> decomposed = pt2e.decompose_lstm(torch.export.export(torch.nn.LSTM(4, 8).eval(), (x,)))
        >>> quantizer = quantizer_from(get_default_qconfig_mapping("x86"))
        >>> prepared = pt2e.prepare_decomposed_lstm(decomposed, quantizer)
        >>> _ = prepared(x)  # calibrate
        >>> pt2e.convert_decomposed_lstm(prepared)(x)[0].shape
        torch.Size([5, 2, 8])
    """
    copied = copy.deepcopy(prepared)
    for _, module in _opaque_modules(copied):
        for direction in module.directions():
            if not any(observer_nodes(direction.cell)):
                raise AnnotationError.of("TQ944.no_observers")
            direction.cell = CellGraphModule.wrap(convert_pt2e(direction.cell))
    converted: GraphModule = convert_pt2e(copied)
    shapes.hoist_weights(converted)
    for path, module in _opaque_modules(converted):
        shapes.quantize_boundary(converted, path, module)
    # torchao does not delete the float weights at nested paths; a new module has only what the graph reads.
    whole = GraphModule(converted, converted.graph)
    whole.meta.update(converted.meta)
    metadata.UNROLLED_CELLS.drop(whole)
    return whole


def _opaque_modules(graph_module: nn.Module) -> list[tuple[str, shapes.OpaqueRecurrent]]:
    return [(path, m) for path, m in graph_module.named_modules() if isinstance(m, shapes.OpaqueRecurrent)]
