"""A module's arguments of the native operator that do not change, bound once for each direction."""

import itertools
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from torchq_compat.recurrent.kernel import program as programs
from torchq_compat.recurrent.kernel.op import NO_SIZES, drop_forgotten, forget, recurrent
from torchq_compat.support.graph_nodes import attribute_at
from torchq_compat.support.process_state import is_compiling

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
                tuple(
                    programs.CellNumbers(
                        direction.program.table, direction.program.constants, direction.masks, own, index == 1
                    )
                    for index, direction in enumerate(layer)
                )
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
            return [attribute_at(item.owner, name) for item in self.bound for name in item.names]
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
        return recurrent(
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
