"""What observed and converted recurrent modules have in common: they are made of cells."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Self

import torch
from torch import nn

from torchq_compat.custom_modules.layouts import CallLayout
from torchq_compat.custom_modules.leaf_module import LeafModule
from torchq_compat.custom_modules.recurrent.cell_graph import CellGraphModule
from torchq_compat.custom_modules.recurrent.constructors import CellSpecs
from torchq_compat.custom_modules.recurrent.errors import RecurrentModuleError

__all__ = ["CellOwner", "ConvertedModule", "ObservedModule"]


class CellOwner(LeafModule, ABC):
    """A recurrent module made of prepared or converted cells.

    Attributes:
        specs: what the cells are observed with.
        split_gates: whether each gate has a projection pair of its own.
        module_path: where it stands in the model, for messages.
    """

    specs: CellSpecs
    split_gates: bool
    qconfig: Any
    module_path: str

    def __init__(self) -> None:
        # Not super().__init__: the legacy classes would make float layers with random weights.
        nn.Module.__init__(self)
        self.module_path = ""
        self.leaf_layouts: list[CallLayout] = []

    @abstractmethod
    def cells(self) -> Iterator[tuple[str, CellGraphModule]]:
        """(path inside the module, cell) of every layer and direction."""

    @abstractmethod
    def state_dtypes(self) -> tuple[torch.dtype, ...]:
        """The quantized dtype of each flat result: of the output first, if it is apart from the states."""

    def take_over(self, other: CellOwner) -> None:
        """Stand where ``other`` stood."""
        self.specs, self.split_gates = other.specs, other.split_gates
        self.module_path = other.module_path
        self.leaf_layouts = list(other.leaf_layouts)
        self.train(other.training)


class ObservedModule(CellOwner):
    """A recurrent module whose parts are observed, or fake-quantized, one by one."""

    @classmethod
    def observe(cls, module: nn.Module, specs: CellSpecs, *, split_gates: bool = False) -> Self:
        """An observed module with copies of the parameters of the float ``module``."""
        observed = cls.with_prepared_cells(module, specs, split_gates=split_gates)
        observed.split_gates = split_gates
        observed.specs = specs
        observed.qconfig = specs.op_specs.qconfig
        observed.train(module.training)
        return observed

    @classmethod
    @abstractmethod
    def with_prepared_cells(cls, module: nn.Module, specs: CellSpecs, *, split_gates: bool) -> Self:
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
    """A recurrent module of q-dq cells with folded integer weights."""

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
        return converted

    @classmethod
    @abstractmethod
    def with_converted_cells(cls, other: Any) -> Self:
        """The module around converted copies of the cells of ``other``."""
