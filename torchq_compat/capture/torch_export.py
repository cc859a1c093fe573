"""Calls torch.export so that the sizes of a legacy model stay as free as they were in an FX graph."""

from __future__ import annotations

import inspect
import itertools
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from torchq_compat.capture.call_signature import CallSignature
from torchq_compat.capture.inlined_blocks import is_block
from torchq_compat.capture.short_tracebacks import partial_graphs_held_back
from torchq_compat.capture.unseen_python import with_seen_python
from torchq_compat.capture.writes.out_of_place import make_out_of_place
from torchq_compat.errors import CaptureError, ExampleInputsError, TorchQCompatError
from torchq_compat.packed_sequences.lengths_as_lists import ListOfTensor
from torchq_compat.support.graph_nodes import SLICE_END
from torchq_compat.support.model_copies import copied_model
from torchq_compat.support.upstream import pytree, symbolic_shapes_config
from torchq_compat.support.versions import EXPORT_MODULE_TAKES_CHECK_GUARDS

__all__ = [
    "Statics",
    "capture",
    "capture_flat",
    "copied_inputs",
    "explain_failure",
    "export_with_free_sizes",
    "line_of_failure",
]

#: The directories of torch and of this package: a user's line is in neither.
LIBRARY_ROOTS = (Path(torch.__file__).parent, Path(__file__).parents[1])
#: Advice on traceable forms of code that usually computes with the values of lengths.
OF_LENGTHS = (
    "The values of lengths are known at run time only: give pack_padded_sequence the tensor itself; a bound "
    "is lengths.max().item(), as in x[:, : lengths.max()]; a mask is torch.arange(x.size(1)) < "
    "lengths[:, None]; the last steps are x[torch.arange(x.size(0)), lengths - 1]; they are sorted by "
    "lengths.sort(descending=True); and a loop over time runs over all x.size(1) steps."
)
#: Words of errors of torch.export about what runs only without gradients: a block under torch.inference_mode,
#: and ``out=`` arguments.
WITHOUT_GRADIENTS = (
    "Inference tensors",
    "functions with out=... arguments don't support automatic differentiation",
)
#: (label of an input, dimension) pairs that are fixed to their size in the example.
Statics = tuple[tuple[str, int], ...]


def capture(
    model: nn.Module, args: tuple[Any, ...], dynamic_shapes: Any = None, statics: Statics = ()
) -> GraphModule:
    """Return ``model`` as an aten graph that keeps its input and output structure.

    Args:
        model: the model, captured as it is, including its training flags.
        args: example positional arguments.
        dynamic_shapes: the argument of torch.export; None makes every dimension dynamic that the model
            allows.
        statics: the dimensions that are fixed if ``dynamic_shapes`` is None.

    Raises:
        Exception: whatever torch.export or the model raises; see ``explain_failure``.
    """
    try:
        program = export_with_free_sizes(model, args, dynamic_shapes, statics)
    except RuntimeError as cause:
        if not any(words in str(cause) for words in WITHOUT_GRADIENTS):
            raise
        with torch.no_grad():
            program = export_with_free_sizes(model, args, dynamic_shapes, statics)
    options = {"check_guards": False} if EXPORT_MODULE_TAKES_CHECK_GUARDS else {}
    graph_module = program.module(**options)
    assert isinstance(graph_module, GraphModule)
    graph_module.graph.eliminate_dead_code(lambda node: is_block(node) or node.is_impure())
    _drop_full_slices(graph_module)
    return graph_module


def capture_flat(model: nn.Module, args: tuple[Tensor, ...], dynamic_shapes: Any = None) -> GraphModule:
    """Return the graph of a module that takes tensors and returns a tuple of tensors, without pytree in its
    calling code, because the graph is called once per time step."""
    captured = capture(model, args, dynamic_shapes)
    make_out_of_place(captured)
    flat = GraphModule(captured, captured.graph)
    flat.graph.set_codegen(torch.fx.graph.CodeGen())
    flat.recompile()
    return flat


def copied_inputs(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a copy of ``args`` for a trial run: a model may write into its inputs, and they may belong to an
    autograd graph."""
    copies = pytree.tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, args)
    assert isinstance(copies, tuple)
    return copies


def explain_failure(model: nn.Module, args: tuple[Any, ...], cause: Exception) -> TorchQCompatError:
    """Return our error for a failed capture of the float ``model``; an ``ExampleInputsError`` if ``model``
    does not run on ``args``."""
    try:
        with torch.no_grad():
            copied_model(model)(*copied_inputs(args))
    except Exception as problem:
        reason = cause if isinstance(cause, TorchQCompatError) else problem
        return ExampleInputsError.does_not_fit(type(model).__name__, reason)
    if isinstance(cause, TorchQCompatError):
        return cause
    return _capture_refused(type(model).__name__, _user_line(cause), cause)


def export_with_free_sizes(
    model: nn.Module, args: tuple[Any, ...], dynamic_shapes: Any, statics: Statics = ()
) -> torch.export.ExportedProgram:
    """Return the result of ``torch.export.export``; without ``dynamic_shapes`` every dimension is free that
    ``model`` allows, except ``statics``."""
    args = _distinct(args)
    export = partial(torch.export.export, model, args, strict=False)
    if dynamic_shapes is not None:
        with partial_graphs_held_back():
            return with_seen_python(model, partial(export, dynamic_shapes=dynamic_shapes))
    shapes = _every_dimension(model, args, statics)
    # Without this an example of batch 1 fixes the batch to 1 (0/1 specialization).
    with partial_graphs_held_back(), symbolic_shapes_config.patch(backed_size_oblivious=True):
        return with_seen_python(model, partial(export, dynamic_shapes=shapes))


def _distinct(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return ``args`` with each tensor copied.

    torch.export would take a tensor that is given twice, say as h0 and c0, for one input, and the captured
    model would read one argument for both. To recreate a view from its base, torch.export would check whether
    its sizes are 1, and guard on the answer.
    """

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)

    distinct: tuple[Any, ...] = pytree.tree_map(copied, args)
    return distinct


