"""Runners: they run the cells of a recurrent module over time.

A runner gets the layers of a module, the input of all steps and the initial states. The runner of a call is
chosen in one place, ``RecurrentModule.runner``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from torchq_compat.errors import ExportError
from torchq_compat.read.qparams import q_dq
from torchq_compat.recurrent.cell_graph import CellGraphModule, ConvertedCellGraphModule
from torchq_compat.recurrent.kernel.bound_module import BoundModule
from torchq_compat.recurrent.kernel.program import ColumnQParams
from torchq_compat.recurrent.over_time import (
    LoopShape,
    RecurrentDirection,
    RecurrentLayer,
    State,
    masked_step,
    run_looped_direction,
    run_rolled_direction,
    shape_in_export,
)
from torchq_compat.support.graph_nodes import attribute_of


@dataclass(frozen=True)
class Sequences:
    """The input of all steps.

    Attributes:
        x: (T, B, I) float32; with ``batch_sizes`` the rows of a PackedSequence.
        columns: the qparams of the columns of ``x``, for a runner that computes on integers.
        batch_sizes: number of rows of each step, the longest sequences first.
        mask: (T, B), in an exported program: true where a sequence has a step; elsewhere its state is kept.
    """

    x: Tensor
    columns: ColumnQParams = ()
    batch_sizes: list[int] | None = None
    mask: Tensor | None = None


class Runner(ABC):
    """Runs layers, or one step of a cell."""

    def run_layers(
        self, layers: Sequence[RecurrentLayer], given: Sequences, states: list[State], dropout: float
    ) -> tuple[Tensor, list[State]]:
        """Run all ``layers``, with ``dropout`` between them.

        Args:
            states: the states of every layer and direction, (B, width) each.

        Returns:
            The output (T, B, D*P), or its packed rows, and the last states in the form of ``states``.
        """
        last: list[State] = []
        for index, layer in enumerate(layers):
            if index and dropout:
                given = replace(given, x=F.dropout(given.x, dropout))
            outputs = []
            for position, direction in enumerate(layer.directions()):
                output, end = self.run_direction(direction, given, states[len(last)], backward=position == 1)
                outputs.append(output)
                last.append(end)
            given = replace(given, x=outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1))
        return given.x, last

    @abstractmethod
    def run_direction(
        self, direction: RecurrentDirection, given: Sequences, state: State, *, backward: bool
    ) -> tuple[Tensor, State]:
        """Run one direction of one layer; return the hidden states of all steps (T, B, P) and the last
        states."""

    def run_step(self, cell: CellGraphModule, x: Tensor, state: State, columns: ColumnQParams) -> State:
        """Run one step: ``x`` (B, I) and the states -> the new states."""
        return tuple(cell(x, *state))


class PythonRunner(Runner):
    """Runs observed modules, and converted modules in eager mode, in a Python loop."""

    def run_direction(
        self, direction: RecurrentDirection, given: Sequences, state: State, *, backward: bool
    ) -> tuple[Tensor, State]:
        result: tuple[Tensor, State] = direction(
            given.x, state, backward=backward, batch_sizes=given.batch_sizes
        )
        return result


class TracedRunner(Runner):
    """Runs converted cells for torch.export to trace: as a ``scan``, or step by step.

    The results are followed by q-dq with their own qparams, which change no value: they are there because a
    backend does not see into the loop.
    """

    def run_direction(
        self, direction: RecurrentDirection, given: Sequences, state: State, *, backward: bool
    ) -> tuple[Tensor, State]:
        cell = direction.cell
        if not isinstance(cell, ConvertedCellGraphModule):
            return PythonRunner().run_direction(direction, given, state, backward=backward)
        inputs = direction.project(cell, direction.project_first(given.x))
        unrolled = shape_in_export() is LoopShape.UNROLLED
        step, weights = (cell.repeated_step(), ()) if unrolled else cell.step_of_weights()
        if given.mask is not None:
            step, inputs = masked_step(step, len(weights), len(state)), (given.mask, *inputs)
        if unrolled:
            output, last = run_looped_direction(step, inputs, state, backward=backward)
        else:
            output, last = run_rolled_direction(step, weights, inputs, state, backward=backward)
        hidden, *_ = all_qparams = cell.state_qparams()
        return q_dq(output, hidden), tuple(q_dq(*pair) for pair in zip(last, all_qparams, strict=True))


class OpaqueRunner(TracedRunner):
    """Runs the whole module as one call of the native operator, in an export that requests it.

    The results are followed by q-dq with their own qparams, which change no value.

    Args:
        bound: the module's arguments of the operator.
        program: in place of the program of ``bound``.
    """

    def __init__(self, bound: BoundModule, program: Tensor | None = None) -> None:
        self.bound = bound
        self.program = program

    def run_layers(
        self, layers: Sequence[RecurrentLayer], given: Sequences, states: list[State], dropout: float
    ) -> tuple[Tensor, list[State]]:
        if given.mask is not None:
            raise ExportError.of("TQ930.opaque_packed")
        stacked = [torch.stack(rows) for rows in zip(*states, strict=True)]
        output, *last = self.bound.run(given.x, stacked, given.columns, program=self.program, exported=True)
        all_qparams = [item.cell.state_qparams() for layer in layers for item in layer.directions()]
        count = self.bound.directions
        parts = output.chunk(count, -1) if count > 1 else (output,)
        outputs = [q_dq(*pair) for pair in zip(parts, (of[0] for of in all_qparams[-count:]), strict=True)]
        rows = zip(*(item.unbind(0) for item in last), strict=True)
        ends = [tuple(map(q_dq, row, of)) for row, of in zip(rows, all_qparams, strict=True)]
        return (outputs[0] if count == 1 else torch.cat(outputs, -1)), ends

    def run_step(self, cell: CellGraphModule, x: Tensor, state: State, columns: ColumnQParams) -> State:
        ends = self.bound.run(x, list(state), columns, program=self.program, exported=True)
        return tuple(map(q_dq, ends, cell.state_qparams()))


class DynamicQuantizeLSTMRunner(TracedRunner):
    """Writes each layer of an LSTM with dynamic qparams as ONNX Runtime's operator, in an export for ONNX.

    The operator quantizes the input and the hidden state step by step over the whole range of uint8, and
    computes gates and states in floats; ``torch.ao.nn.quantized.dynamic.LSTM`` does so over half of it.
    """

    OPERATOR = "com.microsoft::DynamicQuantizeLSTM"
    #: The positions in torch's stacked gates (input, forget, cell, output), in ONNX's order.
    GATE_ORDER = (0, 3, 1, 2)

    def run_layers(
        self, layers: Sequence[RecurrentLayer], given: Sequences, states: list[State], dropout: float
    ) -> tuple[Tensor, list[State]]:
        x, last = given.x, list[State]()
        for layer in layers:
            directions = layer.directions()
            count = len(directions)
            hidden, cell = map(torch.stack, zip(*states[len(last) : len(last) + count], strict=True))
            linears = zip(*(map(self._linear, item.graphs()) for item in directions), strict=True)
            of_inputs, of_hidden = (tuple(map(torch.stack, zip(*side, strict=True))) for side in linears)
            bias = torch.cat((of_inputs[-1], of_hidden[-1]), 1)
            weights = (of_inputs[0], of_hidden[0], bias, None, hidden, cell, None)
            output, *ends = torch.onnx.ops.symbolic_multi_out(
                self.OPERATOR,
                (x, *weights, *of_inputs[1:3], *of_hidden[1:3]),
                {"direction": "bidirectional" if count == 2 else "forward", "hidden_size": hidden.shape[-1]},
                dtypes=[x.dtype] * 3,
                shapes=[(x.shape[0], *hidden.shape), hidden.shape, cell.shape],
                version=1,
            )
            x = output.transpose(1, 2).flatten(2)
            last += zip(*(end.unbind(0) for end in ends), strict=True)
        return x, last

    def _linear(self, graph_module: GraphModule) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the weight (inputs, 4H), scale, zero point and bias (4H,) of the linear of a graph.

        Its integers are unsigned: without VNNI, ONNX Runtime saturates sums of signed ones.
        """

        def ordered(node: Any) -> Tensor:
            gates = attribute_of(graph_module, node).chunk(len(self.GATE_ORDER))
            return torch.cat([gates[index] for index in self.GATE_ORDER])

        (linear,) = graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
        integers, scale, zero_point = linear.args[1].args[:3]
        if isinstance(scale, Node):
            scale, zero_point = ordered(scale).float(), ordered(zero_point)
        else:
            scale, zero_point = torch.tensor(scale), torch.tensor(zero_point)
        bias = linear.args[2] if len(linear.args) > 2 else None
        weight, zero_point = ((value.short() + 128).byte() for value in (ordered(integers).t(), zero_point))
        no_bias = scale.new_zeros(weight.shape[1:])
        return weight, scale, zero_point, no_bias if bias is None else ordered(bias)


class NativeRunner(PythonRunner):
    """Runs all layers in one call of the native operator on integers; in Python with dropout between them.

    Args:
        bound: the module's arguments of the operator.
    """

    def __init__(self, bound: BoundModule) -> None:
        self.bound = bound

    def run_layers(
        self, layers: Sequence[RecurrentLayer], given: Sequences, states: list[State], dropout: float
    ) -> tuple[Tensor, list[State]]:
        if dropout and len(layers) > 1:
            return super().run_layers(layers, given, states, dropout)
        stacked = [torch.stack(rows) for rows in zip(*states, strict=True)]
        output, *last = self.bound.run(given.x, stacked, given.columns, given.batch_sizes or ())
        return output, list(zip(*(item.unbind(0) for item in last), strict=True))

    def run_step(self, cell: CellGraphModule, x: Tensor, state: State, columns: ColumnQParams) -> State:
        return tuple(self.bound.run(x, list(state), columns))
