"""LSTMs observed part by part as torch.ao documents it: the results of FX and of this package, as numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from tests.helpers.lstm_flow import (
    FX,
    Engine,
    batches_of,
    build,
    documented,
    run_flow,
)
from tests.helpers.oracle import leaves, sqnr

__all__ = ["FLOWS", "PROJECTIONS", "Flow", "fx_flow"]

#: The parts that the documented flow leaves to the QConfig, so they are calibrated.
PROJECTIONS = ("igates", "hgates")
#: The structures that FX can convert.
STRUCTURES: dict[str, dict[str, Any]] = {
    "one": {},
    "two_layers": {"num_layers": 2},
    "no_bias": {"bias": False},
}
#: Steps and batch at which accuracy is measured; calibration uses fewer of both.
MEASURED = (9, 64)


@dataclass(frozen=True)
class Flow:
    structure: str
    split_gates: bool

    @property
    def id(self) -> str:
        return f"{self.structure}{'/split_gates' * self.split_gates}"


FLOWS = tuple(Flow(structure, split) for structure in STRUCTURES for split in (False, True))


def fx_flow(flow: Flow) -> dict[str, Any]:
    """Return FX's SQNR of each output, and the qparams of each projection for cells with joint gates."""
    sqnrs, prepared, _ = _run(FX, flow)
    found = {path: _observed(prepared.get_submodule(path)) for path in _cells(prepared, flow)}
    return {"sqnr": sqnrs, "projections": found}


def _run(engine: Engine, flow: Flow) -> tuple[list[float], GraphModule, GraphModule]:
    model = build(gain=2.0, **STRUCTURES[flow.structure])
    batches, args = batches_of(model), model.batch(*MEASURED)
    prepared, converted = run_flow(engine, model, batches, split_gates=flow.split_gates, **documented())
    with torch.no_grad():
        pairs = zip(leaves(model(*args)), leaves(converted(*args)), strict=True)
        return [round(sqnr(a, b), 3) for a, b in pairs], prepared, converted


def _cells(model: nn.Module, flow: Flow) -> Iterator[str]:
    if not flow.split_gates:
        for name, _ in model.named_modules():
            if name.startswith("my_lstm.layers.") and name.endswith(".layer_fw.cell"):
                yield name


def _observed(cell: nn.Module) -> dict[str, list[float]]:
    """Return the (scale, zero point) of the observer behind each projection of a cell that FX prepared."""
    assert isinstance(cell, GraphModule)
    found = {}
    for part in PROJECTIONS:
        (node,) = [node for node in cell.graph.nodes if node.target == part]
        (reader,) = node.users
        observer: Any = cell.get_submodule(str(reader.target))
        scale, zero_point = observer.calculate_qparams()
        found[part] = [float(f"{float(scale):.7g}"), int(zero_point)]
    return found
