"""torch.export, called so that a legacy model stays as free in its sizes as an FX graph was."""

from __future__ import annotations

import copy
import importlib
import inspect
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx import GraphModule

from torchq_compat.capture.inplace import make_out_of_place
from torchq_compat.errors import CaptureError, InputError, TorchQCompatError
from torchq_compat.versions import EXPORT_MODULE_TAKES_CHECK_GUARDS

__all__ = ["capture", "capture_flat", "copied_inputs", "explain_failure", "export_with_free_sizes"]

# A config module whose functions torch installs at run time.
symbolic_shapes: Any = importlib.import_module("torch.fx.experimental._config")
LIBRARY_ROOTS = (Path(torch.__file__).parent, Path(__file__).parents[1])


def capture(model: nn.Module, args: tuple[Any, ...], dynamic_shapes: Any = None) -> GraphModule:
    """``model`` as an aten graph that keeps its input and output structure.

    Args:
        model: captured as it is, its training flags included.
        args: example positional arguments.
        dynamic_shapes: as torch.export takes it; None makes every dimension dynamic that the model allows.

    Raises:
        Exception: whatever torch.export or the model raises; see ``explain_failure``.
    """
    program = export_with_free_sizes(model, args, dynamic_shapes)
    options = {"check_guards": False} if EXPORT_MODULE_TAKES_CHECK_GUARDS else {}
    graph_module = program.module(**options)
    assert isinstance(graph_module, GraphModule)
    graph_module.graph.eliminate_dead_code()
    make_out_of_place(graph_module)
    return graph_module


def capture_flat(model: nn.Module, args: tuple[Tensor, ...]) -> GraphModule:
    """``capture`` of a module with tensor arguments and a tuple of tensors as result, without pytree in
    its calling code: it is called once per time step."""
    captured = capture(model, args)
    flat = GraphModule(captured, captured.graph)
    flat.graph.set_codegen(torch.fx.graph.CodeGen())
    flat.recompile()
    return flat


def copied_inputs(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """``args`` for a trial run: a model may write into them, and they may hang on an autograd graph."""
    copies = pytree.tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, args)
    assert isinstance(copies, tuple)
    return copies


def explain_failure(model: nn.Module, args: tuple[Any, ...], cause: Exception) -> TorchQCompatError:
    """The error of ours for a failed capture of ``model`` (the float one): do the inputs fit at all?"""
    try:
        with torch.no_grad():
            copy.deepcopy(model)(*copied_inputs(args))
    except Exception as problem:
        reason = cause if isinstance(cause, TorchQCompatError) else problem
        return InputError.does_not_fit(type(model).__name__, reason)
    if isinstance(cause, TorchQCompatError):
        return cause
    return CaptureError.from_export(type(model).__name__, _user_line(cause), cause)


def export_with_free_sizes(
    model: nn.Module, args: tuple[Any, ...], dynamic_shapes: Any
) -> torch.export.ExportedProgram:
    """``torch.export.export``; without ``dynamic_shapes`` every dimension is free that ``model`` allows."""
    args = _distinct(args)
    if dynamic_shapes is not None:
        return torch.export.export(model, args, dynamic_shapes=dynamic_shapes, strict=False)
    # Without this an example of batch 1 fixes the batch to 1 (0/1 specialization).
    with symbolic_shapes.patch(backed_size_oblivious=True):
        return torch.export.export(model, args, dynamic_shapes=_every_dimension(model, args), strict=False)


def _distinct(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """``args`` with a copy of each tensor that is there twice, say as h0 and c0: torch.export would take both
    for one input, and the captured model would read one of its arguments for both."""
    seen: set[int] = set()

    def once(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) in seen:
            return leaf.clone()
        seen.add(id(leaf))
        return leaf

    distinct: tuple[Any, ...] = pytree.tree_map(once, args)
    return distinct


def _every_dimension(model: nn.Module, args: tuple[Any, ...]) -> Any:
    def dimensions(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return dict.fromkeys(range(leaf.dim()), torch.export.Dim.AUTO)
        return None

    shapes = pytree.tree_map(dimensions, args)
    kinds = [parameter.kind for parameter in inspect.signature(model.forward).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds[: len(args)]:
        # torch.export sees what *args takes as one argument.
        first = kinds.index(inspect.Parameter.VAR_POSITIONAL)
        return (*shapes[:first], shapes[first:])
    return shapes


def _user_line(cause: BaseException) -> str | None:
    """File and line of the last frame that is neither torch's nor ours."""
    for frame in reversed(traceback.extract_tb(cause.__traceback__)):
        path = Path(frame.filename)
        if path.exists() and not any(path.is_relative_to(root) for root in LIBRARY_ROOTS):
            return f"{path.name}:{frame.lineno} ({(frame.line or '').strip()})"
    return None
