"""nn.LSTM and nn.LSTMCell as custom modules: the handlers the stages call."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from torchq_compat.custom_modules.leaf_module import LeafModule
from torchq_compat.custom_modules.leaf_op import FakeCall
from torchq_compat.custom_modules.recurrent.build import build_observed_cell, build_observed_lstm
from torchq_compat.custom_modules.recurrent.cell_graph import part_nodes, saturated_parts
from torchq_compat.custom_modules.recurrent.constructors import CellSpecs
from torchq_compat.custom_modules.recurrent.contract import LSTMStructure, call_lstm, fake_layers
from torchq_compat.custom_modules.recurrent.errors import RecurrentModuleError
from torchq_compat.custom_modules.recurrent.lstm import ConvertedLSTM, LSTMLoop, ObservedLSTM
from torchq_compat.custom_modules.recurrent.opaque import fake_rnn
from torchq_compat.custom_modules.recurrent.parts import lstm_parts
from torchq_compat.custom_modules.recurrent.single_cell import (
    ConvertedLSTMCell,
    LSTMCellCall,
    ObservedLSTMCell,
    fake_lstm_cell,
)
from torchq_compat.custom_modules.registry import CustomModuleHandler, ObserveRequest, register
from torchq_compat.decisions import Action, Decision
from torchq_compat.observed_graph import ObserverFault, observer_faults

__all__ = ["LSTMCellHandler", "LSTMHandler", "OtherRecurrentHandler"]

QUANTIZE = torch.ops.quantized_decomposed.quantize_per_tensor.default
FORMULAS = {
    part.name: part.formula
    for split in (False, True)
    for part in lstm_parts(split_gates=split, projected=True)
}


class CellBasedHandler(CustomModuleHandler):
    """What recurrent kinds have in common: they are made of prepared or converted cells.

    Attributes:
        float_class: the class it maps from.
        legacy_observed: the class of torch.ao a script maps to.
        legacy_quantized: the class of torch.ao it converts to, if there is one.
    """

    float_class: type[nn.Module]
    loop_class: type[LSTMLoop] | type[LSTMCellCall]
    legacy_observed: type[nn.Module]
    legacy_quantized: type[nn.Module] | None

    @abstractmethod
    def build(self, module: nn.Module, specs: CellSpecs, *, split_gates: bool) -> LeafModule:
        """The observed module of ``module``."""

    @abstractmethod
    def reference(self, leaf: LeafModule) -> LeafModule:
        """The converted module of ``leaf``."""

    def takes(self, float_class: type[nn.Module], observed_class: type[nn.Module]) -> bool:
        return issubclass(float_class, self.float_class) and issubclass(observed_class, self.legacy_observed)

    def owns(self, leaf: nn.Module) -> bool:
        return isinstance(leaf, self.loop_class)

    def observe(self, request: ObserveRequest) -> LeafModule:
        observed = self._observed(request)
        observed.module_path = request.path
        return observed

    def _observed(self, request: ObserveRequest) -> LSTMLoop | LSTMCellCall:
        specs = CellSpecs(request.specs)
        if self._inherits(request.observed_class, "from_float", self.legacy_observed):
            made: Any = self.build(request.module, specs, split_gates=False)
            return made  # type: ignore[no-any-return]
        request.module.qconfig = request.qconfig  # type: ignore[assignment]  # where FX puts it
        made = request.observed_class.from_float(request.module)  # type: ignore[attr-defined]
        if isinstance(made, self.loop_class):
            return made
        if isinstance(made, self.legacy_observed):
            if any(isinstance(m, GraphModule) for m in made.modules()):
                raise RecurrentModuleError.observed_by_fx(request.path)
            # Observed by the eager engine, every part from its qconfig: the cells that are built here.
            rebuilt: Any = self.build(request.module, specs, split_gates=_is_split(made))
            return rebuilt  # type: ignore[no-any-return]
        raise RecurrentModuleError.unusable_result(request.path, "from_float", made)

    def convert(self, leaf: LeafModule, quantized_class: type[nn.Module] | None, path: str) -> LeafModule:
        if quantized_class is None or self._inherits(quantized_class, "from_observed", self.legacy_quantized):
            return self.reference(leaf)
        made = quantized_class.from_observed(leaf)  # type: ignore[attr-defined]
        if not isinstance(made, self.loop_class):
            raise RecurrentModuleError.unusable_result(path, "from_observed", made)
        return made

    def _inherits(self, cls: type[nn.Module], method: str, base: type[nn.Module] | None) -> bool:
        """Whether ``cls`` is ours, or uses the ``method`` of torch.ao's ``base`` as it is."""
        if issubclass(cls, self.loop_class):
            return True
        return base is not None and getattr(cls, method).__func__ is getattr(base, method).__func__

    def observer_faults(self, leaf: LeafModule) -> list[tuple[str, ObserverFault]]:
        assert isinstance(leaf, (LSTMLoop, LSTMCellCall))
        return [
            (f"{path}.{name}", fault) for path, cell in leaf.cells() for name, fault in observer_faults(cell)
        ]

    def explain(self, leaf: LeafModule, path: str) -> Iterator[Decision]:
        assert isinstance(leaf, (LSTMLoop, LSTMCellCall))
        for cell_path, cell in leaf.cells():
            saturated = dict(saturated_parts(cell))
            for name, node in part_nodes(cell):
                details = _observation(cell, node)
                if name in saturated:
                    details["saturated"] = saturated[name]
                yield Decision(
                    f"{path}.{cell_path}.{name}",
                    FORMULAS[name],
                    Action.QUANTIZED,
                    "part of the cell",
                    details,
                )


