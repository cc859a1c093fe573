"""One direction over time, the layers and directions of a recurrent module, and the runners of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from torchq_compat.errors import ExportError
from torchq_compat.modules.parts import ConvertedPartGraphModule, convert_parts
from torchq_compat.read.qdq import weight_by_weight
from torchq_compat.read.qparams import q_dq
from torchq_compat.recurrent.cell_graph import CellGraphModule, ConvertedCellGraphModule
from torchq_compat.recurrent.kernel.cell_reader import program_or_problem
from torchq_compat.recurrent.kernel.direct_calls import BoundDirection, BoundModule
from torchq_compat.recurrent.kernel.program import CellProgram, ColumnQParams
from torchq_compat.support.graph_nodes import attribute_of, copied_model
from torchq_compat.support.process_state import held, without_code
from torchq_compat.support.upstream import scan

# One direction over time: a loop in Python, a ``scan``, or rows packed by time step.
#
# A step is called with its own inputs and the states: ``step(*inputs, *states)``. It returns the new states;
# the first is the hidden state, which is the output of the step.


State = tuple[Tensor, ...]
Step = Callable[..., State]
SCAN = torch.ops.higher_order.scan


def masked_step(step: Step, weights: int, states: int) -> Step:
    """Return ``step`` with one more argument, a mask (B,), after its first ``weights`` arguments; the states,
    its last ``states`` arguments, are kept where the mask is false."""

    def masked(*flat: Tensor) -> State:
        mask, remaining = flat[weights], flat[weights + 1 :]
        new = step(*flat[:weights], *remaining)
        return tuple(
            torch.where(mask[:, None], *pair)
            for pair in zip(new, remaining[len(remaining) - states :], strict=True)
        )

    return masked


def run_looped_direction(
    step: Step,
    inputs: tuple[Tensor, ...],
    state: State,
    *,
    backward: bool,
    batch_sizes: list[int] | None = None,
) -> tuple[Tensor, State]:
    """Run ``step`` in a Python loop: ``inputs`` (T, B, width) each, states (B, width) -> (T, B, P) and the
    last states.

    With ``batch_sizes`` inputs and result are the rows of a PackedSequence, as in torch.nn. Step t has
    ``batch_sizes[t]`` rows, the longest sequences first; batch sizes never grow. Forward, a sequence leaves
    the batch at its end; backward, it joins there with its own initial state.
    """
    parts = [item.unbind(0) if batch_sizes is None else torch.split(item, batch_sizes) for item in inputs]
    steps = list(zip(*parts, strict=True))
    outputs = []
    for at_time in reversed(steps) if backward else steps:
        if batch_sizes is None:
            new = state = tuple(step(*at_time, *state))
        else:
            size = at_time[0].shape[0]
            new = step(*at_time, *(element[:size] for element in state))
            state = tuple(torch.cat([now, entry[size:]]) for now, entry in zip(new, state, strict=True))
        outputs.append(new[0])
    if backward:
        outputs.reverse()
    return torch.stack(outputs) if batch_sizes is None else torch.cat(outputs), state


def scan_steps(
    body: Callable[..., Sequence[Tensor]],
    states: Sequence[Tensor],
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    """Run ``body(*states, *parts, *weights)`` over the first dimension of ``xs`` as a ``scan``, which
    torch.export traces.

    The operator is called directly and not through its front, which would first compile each body to find the
    weights it reads. Dynamo does so anyway, and accepts only the front.

    Args:
        body: returns the new states, then its other values.

    Returns:
        The last states, then the stacked values.
    """
    if not torch.compiler.is_dynamo_compiling():
        return tuple(SCAN(body, list(states), list(xs), tuple(weights)))
    count = len(states)

    def combine(carried: list[Tensor], parts: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        results = list(body(*carried, *parts, *weights))
        return results[:count], results[count:]

    last, stacked = scan(combine, list(states), list(xs))
    return (*last, *stacked)


def run_rolled_direction(
    step: Step, weights: tuple[Tensor, ...], inputs: tuple[Tensor, ...], state: State, *, backward: bool
) -> tuple[Tensor, State]:
    """Run ``step(*weights, *inputs, *states)`` as a ``scan``, which torch.export captures at any length, with
    the same bits as ``run_looped_direction``."""

    def body(*flat: Tensor) -> list[Tensor]:
        states, remaining = flat[: len(state)], flat[len(state) :]
        new = step(*remaining[len(inputs) :], *remaining[: len(inputs)], *states)
        # scan refuses a result that is the carried tensor itself.
        return [*new, new[0].clone()]

    xs = [item.flip([0]) for item in inputs] if backward else list(inputs)
    *last, outputs = scan_steps(body, state, xs, weights)
    return (outputs.flip([0]) if backward else outputs), tuple(last)


# The shape of the loop over time in an exported program: export sets it, recurrent modules read it.


class LoopShape(StrEnum):
    """Ways to write the loop over time."""

    ROLLED = "rolled"
    UNROLLED = "unrolled"
    OPAQUE = "opaque"
    #: LSTMs with dynamic qparams are ONNX Runtime's operator, other modules rolled; not for ``export``.
    DYNAMIC_QUANTIZE_LSTM = "DynamicQuantizeLSTM"


_SHAPE: ContextVar[LoopShape | None] = ContextVar("torchq_compat_loop_shape", default=None)


def exporting_loops_as(shape: LoopShape) -> AbstractContextManager[None]:
    """Let ``shape_in_export`` return ``shape`` inside the ``with`` block."""
    return held(_SHAPE, shape)


def shape_in_export() -> LoopShape:
    """Return the shape set for the running export; ``ROLLED`` if none is set."""
    # Dynamo cannot read a ContextVar. It runs in ``torch.export.export(strict=True)``, never in ``export``.
    if torch.compiler.is_dynamo_compiling():
        return LoopShape.ROLLED
    return _SHAPE.get() or LoopShape.ROLLED


def packs_are_padded() -> bool:
    """Return whether the running export is this package's, in which the rows of a PackedSequence are those of
    padded sequences."""
    return not torch.compiler.is_dynamo_compiling() and _SHAPE.get() is not None


# Layers and directions of a recurrent module: the modules that hold the cells.
#
# The paths are those of ``torch.ao.nn.quantizable.LSTM``: ``layers.<i>.layer_fw.cell`` and
# ``layers.<i>.layer_bw.cell``.


class RecurrentDirection(nn.Module):
    """One direction of one layer: its cell, and the input projection of all steps.

    Args:
        cell: (x, *states) -> the new states; prepared or converted.
        input_projection: x of all steps -> the input of the cell at all steps; None: the cell's input is x.
    """

    #: Whether ``x`` is a view (T, B, I) of a tensor that the caller passed as (B, T, I).
    batch_first = False

    def __init__(self, cell: CellGraphModule, input_projection: GraphModule | None = None) -> None:
        super().__init__()
        self.cell = cell
        self.input_projection = input_projection
        self._read_program()
        # Qparams are literals of the graphs; loading a state changes them.
        self.register_load_state_dict_post_hook(_read_program_again)  # type: ignore[no-untyped-call]

    def forward(
        self,
        x: Tensor,
        state: State,
        *,
        backward: bool = False,
        batch_sizes: list[int] | None = None,
    ) -> tuple[Tensor, State]:
        """Run the cell in a Python loop: ``x`` (T, B, I), states (B, width) -> (T, B, P) and the last states.
        With ``batch_sizes``, ``x`` and the result are the rows of a PackedSequence."""
        x, cell = self.project_first(x), self.cell
        step: Step = cell
        inputs: tuple[Tensor, ...] = (x,)
        # A cell with hooks is called directly, so that they run.
        if isinstance(cell, ConvertedCellGraphModule) and not (
            cell._forward_hooks or cell._forward_pre_hooks
        ):
            inputs = self.project(cell, x)  # First: then the floats of its weights are gone.
            step = cell.repeated_step()
        return run_looped_direction(step, inputs, state, backward=backward, batch_sizes=batch_sizes)

    def project_first(self, x: Tensor) -> Tensor:
        """Return the input projection of ``x``, all steps at once; ``x`` itself if there is none."""
        if self.input_projection is None:
            return x
        project = weight_by_weight(self.input_projection)
        (projected,) = (project or self.input_projection)(x)
        assert isinstance(projected, Tensor)
        return projected

    def project(self, cell: ConvertedCellGraphModule, x: Tensor) -> tuple[Tensor, ...]:
        """Return the inputs of the steps of a converted ``cell``, computed for all steps of ``x`` at once, in
        the caller's layout: a linear would copy the transposed view, and backends match a linear only
        directly after a dequantize."""
        if not self.batch_first or x.dim() != 3:
            return cell.project(x)
        return tuple(item.transpose(0, 1) for item in cell.project(x.transpose(0, 1)))

    def graphs(self) -> list[GraphModule]:
        """Return the graphs of this direction, in the order of computation."""
        return [self.cell] if self.input_projection is None else [self.input_projection, self.cell]

    def converted(self) -> RecurrentDirection:
        """Return a converted copy with integer weights folded."""
        projection = self.input_projection
        if projection is not None:
            projection = ConvertedPartGraphModule.wrap(convert_parts(_copy_to_convert(projection)))
        cell = ConvertedCellGraphModule.wrap(convert_parts(_copy_to_convert(self.cell)))
        return RecurrentDirection(cell, projection)

    def program(self) -> CellProgram | None:
        """Return the program of the input projection and the cell; None if the cell loop cannot run it."""
        return None if isinstance(self._program, str) else self._program

    def bound(self) -> BoundDirection | None:
        """Return this direction for a ``BoundModule``; None if the cell loop cannot run it."""
        owner = self.cell if self.input_projection is None else self
        program = owner.program()
        return None if program is None else BoundDirection(program, owner, self.cell, owner.program)

    def program_problem(self) -> str | None:
        """Return the reason why the cell loop cannot run this direction; None if it can."""
        if self.input_projection is None:
            return self.cell.program_problem()
        return self._program if isinstance(self._program, str) else None

    def _read_program(self) -> None:
        """Read the program of input projection and cell; a cell without a projection has its own program."""
        self._program = (
            "it is not converted"
            if self.input_projection is None or not isinstance(self.cell, ConvertedCellGraphModule)
            else program_or_problem(("input_projection", self.input_projection), ("cell", self.cell))
        )


def _copy_to_convert(prepared: GraphModule) -> GraphModule:
    """Return a copy of ``prepared`` that is not run before it is converted."""
    with without_code(prepared._graph):
        return copied_model(prepared)


def _read_program_again(direction: RecurrentDirection, _incompatible_keys: object) -> None:
    direction._read_program()


class RecurrentLayer(nn.Module):
    """One layer: forward, and backward if bidirectional."""

    def __init__(self, directions: Sequence[RecurrentDirection]) -> None:
        super().__init__()
        self.layer_fw = directions[0]
        if len(directions) > 1:
            self.layer_bw = directions[1]

    def directions(self) -> tuple[RecurrentDirection, ...]:
        return (self.layer_fw, self.layer_bw) if hasattr(self, "layer_bw") else (self.layer_fw,)

    def output_columns(self, width: int) -> ColumnQParams:
        """Return the qparams of the columns of the layer's output, ``width`` columns for each direction."""
        return tuple((width, direction.cell.state_qparams()[0]) for direction in self.directions())

    def converted(self) -> RecurrentLayer:
        """Return a converted copy."""
        return RecurrentLayer([direction.converted() for direction in self.directions()])


