"""Recurrent modules as custom modules: the handlers the stages call, one for each family."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from torchq_compat.annotate.leaf_boundary import LeafBoundary
from torchq_compat.custom_modules.layouts import CallLayout
from torchq_compat.custom_modules.leaf_module import LeafModule
from torchq_compat.custom_modules.leaf_op import FakeCall
from torchq_compat.custom_modules.recurrent.cell_graph import part_nodes, part_of, saturated_parts
from torchq_compat.custom_modules.recurrent.cell_owner import CellOwner, ConvertedModule, ObservedModule
from torchq_compat.custom_modules.recurrent.constructors import CellSpecs
from torchq_compat.custom_modules.recurrent.errors import RecurrentModuleError
from torchq_compat.custom_modules.recurrent.families import FAMILIES, RecurrentFamily
from torchq_compat.custom_modules.registry import (
    ConvertRequest,
    CustomModuleHandler,
    ObserveRequest,
    register,
)
from torchq_compat.decisions import Action, Decision
from torchq_compat.observed_graph import ObserverFault, observer_faults

__all__ = ["RecurrentHandler"]

QUANTIZE = torch.ops.quantized_decomposed.quantize_per_tensor.default


class RecurrentHandler(CustomModuleHandler):
    """One family: a float class, its observed class and its converted class."""

    def __init__(self, family: RecurrentFamily) -> None:
        self.family = family

    def takes(self, float_class: type[nn.Module], observed_class: type[nn.Module]) -> bool:
        ours = tuple(filter(None, (self.family.observed, self.family.legacy_observed)))
        return issubclass(float_class, self.family.float_class) and issubclass(observed_class, ours)

    def is_opaque(self, module: nn.Module) -> bool:
        return isinstance(module, self.family.float_class) and isinstance(module, nn.RNNBase)

    def fake_call(self, module: nn.Module, path: str) -> FakeCall:
        return self.family.fake_call(module, path)

    def owns(self, leaf: nn.Module) -> bool:
        return isinstance(leaf, (self.family.observed, self.family.converted))

    def observe(self, request: ObserveRequest) -> LeafModule:
        observed = self._observed(request)
        observed.module_path = request.path
        return observed

    def _observed(self, request: ObserveRequest) -> ObservedModule:
        specs = CellSpecs(request.specs)
        standard = (self.family.observed, self.family.legacy_observed)
        if _inherits(request.observed_class, "from_float", standard):
            return self.family.observed.observe(request.module, specs)
        request.module.qconfig = request.qconfig  # type: ignore[assignment]  # where FX puts it
        made = request.observed_class.from_float(request.module)  # type: ignore[attr-defined]
        if isinstance(made, self.family.observed):
            return made
        if self.family.legacy_observed is not None and isinstance(made, self.family.legacy_observed):
            if any(isinstance(m, GraphModule) for m in made.modules()):
                raise RecurrentModuleError.observed_by_fx(request.path)
            # Observed by the eager engine, every part from its qconfig: the cells that are built here.
            return self.family.observed.observe(request.module, specs, split_gates=_is_split(made))
        raise RecurrentModuleError.unusable_result(request.path, "from_float", made)

    def boundary(self, leaf: LeafModule, request: ObserveRequest, layout: CallLayout) -> LeafBoundary:
        """Every input is quantized once, by the QConfig; every result lies on a grid of the cells."""
        assert isinstance(leaf, CellOwner)
        dtypes = leaf.state_dtypes()
        return LeafBoundary(
            input_specs=(request.specs.activation,) * layout.inputs.count(),
            output_dtypes=dtypes,
            output_specs=(None,) * len(dtypes),
            accepted=frozenset(dtypes),
        )

    def convert(self, request: ConvertRequest) -> LeafModule:
        leaf, quantized_class = request.leaf, request.quantized_class
        standard = (self.family.converted, self.family.legacy_converted)
        if quantized_class is None or _inherits(quantized_class, "from_observed", standard):
            return self.family.converted.from_observed(leaf)
        made = quantized_class.from_observed(leaf)  # type: ignore[attr-defined]
        if not isinstance(made, ConvertedModule):
            raise RecurrentModuleError.unusable_result(request.path, "from_observed", made)
        return made

    def remedy(self, module: nn.Module) -> str | None:
        if not isinstance(module, self.family.float_class):
            return None
        return (
            "map it: PrepareCustomConfig().set_float_to_observed_mapping("
            f"torch.nn.{self.family.float_class.__name__}, {self.family.map_to})"
        )

    def observer_faults(self, leaf: LeafModule) -> list[tuple[str, ObserverFault]]:
        assert isinstance(leaf, CellOwner)
        return [
            (f"{path}.{name}", fault) for path, cell in leaf.cells() for name, fault in observer_faults(cell)
        ]

    def explain(self, leaf: LeafModule, path: str) -> Iterator[Decision]:
        assert isinstance(leaf, CellOwner)
        for cell_path, cell in leaf.cells():
            saturated = dict(saturated_parts(cell))
            for name, node in part_nodes(cell):
                details = _observation(cell, node)
                if name in saturated:
                    details["saturated"] = saturated[name]
                where, formula = f"{path}.{cell_path}.{name}", part_of(node).formula
                yield Decision(where, formula, Action.QUANTIZED, "part of the cell", details)


def _inherits(cls: type[nn.Module], method: str, standard: tuple[type[nn.Module] | None, ...]) -> bool:
    """Whether ``cls`` uses the ``method`` of one of the ``standard`` classes as it is."""
    own = getattr(cls, method).__func__
    return any(getattr(known, method).__func__ is own for known in standard if known is not None)


def _is_split(module: nn.Module) -> bool:
    return any(isinstance(getattr(m, "igates", None), nn.ModuleDict) for m in module.modules())


def _observation(cell: GraphModule, node: Node) -> dict[str, Any]:
    """dtype, and scale and zero point once they are fixed, of what observes ``node``."""
    for user in node.users:
        if user.op == "call_module":
            observer = cell.get_submodule(str(user.target))
            return {"observer": type(observer).__name__, "dtype": observer.dtype}
        if user.target is QUANTIZE:
            _, scale, zero_point, _, _, dtype = user.args
            return {"dtype": dtype, "scale": scale, "zero_point": zero_point}
    return {}


for family in FAMILIES:
    register(RecurrentHandler(family))