class LSTMHandler(CellBasedHandler):
    """nn.LSTM -> ObservedLSTM -> ConvertedLSTM."""

    float_class = nn.LSTM
    loop_class = LSTMLoop
    legacy_observed = torch.ao.nn.quantizable.LSTM
    legacy_quantized = torch.ao.nn.quantized.LSTM

    def is_opaque(self, module: nn.Module) -> bool:
        return isinstance(module, nn.LSTM)

    def fake_call(self, module: nn.Module, path: str) -> FakeCall:
        assert isinstance(module, nn.LSTM)
        structure = LSTMStructure.of(module)

        def fake(*args: Any, **kwargs: Any) -> Any:
            return call_lstm(structure, path, fake_layers(structure), args, kwargs)

        return fake

    def build(self, module: nn.Module, specs: CellSpecs, *, split_gates: bool) -> ObservedLSTM:
        assert isinstance(module, nn.LSTM)
        return build_observed_lstm(module, specs, split_gates=split_gates)

    def reference(self, leaf: LeafModule) -> ConvertedLSTM:
        assert isinstance(leaf, ObservedLSTM)
        return ConvertedLSTM.from_observed(leaf)

    def output_dtypes(self, leaf: LeafModule) -> tuple[torch.dtype | None, ...]:
        assert isinstance(leaf, ObservedLSTM)
        return leaf.specs.hidden_dtype, leaf.specs.hidden_dtype, leaf.specs.cell_state_dtype

    def remedy(self, module: nn.Module) -> str | None:
        return _map_it("LSTM") if isinstance(module, nn.LSTM) else None


class LSTMCellHandler(CellBasedHandler):
    """nn.LSTMCell -> ObservedLSTMCell -> ConvertedLSTMCell."""

    float_class = nn.LSTMCell
    loop_class = LSTMCellCall
    legacy_observed = torch.ao.nn.quantizable.LSTMCell
    legacy_quantized = None

    def is_opaque(self, module: nn.Module) -> bool:
        return False

    def fake_call(self, module: nn.Module, path: str) -> FakeCall:
        assert isinstance(module, nn.LSTMCell)
        return fake_lstm_cell(module, path)

    def build(self, module: nn.Module, specs: CellSpecs, *, split_gates: bool) -> ObservedLSTMCell:
        assert isinstance(module, nn.LSTMCell)
        return build_observed_cell(module, specs, split_gates=split_gates)

    def reference(self, leaf: LeafModule) -> ConvertedLSTMCell:
        assert isinstance(leaf, ObservedLSTMCell)
        return ConvertedLSTMCell.from_observed(leaf)

    def output_dtypes(self, leaf: LeafModule) -> tuple[torch.dtype | None, ...]:
        assert isinstance(leaf, ObservedLSTMCell)
        return leaf.specs.hidden_dtype, leaf.specs.cell_state_dtype

    def remedy(self, module: nn.Module) -> str | None:
        return _map_it("LSTMCell") if isinstance(module, nn.LSTMCell) else None


class OtherRecurrentHandler(CustomModuleHandler):
    """GRU, RNN and their cells: kept float and whole, and said so."""

    def takes(self, float_class: type[nn.Module], observed_class: type[nn.Module]) -> bool:
        return False

    def is_opaque(self, module: nn.Module) -> bool:
        return isinstance(module, (nn.GRU, nn.RNN))

    def fake_call(self, module: nn.Module, path: str) -> FakeCall:
        assert isinstance(module, nn.RNNBase)
        return fake_rnn(module)

    def observe(self, request: ObserveRequest) -> LeafModule:
        raise RecurrentModuleError.unusable_result(request.path, "from_float", request.module)

    def output_dtypes(self, leaf: LeafModule) -> tuple[torch.dtype | None, ...]:
        return ()

    def owns(self, leaf: nn.Module) -> bool:
        return False

    def convert(self, leaf: LeafModule, quantized_class: type[nn.Module] | None, path: str) -> LeafModule:
        raise RecurrentModuleError.unusable_result(path, "from_observed", leaf)

    def remedy(self, module: nn.Module) -> str | None:
        if isinstance(module, (nn.GRU, nn.RNN, nn.GRUCell, nn.RNNCell)):
            return "no quantizable counterpart exists in this release; set its qconfig to None to say so"
        return None


def _map_it(name: str) -> str:
    return (
        "map it: PrepareCustomConfig().set_float_to_observed_mapping("
        f"torch.nn.{name}, torch.ao.nn.quantizable.{name})"
    )


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


register(OtherRecurrentHandler())
register(LSTMCellHandler())
register(LSTMHandler())
