"""Dynamically quantized recurrent modules: integer weights, activations quantized at run time.

Legacy: ``torch.ao.nn.quantized.dynamic.LSTM``, ``GRU`` and the cells, which FX inserts for a dynamic QConfig
without a mapping. As in torch.ao, the input projection of all steps is one linear, whose input is quantized
as a whole, and the hidden state is quantized step by step. Only the linears are quantized.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from torchq_compat.capture.capture_by_structure import capture_by_structure
from torchq_compat.custom_modules.parts.part import PartKind
from torchq_compat.custom_modules.parts.part_graph import PartGraphModule, prepare_parts
from torchq_compat.custom_modules.parts.part_specs import DynamicPartSpecs, PartSpecs
from torchq_compat.custom_modules.recurrent.cell.cell_graph import CellGraphModule
from torchq_compat.custom_modules.recurrent.cell.float_cell import FloatCell
from torchq_compat.custom_modules.recurrent.cell.kinds import CellKind, kind_of
from torchq_compat.custom_modules.recurrent.cell.prepared_cell import float_cell
from torchq_compat.custom_modules.recurrent.modules.contracts import RecurrentContract, contract_of
from torchq_compat.custom_modules.recurrent.modules.layers import RecurrentDirection, RecurrentLayer
from torchq_compat.custom_modules.recurrent.modules.recurrent_module import RecurrentModule
from torchq_compat.qspecs.quantization_specs import OpSpecs
from torchq_compat.support.later_stages import scripted_recurrent
from torchq_compat.support.torch_ao import QConfig

__all__ = ["DynamicRecurrent", "convert_dynamic", "prepare_dynamic", "quantize_recurrent"]

#: Arguments of the float modules' constructors.
ARGUMENTS = (
    *("input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional"),
    *("proj_size", "nonlinearity"),
)
#: Defaults of the arguments that ``repr`` shows only if they differ.
SHOWN = {
    "num_layers": 1,
    "bias": True,
    "batch_first": False,
    "dropout": 0.0,
    "bidirectional": False,
    "proj_size": 0,
    "nonlinearity": "tanh",
}


class InputProjection(nn.Module):
    """The input projection ``W_ih x + b_ih`` of all steps: (T, B, I) -> (T, B, G*H)."""

    def __init__(self, cell: FloatCell) -> None:
        super().__init__()
        self.igates = cell.igates

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (self.igates(x),)


class ProjectedStep(nn.Module):
    """One time step after the input projection: the cell, called with the result of ``InputProjection``."""

    def __init__(self, cell: FloatCell) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, projected: Tensor, hx: Tensor, cx: Tensor | None = None) -> tuple[Tensor, ...]:
        return self.cell.step([projected], *(state for state in (hx, cx) if state is not None))


class DynamicRecurrent(RecurrentModule):
    """A dynamically quantized recurrent module: prepared, with float weights, or converted. Its results are
    floats."""

    can_be_lowered = True
    #: The float module it was made from, if it is part of an eager model.
    made_from: MadeFrom | None = None
    is_dynamic = True

    def result_dtypes(self, count: int) -> tuple[torch.dtype | None, ...]:
        return (None,) * count

    def flatten_parameters(self) -> None:
        """Do nothing; it exists because forward methods call it on LSTM, GRU and RNN."""

    def __prepare_scriptable__(self) -> nn.Module:
        """Return the scriptable form of the module; torch.jit.script calls this method."""
        return scripted_recurrent(self, self.contract)

    def _get_name(self) -> str:
        return f"DynamicQuantized{self.contract.kind.name}"

    def __repr__(self) -> str:
        shown = dict(self.made_from.arguments) if self.made_from else self.contract.attributes()
        sizes = [str(shown.pop(name)) for name in ("input_size", "hidden_size") if name in shown]
        others = [f"{name}={shown[name]}" for name in SHOWN if shown.get(name, SHOWN[name]) != SHOWN[name]]
        return f"{self._get_name()}({', '.join([*sizes, *others])})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(vars(self), memo))
        return copied

    def __reduce__(self) -> Any:
        """Pickle the float module's class, arguments and QConfig: a captured cell cannot be pickled, so the
        module of an eager model is made again."""
        if self.made_from is None:
            return super().__reduce__()
        return _made_again, (self.made_from, self.module_path, self.is_lowered, self.state_dict())


@dataclass(frozen=True)
class MadeFrom:
    """The float module that a dynamically quantized module was made from."""

    float_class: type[nn.Module]
    arguments: Mapping[str, Any]
    qconfig: QConfig

    @classmethod
    def of(cls, module: nn.Module, qconfig: QConfig) -> MadeFrom:
        given = {name: getattr(module, name) for name in ARGUMENTS if hasattr(module, name)}
        if not given.get("proj_size"):
            given.pop("proj_size", None)  # GRU and RNN refuse it, even 0.
        return cls(type(module), given, qconfig)


def quantize_recurrent(module: nn.Module, qconfig: QConfig, path: str) -> DynamicRecurrent:
    """Return a converted module made from the float ``module``, which is left unchanged.

    Args:
        path: path of the module in the model, for messages.
    """
    prepared = prepare_dynamic(module, DynamicPartSpecs(OpSpecs(qconfig)))
    prepared.module_path = path
    converted = convert_dynamic(prepared).eval()
    converted.made_from = MadeFrom.of(module, qconfig)
    return converted


def _made_again(made_from: MadeFrom, path: str, is_lowered: bool, state: dict[str, Any]) -> DynamicRecurrent:
    with torch.random.fork_rng(devices=()):
        module = made_from.float_class(**made_from.arguments)
    made = quantize_recurrent(module, made_from.qconfig, path)
    made.load_state_dict(state)
    return made.lowered() if is_lowered else made


def prepare_dynamic(module: nn.Module, specs: PartSpecs) -> DynamicRecurrent:
    """Return a prepared module with copies of the parameters of ``module``, its linears marked for dynamic
    quantization."""
    contract = contract_of(module)
    made = DynamicRecurrent(contract, _prepared_layers(contract, module, specs))
    made.specs = specs
    made.split_gates = False
    made.qconfig = specs.op_specs.qconfig
    made.train(module.training)
    return made


def convert_dynamic(prepared: DynamicRecurrent) -> DynamicRecurrent:
    """Return the q-dq form of ``prepared`` with integer weights folded; ``prepared`` is left unchanged."""
    converted = DynamicRecurrent(prepared.contract, prepared.converted_layers())
    converted.take_over_from(prepared)
    return converted


def _prepared_layers(
    contract: RecurrentContract, module: nn.Module, specs: PartSpecs
) -> list[RecurrentLayer]:
    if isinstance(module, nn.RNNCellBase):
        kind, cell = contract.kind, float_cell(module, "", split_gates=False)
        prepared = CellGraphModule.wrap(_prepare(kind, cell, cell.example_inputs(), specs))
        return [RecurrentLayer([RecurrentDirection(prepared)])]
    return [
        RecurrentLayer([_prepared_direction(module, suffix, specs) for suffix in suffixes])
        for suffixes in contract.suffixes()
    ]


def _prepared_direction(module: nn.Module, suffix: str, specs: PartSpecs) -> RecurrentDirection:
    kind, cell = kind_of(module), float_cell(module, suffix, split_gates=False)
    x, *states = cell.example_inputs()
    projection = _prepare(kind, InputProjection(cell), (x.expand(3, *x.shape),), specs)
    (projected,) = (tensor.clone() for tensor in cell.project(x))
    step = _prepare(kind, ProjectedStep(cell), (projected.detach(), *states), specs, "cell.")
    return RecurrentDirection(CellGraphModule.wrap(step), PartGraphModule.wrap(projection))


def _prepare(
    kind: CellKind, module: nn.Module, example: tuple[Tensor, ...], specs: PartSpecs, prefix: str = ""
) -> GraphModule:
    linears = [part for part in kind.parts(split_gates=False, projected=True) if part.kind is PartKind.LINEAR]
    captured = capture_by_structure(module, example)
    return prepare_parts(captured, linears, specs, {}, prefix=prefix)
