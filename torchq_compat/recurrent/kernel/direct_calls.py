"""Calls of the native operator: what does not change from call to call is bound once.

Calls of a lowered module go straight to the operator, because their form is known in advance.
"""

import itertools
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchq_compat.capture.call_layouts import CallLayout
from torchq_compat.read.qdq import are_large_read_one_by_one
from torchq_compat.read.qparams import PerChannelQParams, PerTensorQParams, QParams
from torchq_compat.recurrent.kernel import op
from torchq_compat.recurrent.kernel import program as programs
from torchq_compat.recurrent.kernel.build import kernel_build
from torchq_compat.recurrent.kernel.op import NO_SIZES, drop_forgotten, forget
from torchq_compat.support.dtypes import KERNEL_DTYPES
from torchq_compat.support.graph_nodes import attribute_at
from torchq_compat.support.process_state import is_compiling
from torchq_compat.support.upstream import data_address

# A module's arguments of the native operator that do not change from call to call, bound once.


#: Numbers for the owners of packed weights; 0 stands for no owner.
OWNERS = itertools.count(1)


class BoundDirection:
    """One direction of one layer: the program that was bound, and how to find its weights.

    Args:
        program: the direction's program.
        owner: the module that has its weights as attributes.
        cell: the direction's cell.
        current: returns the direction's current program; None if it has none.
    """

    def __init__(
        self,
        program: programs.CellProgram,
        owner: nn.Module,
        cell: nn.Module,
        current: Callable[[], programs.CellProgram | None],
    ) -> None:
        self.program, self.owner, self.cell, self.current = program, owner, cell, current
        self.masks = tuple(programs.weight_mask(names[1:]) for names in program.weights)
        self.names = [name for names in program.weights for name in names if name is not None]

    def numbers(self, segments: tuple[float, ...] = (), *, backward: bool) -> programs.CellNumbers:
        """Return the program as numbers; see ``CellNumbers``."""
        return programs.CellNumbers(
            self.program.table, self.program.constants, self.masks, segments, backward
        )

    def weights(self) -> list[Tensor]:
        """Return the current weights."""
        return [attribute_at(self.owner, name) for name in self.names]

    def run(
        self,
        x: Tensor,
        state: Sequence[Tensor],
        columns: programs.ColumnQParams,
        batch_sizes: Sequence[int],
        *,
        backward: bool,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run this direction alone, where a module is not one call: ``x`` (T, B, I), or packed rows, and
        states (B, width) -> (T, B, P) and the last states. The kernel keeps no weights of it."""
        output, *last = op.recurrent(
            x,
            [entry[None] for entry in state],
            self.weights(),
            programs.ModuleNumbers(((self.numbers(backward=backward),),)).tensor(),
            programs.floats_around(programs.as_numbers(columns), len(state)),
            batch_sizes=batch_sizes,
        )
        return output, tuple(item[0] for item in last)


class BoundModule:
    """The bound arguments of all layers of a module.

    Args:
        layers: the directions of each layer.
        columns: the qparams of the input columns of every layer but the first.
        homes: for every cell and every module around it, the dictionary that holds it, its name in the
            dictionary and the module.

    Attributes:
        owner: see ``op.recurrent``.
        program: the program of the module, see ``ModuleNumbers``.
        are_in_state: whether all weights are parameters or buffers.
    """

    def __init__(
        self,
        layers: Sequence[Sequence[BoundDirection]],
        columns: Sequence[programs.ColumnQParams],
        homes: Sequence[tuple[dict[str, Any], str, nn.Module]],
    ) -> None:
        self.homes = [home for home, _, _ in homes]
        self.keys = [key for _, key, _ in homes]
        self.modules = [module for _, _, module in homes]
        self.cells: list[Any] = [direction.cell for layer in layers for direction in layer]
        self.bound = [direction for layer in layers for direction in layer]
        self.current = [direction.current for direction in self.bound]
        self.programs = [direction.program for direction in self.bound]
        self.directions = len(layers[0])
        self.states = len(self.bound[0].program.results)
        segments = [(), *(tuple(programs.as_numbers(column)) for column in columns)]
        self.program = programs.ModuleNumbers(
            tuple(
                tuple(direction.numbers(own, backward=index == 1) for index, direction in enumerate(layer))
                for layer, own in zip(layers, segments, strict=True)
            )
        ).tensor()
        result = [_place(item.owner, name) for item in self.bound for name in item.names]
        self.places = [(home, name) for home, name, _ in result]
        self.are_in_state = all(is_in_state for _, _, is_in_state in result)
        self.owner = next(OWNERS)
        weakref.finalize(self, forget, self.owner).atexit = False
        drop_forgotten()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Return None: a copy of a module binds its own arguments."""

    def is_current(self) -> bool:
        """Return whether every cell is still in its place, with the program that was bound."""
        # Called before every call of the operator, so written with loops that run in C where possible.
        if list(map(dict.get, self.homes, self.keys)) != self.modules:
            return False
        return all(map(operator.is_, [current() for current in self.current], self.programs))

    def starts_at_zero(self) -> bool:
        """Return whether all cells begin with zeros where no state is given."""
        return all(cell.starts_at_zero() for cell in self.cells)

    def weights(self) -> list[Tensor]:
        """Return the current weights."""
        if is_compiling():
            # Dynamo knows where attributes of modules come from.
            return [weight for item in self.bound for weight in item.weights()]
        return list(self.each_weight())

    def each_weight(self) -> Iterator[Tensor]:
        """Yield the current weights, outside of tracing."""
        return (home[name] for home, name in self.places)

    def run(
        self,
        x: Tensor,
        states: Sequence[Tensor],
        columns: programs.ColumnQParams,
        batch_sizes: Sequence[int] = (),
        *,
        program: Tensor | None = None,
        exported: bool = False,
    ) -> list[Tensor]:
        """Run ``op.recurrent`` on x (T, B, I), or packed rows, or (B, I) for a cell.

        Args:
            program: in place of the module's own.
            exported: for torch.export to trace: the weights of an exported program have no owner.
        """
        return op.recurrent(
            x,
            states,
            self.weights(),
            self.program if program is None else program,
            programs.floats_around(programs.as_numbers(columns), self.states),
            batch_sizes=NO_SIZES if exported else batch_sizes,
            directions=self.directions,
            owner=0 if exported else self.owner,
        )


def _place(owner: nn.Module, path: str) -> tuple[dict[str, Any], str, bool]:
    """Return the dictionary that holds the tensor at ``path``, its name there, and whether it is a parameter
    or buffer."""
    home, _, name = path.rpartition(".")
    module = owner.get_submodule(home)
    for tensors in (module._parameters, module._buffers):
        if name in tensors:
            return tensors, name, True
    return vars(module), name, False


# One call of a lowered module.


@dataclass
class DirectCall:
    """One way to call a module: by a user, or by the graph with the layout of one of its calls.

    Attributes:
        layout: the layout of the graph's call; None for calls by a user.
        rank: the number of dimensions of x.
        batch_first: whether x is (B, T, I).
        boundary: ``Boundary.numbers()``.
        states: the number of states of a cell.
        places: the indices of x and the states among the tensors that the graph passes.
        is_possible: whether the operator accepts calls of this form.
        ticket: the result of ``op.bind_call``.
        bound_to: the owner, and the ids, versions and addresses of the weights that ``ticket`` is for; None
            if unbound.
    """

    layout: CallLayout | None
    rank: int
    batch_first: bool
    boundary: list[float]
    states: int
    places: tuple[int, ...] = ()
    is_possible: bool = True
    ticket: int = 0
    bound_to: tuple[int, list[int], list[int], list[int]] | None = None

    def tensors(self, args: tuple[Any, ...]) -> tuple[Tensor, ...] | None:
        """Return x and the states of a call; None if the call needs a closer check. The operator checks sizes
        and devices."""
        if self.layout is not None:
            result = tuple([args[place] for place in self.places])
        elif len(args) == 1 or (len(args) == 2 and args[1] is None):
            result = args[:1]
        elif len(args) != 2:
            return None
        elif self.states == 1:
            result = args
        else:
            x, states = args
            if not isinstance(states, (tuple, list)) or len(states) != self.states:
                return None
            result = (x, *states)
        for tensor in result:
            if type(tensor) is not Tensor:
                return None
            is_handed = self.layout is not None and tensor.dtype in KERNEL_DTYPES
            if tensor.dtype is not torch.float32 and not is_handed:
                return None
        x = result[0]
        if x.dim() != self.rank or not x.numel():
            return None
        return result

    def run(self, bound: BoundModule, tensors: tuple[Tensor, ...]) -> Any:
        """Return the results in the form the caller expects; None if the operator refuses the call, which the
        ordinary way then repeats with a clear error."""
        x, states = tensors[0], tensors[1:]
        try:
            self.bind(bound)
            if self.bound_to is not None:
                results = op.bound_operator()(x, states, self.ticket, self.batch_first, op.WORK_PER_THREAD)
            else:  # The operator has to check the weights itself.
                results = op.recurrent(
                    x,
                    states,
                    bound.weights(),
                    bound.program,
                    self.boundary,
                    directions=bound.directions,
                    batch_first=self.batch_first,
                    owner=bound.owner,
                )
        except RuntimeError:
            self.bound_to = None
            return None
        if self.layout is not None:
            return results
        last = results if self.rank == 2 else results[1:]
        state = tuple(last) if self.states > 1 else last[0]
        return state if self.rank == 2 else (results[0], state)

    def bind(self, bound: BoundModule) -> None:
        """Bind the call to the weights of ``bound`` as they are now, which ``ticket`` is then for; if that is
        impossible, ``bound_to`` is None.

        Raises:
            RuntimeError: the operator refuses the weights.
        """
        # A lowered graph checks its state before a call, and makes new modules when the state changed.
        if are_large_read_one_by_one(bound.each_weight()):
            self.bound_to = None
        elif self.layout is None or self.bound_to is None or not bound.are_in_state:
            self._bind_to(bound)

    def _bind_to(self, bound: BoundModule) -> None:
        """Bind the call to the current weights if they have changed; not if they are inference tensors, which
        count no versions."""
        weights = list(bound.each_weight())
        if weights[0].is_inference():
            self.bound_to = None
            return
        # Setting ``weight.data``, as ``nn.Module.to`` does, changes neither the tensor nor its version.
        versions = [weight._version for weight in weights]
        bound_to = (bound.owner, [*map(id, weights)], versions, [*map(data_address, weights)])
        if bound_to == self.bound_to:
            return
        if not kernel_build().is_loaded:
            raise RuntimeError("there is no kernel")
        self.ticket = op.bind_call(weights, bound.program, self.boundary, bound.owner, sum(versions))
        self.bound_to = bound_to


def direct_call(contract: Any, layout: CallLayout | None, quantized: tuple[int, ...] = ()) -> DirectCall:
    """Return the direct call of a module with ``contract``, a ``RecurrentContract``.

    Args:
        layout: the layout of the graph's call; None for calls by a user.
        quantized: the indices of the results to return as integers.
    """
    states = len(contract.kind.states)
    form = (layout, contract.rank, contract.batch_first)
    floats = ((contract.input_size, None),)
    if layout is None:
        return DirectCall(*form, programs.floats_around(programs.as_numbers(floats), states), states)
    count = layout.inputs.count()
    args, kwargs = layout.inputs.put_together(range(count), (None,) * count)
    x, hidden = contract.arguments_of("", args, kwargs)
    given = () if hidden is None else (hidden,) if states == 1 else tuple(hidden)
    places = (x, *given)
    if not all(isinstance(place, int) for place in places) or len(given) not in (0, states):
        return DirectCall(*form, [], states, is_possible=False)
    all_qparams = layout.input_qparams or (None,) * count
    rows = [_rows_on(all_qparams[place]) for place in given]
    x_qparams = all_qparams[x]
    is_known = all(item is not None for item in rows) and (
        x_qparams is None or x_qparams.dtype in KERNEL_DTYPES
    )
    columns = tuple(
        programs.as_numbers(programs.column_qparams(x_qparams, contract.input_size, contract.rank))
    )
    on = tuple(row or () for row in rows) or ((),) * states
    handed = {index: layout.output_qparams[index] for index in quantized}
    if not all(isinstance(qparams, PerTensorQParams) for qparams in handed.values()):
        is_known = False  # The operator's results have one scale each.
    # A cell has no output besides its states.
    first = contract.rank == 2
    by_result = {
        index + first: programs.qparams_row(qparams)
        for index, qparams in handed.items()
        if isinstance(qparams, PerTensorQParams)
    }
    results = tuple(by_result.get(index) for index in range(1 + states))
    boundary = programs.Boundary(columns, on, results)
    return DirectCall(*form, boundary.numbers(), states, places, is_possible=is_known)


def _rows_on(qparams: QParams | None) -> tuple[programs.QParamsRow, ...] | None:
    """Return the qparams of a state's rows; empty for floats, None if the operator does not support them."""
    if qparams is None:
        return ()
    if qparams.dtype not in KERNEL_DTYPES:
        return None
    if isinstance(qparams, PerTensorQParams):
        return (programs.qparams_row(qparams),)
    assert isinstance(qparams, PerChannelQParams)
    return (
        tuple(programs.qparams_row(item) for size, item in qparams.runs for _ in range(size))
        if qparams.axis == 0
        else None
    )


# A linear layer as a program of the native operator: the package's own product, on every engine and CPU.
#
# The program is a cell whose new state is a copy of its one linear, and whose old state is never read.


LINEAR_OPERATOR: Any = torch.ops.torchq_compat_native.recurrent.default
INPUT, STATE, PRODUCT, RESULT = range(4)


@dataclass(frozen=True)
class LinearWeight:
    """The weight of a linear layer.

    Attributes:
        values: int8, of shape (N, K).
        scales: float, of shape (N,); None: per tensor.
        zero_points: integers, of shape (N,); None: per tensor.
        bias: float32, of shape (N,), or None.
        per_tensor: scale and zero point of a weight quantized per tensor.
    """

    values: Tensor
    scales: Tensor | None
    zero_points: Tensor | None
    bias: Tensor | None
    per_tensor: tuple[float, int] = (1.0, 0)


def linear_call(
    weight: LinearWeight,
    columns: programs.ColumnQParams,
    *,
    dynamic: programs.DynamicQParams | None = None,
    output: PerTensorQParams | None = None,
) -> tuple[Any, ...]:
    """Return the arguments of ``LINEAR_OPERATOR`` after x, (rows, K), that compute a linear layer: the one
    result has the shape (rows, N). The operator does not check whether weights were written in place.

    Args:
        weight: the weight of the layer; its tensors must not change.
        columns: the qparams of the columns of x, which may be integers or floats.
        dynamic: how to choose the qparams of x, in place of ``columns``.
        output: the 8-bit qparams of the result's integers; None: the result is floats.
    """
    outputs, inputs = weight.values.shape
    # Two instructions: the linear reads only x and is computed for all steps at once, a state at every step.
    instructions = (
        programs.Instruction(
            programs.Op.LINEAR,
            PRODUCT,
            ((INPUT, 0),),
            outputs,
            outputs,
            True,
            weight=0,
            input=dynamic,
            weight_qparams=weight.per_tensor,
        ),
        programs.Instruction(programs.Op.COPY, RESULT, ((PRODUCT, 0),), outputs, outputs, False),
    )
    of_all, of_a_step = programs.SlotRow(outputs, outputs, True), programs.SlotRow(outputs, outputs, False)
    slots = (programs.SlotRow(inputs, inputs, True), of_a_step, of_all, of_a_step)
    names = programs.WeightNames("values", "scales", "zero_points", "bias")
    program = programs.CellProgram(instructions, slots, (RESULT,), (names,))
    parts = (weight.scales, weight.zero_points, weight.bias)
    mask = programs.weight_mask(parts)
    numbers = programs.CellNumbers(program.table, program.constants, (mask,), backward=False)
    result = None if output is None else programs.qparams_row(output)
    boundary = programs.Boundary(tuple(programs.as_numbers(columns)), ((),), (None, result)).numbers()
    given = [item for item in (weight.values, *parts) if item is not None]
    module, owner = programs.ModuleNumbers(((numbers,),)).tensor(), next(OWNERS)
    weakref.finalize(module, forget, owner).atexit = False
    drop_forgotten()
    directions, version = 1, 1
    return [], given, module, boundary, list(NO_SIZES), directions, False, owner, version