# Runners: they run the cells of a recurrent module over time.
#
# A runner gets the layers of a module, the input of all steps and the initial states. The runner of a call is
# chosen in one place, ``RecurrentModule.runner``.


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
            x = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
            given = replace(given, x=x, columns=layer.output_columns(outputs[0].shape[-1]))
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
    """Runs all layers in one call of the native operator on integers; with dropout between them, and where a
    cell has no program, each direction in one call, or that cell in Python.

    Args:
        bound: the module's arguments of the operator; None if a cell has no program.
    """

    def __init__(self, bound: BoundModule | None) -> None:
        self.bound = bound

    def run_layers(
        self, layers: Sequence[RecurrentLayer], given: Sequences, states: list[State], dropout: float
    ) -> tuple[Tensor, list[State]]:
        if self.bound is None or (dropout and len(layers) > 1):
            return super().run_layers(layers, given, states, dropout)
        stacked = [torch.stack(rows) for rows in zip(*states, strict=True)]
        output, *last = self.bound.run(given.x, stacked, given.columns, given.batch_sizes or ())
        return output, list(zip(*(item.unbind(0) for item in last), strict=True))

    def run_direction(
        self, direction: RecurrentDirection, given: Sequences, state: State, *, backward: bool
    ) -> tuple[Tensor, State]:
        if (bound := direction.bound()) is None:
            return super().run_direction(direction, given, state, backward=backward)
        return bound.run(given.x, state, given.columns, given.batch_sizes or (), backward=backward)

    def run_step(self, cell: CellGraphModule, x: Tensor, state: State, columns: ColumnQParams) -> State:
        if self.bound is None:
            return super().run_step(cell, x, state, columns)
        return tuple(self.bound.run(x, list(state), columns))
