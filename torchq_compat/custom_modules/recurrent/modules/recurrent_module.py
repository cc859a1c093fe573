"""Recurrent modules: a contract, the layers it holds, and a runner chosen for each call.

Observed, converted and dynamically quantized modules differ in the cells they hold and in what stands at
their boundary, not in how they run.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.ao.quantization import QConfig

from torchq_compat.custom_modules.parts.part_owner import PartOwner
from torchq_compat.custom_modules.parts.part_specs import PartSpecs
from torchq_compat.custom_modules.recurrent.cell.cell_graph import CellGraphModule
from torchq_compat.custom_modules.recurrent.cell.prepared_cell import prepared_cell
from torchq_compat.custom_modules.recurrent.loop_shape import LoopShape, shape_in_export
from torchq_compat.custom_modules.recurrent.modules.contract import check_devices, check_same_dtype
from torchq_compat.custom_modules.recurrent.modules.contracts import RecurrentContract, contract_of
from torchq_compat.custom_modules.recurrent.modules.given_specs import given_specs
from torchq_compat.custom_modules.recurrent.modules.layers import RecurrentDirection, RecurrentLayer
from torchq_compat.custom_modules.recurrent.modules.runners import (
    NativeRunner,
    OpaqueRunner,
    PythonRunner,
    Runner,
    TracedRunner,
)
from torchq_compat.custom_modules.recurrent.native.columns import qparams_of_call
from torchq_compat.errors import CustomModuleError, RecurrentModuleError
from torchq_compat.opaque_calls.layouts import CallLayout
from torchq_compat.qspecs.qparams import QParams
from torchq_compat.support.argument_checks import FLAG, checked_arguments, instance_of, optional

__all__ = ["ConvertedRecurrent", "ObservedRecurrent", "RecurrentModule"]


class RecurrentModule(PartOwner):
    """A recurrent module made of prepared or converted cells.

    Args:
        contract: how it is called, and where its cells stand.
        layers: the cells.

    Attributes:
        split_gates: whether each gate has a projection pair of its own.
        is_lowered: whether calls go to the compiled cell loop.
    """

    split_gates: bool
    is_lowered = False
    #: The cell loop reads and writes floats.
    opaque_in_floats = property(lambda self: self.is_lowered)

    def __init__(self, contract: RecurrentContract, layers: list[RecurrentLayer]) -> None:
        super().__init__()
        self.contract = contract
        vars(self).update(contract.attributes())
        contract.place(self, layers)

    def opaque_call(self, *args: Any, **kwargs: Any) -> Any:
        """As the float module: ``rnn(x)``, ``rnn(x, state)``, ``rnn(x, hx=state)``; x may be a
        PackedSequence, the output then is one.

        Raises:
            CustomModuleError: arguments the float module would refuse.
        """
        arguments = self.contract.arguments_of(self.module_path, args, kwargs)
        check_devices(self.contract.kind, self.module_path, arguments, self._device())
        check_same_dtype(self.contract.kind, self.module_path, arguments)
        return self.contract.call(self, self.runner(), args, kwargs)

    def opaque_call_from_graph(
        self, layout: CallLayout, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        arguments = self.contract.arguments_of(self.module_path, args, kwargs)
        check_devices(self.contract.kind, self.module_path, arguments, self._device())
        qparams = self.contract.input_of(self.module_path, *qparams_of_call(layout))
        return self.contract.call(self, self.runner(), args, kwargs, qparams)

    def _device(self) -> torch.device | None:
        """Return where the weights are; None in a capture, which looks at devices itself."""
        if torch.compiler.is_compiling():
            return None
        return next((tensor.device for tensor in chain(self.parameters(), self.buffers())), None)

    def runner(self) -> Runner:
        """Return the runner of the next call."""
        if torch.compiler.is_exporting():
            return OpaqueRunner() if shape_in_export() is LoopShape.OPAQUE else TracedRunner()
        if self.is_lowered or (torch.compiler.is_compiling() and self.can_be_lowered):
            return NativeRunner()
        return PythonRunner()

    #: Whether the cells may be converted ones, which the compiled cell loop runs.
    can_be_lowered = False

    def lowered(self) -> Self:
        """This module in the compiled cell loop. A cell that the loop cannot run runs as before.

        It stands for this module in a lowered model: state, submodules and hooks are the same, later ones
        too.
        """
        lowered = type(self).__new__(type(self))
        vars(lowered).update(vars(self))
        lowered.is_lowered = True
        return lowered

    def __copy__(self) -> Self:
        """The same cells in a module of its own: what is registered or set on one is not on the other."""
        copied = type(self).__new__(type(self))
        own = vars(nn.Module()).keys() | {"opaque_layouts"}
        for name, value in vars(self).items():
            is_container = isinstance(value, (dict, list, set))
            vars(copied)[name] = copy.copy(value) if name in own and is_container else value
        return copied

    def program_problems(self) -> list[str]:
        """List the reasons why cells cannot run in the compiled cell loop."""
        directions = [direction for layer in self.contract.layers(self) for direction in layer.directions()]
        return [problem for each in directions if (problem := each.program_problem())]

    def cells(self) -> Iterator[tuple[str, CellGraphModule]]:
        """Return (path inside the module, cell) of every layer and direction."""
        return self.contract.cells(self)

    def graphs(self) -> Iterator[tuple[str, CellGraphModule]]:
        return self.cells()

    def result_dtypes(self, count: int) -> tuple[torch.dtype | None, ...]:
        return tuple(self.specs.group_dtype(group) for group in self.contract.result_groups())

    def converted_layers(self) -> list[RecurrentLayer]:
        """Converted copies of the layers."""
        return [layer.converted() for layer in self.contract.layers(self)]

    def take_over_from(self, other: RecurrentModule) -> None:
        """Stand where ``other`` stood."""
        self.take_over(other)
        self.split_gates = other.split_gates


class ObservedRecurrent(RecurrentModule):
    """A recurrent module whose parts are observed, or fake-quantized, one by one."""

    #: What it is made from.
    float_class: type[nn.Module]

    @classmethod
    def observe(cls, module: nn.Module, specs: PartSpecs, *, split_gates: bool = False) -> Self:
        """Return an observed module with copies of the parameters of the float ``module``."""
        contract = contract_of(module)
        observed = cls(contract, prepared_layers(contract, module, specs, split_gates=split_gates))
        observed.split_gates = split_gates
        observed.specs = specs
        observed.qconfig = specs.op_specs.qconfig
        observed.train(module.training)
        return observed

    @classmethod
    @checked_arguments(
        other=instance_of(nn.Module, what="an nn.Module"),
        qconfig=optional(instance_of(QConfig)),
        split_gates=FLAG,
    )
    def from_float(cls, other: nn.Module, qconfig: Any = None, split_gates: bool = False) -> Any:
        """Observe a float module that has a ``qconfig``, or is given one. Legacy signature.

        Raises:
            ConfigError: neither has a qconfig.
            CustomModuleError: ``other`` is of another kind.
        """
        # A subclass of a user's may have another constructor.
        bases = [base for base in cls.__mro__ if issubclass(base, ObservedRecurrent)]
        observed = next(base for base in bases if "float_class" in vars(base))
        if not isinstance(other, cls.float_class):
            raise CustomModuleError.call_failed(
                "other", f"an nn.{cls.float_class.__name__} is needed, got {type(other).__name__}"
            )
        if getattr(other, "qconfig", None) is None:
            other = copy.copy(other)
            other.qconfig = qconfig
        specs = given_specs(other, None, None, split_gates=split_gates, constructors={})
        return observed.observe(other, specs, split_gates=split_gates)


class ConvertedRecurrent(RecurrentModule):
    """A recurrent module of q-dq cells with folded integer weights."""

    #: What it is converted from.
    observed: type[ObservedRecurrent]
    can_be_lowered = True

    @property
    def opaque_shows_result_qparams(self) -> bool:  # type: ignore[override]
        return self.contract.shows_qparams_in_export

    @classmethod
    def from_observed(cls, other: nn.Module) -> Self:
        """Convert every cell of ``other``, which is left as it is.

        Raises:
            CustomModuleError: ``other`` was not observed by this package.
        """
        if not isinstance(other, cls.observed):
            raise RecurrentModuleError.unusable_result("the observed module", "from_float", other)
        converted = cls(other.contract, other.converted_layers())
        converted.take_over_from(other)
        return converted

    def opaque_output_qparams(self, results: list[Tensor]) -> tuple[QParams | None, ...]:
        return self.contract.output_qparams(self, results)


def prepared_layers(
    contract: RecurrentContract, module: nn.Module, specs: PartSpecs, *, split_gates: bool
) -> list[RecurrentLayer]:
    """Return the prepared cells of ``module``, with copies of its parameters."""
    hidden = specs.group_dtype(contract.kind.states[0].group)

    def direction(layer: int, suffix: str) -> RecurrentDirection:
        input_dtype = hidden if layer else None
        cell = prepared_cell(module, specs, split_gates=split_gates, suffix=suffix, input_dtype=input_dtype)
        return RecurrentDirection(cell)

    return [
        RecurrentLayer([direction(layer, suffix) for suffix in suffixes])
        for layer, suffixes in enumerate(contract.suffixes())
    ]
