"""Every test of a torch or torchao version, in one file."""

from __future__ import annotations

import inspect

import torch

__all__ = ["EXPORT_MODULE_TAKES_CHECK_GUARDS"]

# torch 2.8 added the guards submodule to ExportedProgram.module() and the flag that leaves it out.
EXPORT_MODULE_TAKES_CHECK_GUARDS = (
    "check_guards" in inspect.signature(torch.export.ExportedProgram.module).parameters
)
