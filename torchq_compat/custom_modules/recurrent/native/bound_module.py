"""A module's arguments of the operator, bound once: what does not change from call to call."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchq_compat.custom_modules.recurrent.native.columns import ColumnQParams, as_numbers
from torchq_compat.custom_modules.recurrent.native.module_numbers import (
    CellNumbers,
    ModuleNumbers,
    floats_around,
    weight_mask,
)
from torchq_compat.custom_modules.recurrent.native.op import NO_SIZES, drop_forgotten, forget, recurrent
from torchq_compat.custom_modules.recurrent.native.program import CellProgram

__all__ = ["BoundDirection", "BoundModule", "OwnedProgram"]

#: Names packed weights after who uses them; 0 is nobody.
OWNERS = itertools.count(1)


class OwnedProgram:
    """A program, and the module whose attributes its weights are."""

    def __init__(self, owner: nn.Module, program: CellProgram) -> None:
        self.owner = owner
        self.program = program


class BoundDirection:
    """One direction of one layer: where its weights are, and how its program is asked for.

    Args:
        owned: its program.
        cell: whose it is.
        current: gives the program it has now; None if it has none.
    """

    def __init__(
        self, owned: OwnedProgram, cell: nn.Module, current: Callable[[], CellProgram | None]
    ) -> None:
        self.program = owned.program
        self.cell = cell
        self.current = current
        self.owner = owned.owner
        weights = owned.program.weights
        self.masks = tuple(weight_mask(names[1:]) for names in weights)
        self.names = [name for names in weights for name in names if name is not None]


class BoundModule:
    """All layers of a module.

    Args:
        layers: the directions of each.
        columns: on which qparams the input of every layer but the first lies.
        homes: where the cells stand, and what they stand in: a dictionary of modules, a name in it, and the
            module of that name.

    Attributes:
        owner: see ``op.recurrent``.
        program: its numbers.
        are_in_state: whether the weights are parameters and buffers, all of them.
    """

    def __init__(
        self,
        layers: Sequence[Sequence[BoundDirection]],
        columns: Sequence[ColumnQParams],
        homes: Sequence[tuple[dict[str, Any], str, nn.Module]],
    ) -> None:
        self.homes = homes
        self.cells: list[Any] = [direction.cell for layer in layers for direction in layer]
        self.bound = [direction for layer in layers for direction in layer]
        self.directions = len(layers[0])
        self.states = len(self.bound[0].program.results)
        segments = [(), *(tuple(as_numbers(each)) for each in columns)]
        self.program = ModuleNumbers(
            tuple(
                tuple(
                    CellNumbers(
                        direction.program.table, direction.program.constants, direction.masks, own, index == 1
                    )
                    for index, direction in enumerate(layer)
                )
                for layer, own in zip(layers, segments, strict=True)
            )
        ).tensor()
        found = [_place(each.owner, name) for each in self.bound for name in each.names]
        self.places = [(home, name) for home, name, _ in found]
        self.are_in_state = all(is_in_state for _, _, is_in_state in found)
        self.owner = next(OWNERS)
        weakref.finalize(self, forget, self.owner).atexit = False
        drop_forgotten()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a module binds its own."""

    def is_current(self) -> bool:
        """Whether every cell is still there, with the program that was bound."""
        for home, name, module in self.homes:
            if home.get(name) is not module:
                return False
        return all(direction.current() is direction.program for direction in self.bound)

    def weights(self) -> list[Tensor]:
        """The weights as they are now."""
        if torch.compiler.is_compiling():
            # Dynamo knows where attributes of modules come from.
            return [operator.attrgetter(name)(each.owner) for each in self.bound for name in each.names]
        return self.weights_now()

    def weights_now(self) -> list[Tensor]:
        """``weights``, where nobody traces."""
        return [home[name] for home, name in self.places]

    def run(
        self,
        x: Tensor,
        states: Sequence[Tensor],
        columns: ColumnQParams,
        batch_sizes: Sequence[int] = (),
    ) -> list[Tensor]:
        """See ``op.recurrent``: x (T, B, I), or packed rows, or (B, I) for a cell."""
        boundary = floats_around(as_numbers(columns), self.states)
        return recurrent(
            x,
            states,
            self.weights(),
            self.program,
            boundary,
            batch_sizes=batch_sizes,
            directions=self.directions,
            owner=self.owner,
        )

    def run_exported(self, x: Tensor, states: Sequence[Tensor], columns: ColumnQParams) -> list[Tensor]:
        """As ``run``, for torch.export to trace: nobody owns the weights of a program."""
        return recurrent(
            x,
            states,
            self.weights(),
            self.program,
            floats_around(as_numbers(columns), self.states),
            batch_sizes=NO_SIZES,
            directions=self.directions,
        )


def _place(owner: nn.Module, path: str) -> tuple[dict[str, Any], str, bool]:
    """The dictionary that holds the tensor at ``path``, its name there, and whether it is in the state."""
    home, _, name = path.rpartition(".")
    module = owner.get_submodule(home)
    for tensors in (module._parameters, module._buffers):
        if name in tensors:
            return tensors, name, True
    return vars(module), name, False