def _every_dimension(model: nn.Module, args: tuple[Any, ...], statics: Statics) -> Any:
    labels = iter(CallSignature.of(model, args).labelled(args)) if statics else itertools.repeat("")

    def dimensions(leaf: Any) -> Any:
        label = next(labels)
        if isinstance(leaf, Tensor):
            return {
                index: torch.export.Dim.STATIC if (label, index) in statics else torch.export.Dim.AUTO
                for index in range(leaf.dim())
            }
        return None

    shapes = _map_as_export_wants(dimensions, args)
    kinds = [parameter.kind for parameter in inspect.signature(model.forward).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds[: len(args)]:
        # torch.export treats all of *args as one argument.
        first = kinds.index(inspect.Parameter.VAR_POSITIONAL)
        return (*shapes[:first], shapes[first:])
    return shapes


def _map_as_export_wants(function: Callable[[Any], Any], value: Any) -> Any:
    """Return ``pytree.tree_map``, but with a list in the place of each dataclass or other container
    registered with pytree, as torch.export requires."""

    def inside(each: Any) -> Any:
        if not _is_other_container(each):
            return function(each)
        return [_map_as_export_wants(function, child) for child in _children(each)]

    return pytree.tree_map(inside, value, is_leaf=_is_other_container)


def _is_other_container(value: Any) -> bool:
    if isinstance(value, (Tensor, tuple, list, dict)):
        return False
    children = _children(value)
    return len(children) != 1 or children[0] is not value


def _children(value: Any) -> list[Any]:
    return pytree.tree_leaves(value, is_leaf=lambda each: each is not value)


def line_of_failure(cause: BaseException) -> str:
    """Return the user's line at which ``cause`` was raised, and the first line of its message."""
    first_line = str(cause).strip().split("\n", 1)[0]
    return " ".join(filter(None, (_user_line(cause), f"{type(cause).__name__}: {first_line}")))


def _user_line(cause: BaseException) -> str | None:
    """Return file, line and text of the last frame that is neither torch's nor ours, or None."""
    for frame in reversed(traceback.extract_tb(cause.__traceback__)):
        path = Path(frame.filename)
        if path.exists() and not any(path.is_relative_to(root) for root in LIBRARY_ROOTS):
            return f"{path.name}:{frame.lineno} ({(frame.line or '').strip()})"
    return None


def _capture_refused(model: str, location: str | None, cause: BaseException) -> CaptureError:
    where = f" at {location}" if location else ""
    first_line = str(cause).strip().split("\n", 1)[0]
    return CaptureError(
        f"torch.export cannot capture {model}{where}: {type(cause).__name__}: {first_line}",
        hint=f"{_capture_hint(cause, first_line)} The model was not changed.",
    )


def _capture_hint(cause: BaseException, first_line: str) -> str:
    """Suggest what the user can do about ``cause``, the error of torch.export."""
    text, kind = str(cause), type(cause)
    if "register a pytree" in first_line or "Unsupported input type" in first_line:
        return (
            "register what the model takes or returns: torch.export.register_dataclass for a dataclass, "
            "torch.utils._pytree.register_pytree_node for another container."
        )
    if "dynamic_shapes" in text or "`inputs`" in text:
        return (
            "dynamic_shapes has to be nested as the arguments are; that of forward(self, *x) is one "
            "argument, so its entries are nested once more: dynamic_shapes=((shape_of_x0, shape_of_x1),)."
        )
    if "specialized integer from data-dependent" in text:
        return f"int(), range() and a loop over a tensor ask for its values. {OF_LENGTHS}"
    if "DataDependent" in kind.__name__ or "data-dependent" in text or "Could not guard" in text:
        return (
            "control flow on tensor values has to become torch.where or torch.cond; "
            f"see the torch.export programming model. {OF_LENGTHS}"
        )
    if ListOfTensor.__name__ in text:
        return f"what NumPy or a list would compute of a tensor's values cannot be traced. {OF_LENGTHS}"
    about_sizes = "sympy" in kind.__module__ or "symbolic" in text or "Constraint" in kind.__name__
    if about_sizes or any(
        word in text for word in ("SymInt", "SymFloat", "SymBool", "Dim", "size of tensor")
    ):
        return (
            "the model computes with a size in a way that no free size can follow; give dynamic_shapes= in "
            "which that size is torch.export.Dim.STATIC, or write the computation with integers."
        )
    return (
        "look at that line: what it calls has to be traceable with tensors that have shapes and no values; "
        "see the torch.export programming model. Control flow on tensor values has to become torch.where or "
        "torch.cond."
    )


def _drop_full_slices(graph_module: GraphModule) -> None:
    """Remove slices of a whole dimension, so that their readers read the sliced tensor.

    With a free dimension torch.export writes ``x[:, 1:3]`` as ``slice(slice(x, 0, 0, maximum), 1, 1, 3)``.
    With fixed sizes there is no inner slice, and a Quantizer written for such graphs would annotate one node
    too many.
    """
    for node in graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.slice.Tensor):
        source = node.args[0]
        assert isinstance(source, Node)
        if _is_full(*node.args[1:], **node.kwargs):
            node.replace_all_uses_with(source)
            graph_module.graph.erase_node(node)


def _is_full(dim: int = 0, start: object = None, end: object = None, step: object = 1) -> bool:
    return start in (None, 0) and end in (None, SLICE_END) and step == 1
