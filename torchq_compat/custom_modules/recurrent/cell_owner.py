"""What observed and converted recurrent modules have in common: they are made of cells."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, Self

import torch
from torch import nn

from torchq_compat.custom_modules.part_owner import PartOwner
from torchq_compat.custom_modules.part_specs import PartSpecs
from torchq_compat.custom_modules.recurrent.cell_graph import CellGraphModule
from torchq_compat.custom_modules.recurrent.errors import RecurrentModuleError

__all__ = ["CellOwner", "ConvertedModule", "ObservedModule"]


class CellOwner(PartOwner):
    """A recurrent module made of prepared or converted cells.

    Attributes:
        split_gates: whether each gate has a projection pair of its own.
    """

    split_gates: bool

    @abstractmethod
    def cells(self) -> Iterator[tuple[str, CellGraphModule]]:
        """(path inside the module, cell) of every layer and direction."""

    def graphs(self) -> Iterator[tuple[str, CellGraphModule]]:
        return self.cells()


class ObservedModule(CellOwner):
    """A recurrent module whose parts are observed, or fake-quantized, one by one."""

    @classmethod
    def observe(cls, module: nn.Module, specs: PartSpecs, *, split_gates: bool = False) -> Self:
        """An observed module with copies of the parameters of the float ``module``."""
        observed = cls.with_prepared_cells(module, specs, split_gates=split_gates)
        observed.split_gates = split_gates
        observed.specs = specs
        observed.qconfig = specs.op_specs.qconfig
        observed.train(module.training)
        return observed

    @classmethod
    @abstractmethod
    def with_prepared_cells(cls, module: nn.Module, specs: PartSpecs, *, split_gates: bool) -> Self:
        """The module around the prepared cells of ``module``."""

    @classmethod
    def from_float(cls, other: nn.Module, qconfig: Any = None, split_gates: bool = False) -> Any:
        """Legacy signature. ``qconfig`` is used where ``other`` has none.

        Raises:
            ConfigError: neither has a qconfig.
        """
        from torchq_compat.recurrent_parts import get_individually_observed_parts

        if getattr(other, "qconfig", None) is None:
            other = copy.copy(other)
            other.qconfig = qconfig
        return get_individually_observed_parts(other, split_gates=split_gates)


class ConvertedModule(CellOwner):
    """A recurrent module of q-dq cells with folded integer weights.

    Lowered, and while torch.compile traces it, it runs on those integers.
    """

    is_lowered = False
    #: The cell loop reads and writes floats.
    leaf_in_floats = property(lambda self: self.is_lowered)

    #: What it is converted from.
    observed: type[ObservedModule]

    @classmethod
    def from_observed(cls, other: nn.Module) -> Self:
        """Convert every cell of ``other``, which is left as it is.

        Raises:
            CustomModuleError: ``other`` was not observed by this package.
        """
        if not isinstance(other, cls.observed):
            raise RecurrentModuleError.unusable_result("the observed module", "from_float", other)
        converted = cls.with_converted_cells(other)
        converted.take_over(other)
        converted.split_gates = other.split_gates
        return converted

    def runs_on_integers(self) -> bool:
        return self.is_lowered or (torch.compiler.is_compiling() and not torch.compiler.is_exporting())

    def lowered(self) -> Self:
        """This module on integers, with the same state. A cell the cell loop cannot run runs as before."""
        lowered = copy.copy(self)
        lowered.is_lowered = True
        return lowered

    @classmethod
    @abstractmethod
    def with_converted_cells(cls, other: Any) -> Self:
        """The module around converted copies of the cells of ``other``."""
