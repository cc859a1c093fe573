"""TorchScript of what this package made: the last stage of all, which only torch.jit asks for.

It stands above the modules that torch.jit asks, so it is found by its name, when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn

__all__ = ["scripted_graph", "scripted_recurrent"]

STAGE = "torchq_compat.lower.torchscript"


def scripted_graph(model: nn.Module) -> Any:
    """The ``ScriptedGraph`` of a captured model; see ``lower/torchscript/scripted.py``."""
    return importlib.import_module(f"{STAGE}.scripted").scripted_graph(model)


def scripted_recurrent(module: nn.Module, contract: Any) -> nn.Module:
    """The plain module of a recurrent one of an eager model; see ``lower/torchscript/recurrent.py``."""
    made: nn.Module = importlib.import_module(f"{STAGE}.recurrent").scripted_recurrent(module, contract)
    return made
