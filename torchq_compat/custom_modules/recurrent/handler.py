"""nn.LSTM as a custom module: the handler the stages call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from torchq_compat.custom_modules.leaf_module import LeafModule
from torchq_compat.custom_modules.leaf_op import FakeCall
from torchq_compat.custom_modules.recurrent.build import build_observed_lstm
from torchq_compat.custom_modules.recurrent.cell_graph import part_nodes
from torchq_compat.custom_modules.recurrent.constructors import CellSpecs
from torchq_compat.custom_modules.recurrent.contract import LSTMStructure, call_lstm, fake_layers
from torchq_compat.custom_modules.recurrent.lstm import ConvertedLSTM, LSTMLoop, ObservedLSTM
from torchq_compat.custom_modules.recurrent.opaque import fake_rnn
from torchq_compat.custom_modules.recurrent.parts import lstm_parts
from torchq_compat.custom_modules.registry import CustomModuleHandler, ObserveRequest, register
from torchq_compat.decisions import Action, Decision
from torchq_compat.errors import CustomModuleError
from torchq_compat.observed_graph import uncalibrated_observers

__all__ = ["LSTMHandler"]

LEGACY_OBSERVED = torch.ao.nn.quantizable.LSTM
LEGACY_QUANTIZED = torch.ao.nn.quantized.LSTM


class LSTMHandler(CustomModuleHandler):
    """nn.LSTM -> ObservedLSTM -> ConvertedLSTM."""

    def takes(self, float_class: type[nn.Module], observed_class: type[nn.Module]) -> bool:
        return issubclass(float_class, nn.LSTM) and issubclass(observed_class, LEGACY_OBSERVED)

    def is_opaque(self, module: nn.Module) -> bool:
        return isinstance(module, nn.RNNBase)

    def fake_call(self, module: nn.Module) -> FakeCall:
        if not isinstance(module, nn.LSTM):
            assert isinstance(module, nn.RNNBase)
            return fake_rnn(module)
        structure = LSTMStructure.of(module)

        def fake(*args: Any, **kwargs: Any) -> Any:
            return call_lstm(structure, type(module).__name__, fake_layers(structure), args, kwargs)

        return fake

    def observe(self, request: ObserveRequest) -> LeafModule:
        lstm = request.module
        assert isinstance(lstm, nn.LSTM)
        observed = self._observed(lstm, request)
        observed.module_path = request.path
        return observed

    def _observed(self, lstm: nn.LSTM, request: ObserveRequest) -> ObservedLSTM:
        if _inherits(request.observed_class, "from_float", LEGACY_OBSERVED):
            return build_observed_lstm(lstm, CellSpecs(request.specs))
        lstm.qconfig = request.qconfig  # type: ignore[assignment]  # where FX puts it for from_float
        made = request.observed_class.from_float(lstm)  # type: ignore[attr-defined]
        if isinstance(made, ObservedLSTM):
            return made
        if isinstance(made, LEGACY_OBSERVED):
            if any(isinstance(m, GraphModule) for m in made.modules()):
                raise CustomModuleError.observed_by_fx(request.path)
            # Its parts are observed by the eager engine, all from its qconfig: the same cells as here.
            return build_observed_lstm(lstm, CellSpecs(request.specs), split_gates=_is_split(made))
        raise CustomModuleError.unusable_result(request.path, "from_float", made)

    def output_dtypes(self, leaf: LeafModule) -> tuple[torch.dtype | None, ...]:
        assert isinstance(leaf, ObservedLSTM)
        return leaf.specs.hidden_dtype, leaf.specs.hidden_dtype, leaf.specs.cell_state_dtype

    def owns(self, leaf: nn.Module) -> bool:
        return isinstance(leaf, LSTMLoop)

    def convert(self, leaf: LeafModule, quantized_class: type[nn.Module] | None, path: str) -> LeafModule:
        assert isinstance(leaf, ObservedLSTM)
        if quantized_class is None or _inherits(quantized_class, "from_observed", LEGACY_QUANTIZED):
            return ConvertedLSTM.from_observed(leaf)
        made = quantized_class.from_observed(leaf)  # type: ignore[attr-defined]
        if not isinstance(made, ConvertedLSTM):
            raise CustomModuleError.unusable_result(path, "from_observed", made)
        return made

    def remedy(self, module: nn.Module) -> str | None:
        if isinstance(module, nn.LSTM):
            return (
                "map it: PrepareCustomConfig().set_float_to_observed_mapping("
                "torch.nn.LSTM, torch.ao.nn.quantizable.LSTM)"
            )
        if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
            return "no quantizable counterpart exists in this release; set its qconfig to None to say so"
        return None

    def uncalibrated(self, leaf: LeafModule) -> list[str]:
        assert isinstance(leaf, ObservedLSTM)
        return [f"{path}.{name}" for path, cell in leaf.cells() for name in uncalibrated_observers(cell)]

    def explain(self, leaf: LeafModule, path: str) -> Iterator[Decision]:
        assert isinstance(leaf, LSTMLoop)
        formulas = {
            part.name: part.formula
            for split in (False, True)
            for part in lstm_parts(split_gates=split, projected=True)
        }
        for cell_path, cell in leaf.cells():
            for name, node in part_nodes(cell):
                details = _observation(cell, node)
                yield Decision(
                    f"{path}.{cell_path}.{name}", formulas[name], Action.QUANTIZED, "part of the cell", details
                )


def _inherits(cls: type[nn.Module], method: str, base: type[nn.Module]) -> bool:
    """Whether ``cls`` is ours, or uses the ``method`` of torch.ao's ``base`` as it is."""
    if issubclass(cls, LSTMLoop):
        return True
    return getattr(cls, method).__func__ is getattr(base, method).__func__


def _is_split(lstm: nn.Module) -> bool:
    return any(isinstance(getattr(m, "igates", None), nn.ModuleDict) for m in lstm.modules())


def _observation(cell: GraphModule, node: Node) -> dict[str, Any]:
    """dtype, and scale and zero point once they are fixed, of what observes ``node``."""
    for user in node.users:
        if user.op == "call_module":
            observer = cell.get_submodule(str(user.target))
            return {"observer": type(observer).__name__, "dtype": observer.dtype}
        if user.target is torch.ops.quantized_decomposed.quantize_per_tensor.default:
            _, scale, zero_point, _, _, dtype = user.args
            return {"dtype": dtype, "scale": scale, "zero_point": zero_point}
    return {}


register(LSTMHandler())
