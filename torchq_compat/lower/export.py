"""Export a converted model as one program: quantize and dequantize ops, integer weights, any length."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from torchq_compat.capture.example_inputs import asks_for_examples, read_example_inputs
from torchq_compat.capture.short_tracebacks import without_frames_of_torch
from torchq_compat.capture.torch_export import EVERY_SIZE, explain_failure, export_with
from torchq_compat.custom_modules.recurrent.loop_shape import LoopShape, exporting_loops_as
from torchq_compat.errors import CaptureError, ExportError, TorchQCompatError
from torchq_compat.graph.graph_module import ConvertedGraphModule
from torchq_compat.graph.quantized_interface import take_integers
from torchq_compat.lower.cleanup_passes import clean_up
from torchq_compat.lower.guards_of_ones import drop_guards_of_ones
from torchq_compat.lower.per_tensor_edges import with_per_tensor_edges
from torchq_compat.lower.streams.stream_program import StreamProgram
from torchq_compat.lower.streams.streaming_model import StreamingModel
from torchq_compat.packed_sequences.as_padded import with_padded_packs
from torchq_compat.support.decisions import Action
from torchq_compat.support.user_warnings import warn_user

__all__ = ["export", "with_size_rules"]


@asks_for_examples
def export(
    converted: torch.nn.Module,
    example_inputs: tuple[Any, ...],
    *,
    recurrent: Literal["rolled", "unrolled", "opaque"] = "rolled",
    dynamic_shapes: Any = None,
) -> ExportedProgram:
    """Export a converted model, with every size free that the captured model left free.

    The program computes the bits of ``convert_to_reference_fx`` at any size; with ``recurrent="opaque"`` its
    recurrent modules compute the bits of ``convert_fx`` on x86.

    Args:
        converted: what ``convert_fx`` or ``convert_to_reference_fx`` returned, in evaluation mode; or what
            ``streaming`` returned, whose states become buffers of the program, in the example's batch size.
        example_inputs: one example of every positional argument; only their structure, dtypes and ranks
            matter, except to an unrolled loop.
        recurrent: how the loop over time of a recurrent module is written. ``"rolled"``: a ``scan`` for each
            layer and direction. ``"unrolled"``: its steps one by one; the program accepts only sequences as
            long as the example's. ``"opaque"``: one call of ``torchq_compat_native::recurrent`` for the whole
            module, the C++ operator that a lowered module calls.
        dynamic_shapes: which sizes are free and within which bounds, as in ``torch.export.export``: every
            size that it does not name is fixed. Beyond a bound the program raises torch's own error.

    Returns:
        The program, with ``quantized_decomposed`` operators and int8 weights.

    Raises:
        ExportError: not a converted model, one in training mode, an unknown ``recurrent``, or
            ``dynamic_shapes`` that torch.export refuses.
        InputError: ``example_inputs`` missing, no inputs, or not fitting the model.

    Example:
        >>> import torch
        >>> from torch.ao.quantization import get_default_qconfig_mapping
        >>> from torchq_compat import convert_fx, export, prepare_fx
        >>> model, x = torch.nn.Sequential(torch.nn.Linear(4, 2)).eval(), torch.randn(3, 4)
        >>> prepared = prepare_fx(model, get_default_qconfig_mapping("x86"), (x,))
        >>> _ = prepared(torch.randn(50, 4))  # calibrate
        >>> export(convert_fx(prepared), (x,)).module()(torch.randn(7, 4)).shape
        torch.Size([7, 2])
    """
    streams = converted.streams if isinstance(converted, StreamingModel) else None
    model = _reference(converted.model if isinstance(converted, StreamingModel) else converted)
    shape = _read_shape(recurrent)
    args = model.record.signature.bind(read_example_inputs(example_inputs), {})
    args = take_integers(args, model.input_qparams())
    with exporting_loops_as(shape):
        try:
            checked: torch.nn.Module = with_size_rules(model, args)
            if streams is not None:
                checked = StreamProgram(checked, model, streams, args)
            program = export_with(checked, args, EVERY_SIZE if dynamic_shapes is None else dynamic_shapes)
        except Exception as cause:
            found = _error(model, args, shape, dynamic_shapes, cause)
            raise found from without_frames_of_torch(cause)
    if dynamic_shapes is None:
        drop_guards_of_ones(program, model, args)
    _freeze(program)
    clean_up(program)
    _warn_of_float_modules(model)
    if streams is None and dynamic_shapes is None and shape is not LoopShape.UNROLLED:
        _warn_of_fixed_sizes(model, program)
    return program


def _reference(converted: torch.nn.Module) -> ConvertedGraphModule:
    # A lowered model has its q-dq graph under this name.
    model = (
        converted if isinstance(converted, ConvertedGraphModule) else getattr(converted, "reference", None)
    )
    if not isinstance(model, ConvertedGraphModule):
        raise ExportError(
            f"{type(converted).__name__} is no model that convert_fx or convert_to_reference_fx returned.",
            hint="prepare_fx, calibrate, convert_fx, then export what convert_fx returns.",
        )
    if model.training:
        raise ExportError(
            "export: the model is in training mode.",
            hint="call model.eval() first.",
        )
    return model


def with_size_rules(model: ConvertedGraphModule, args: tuple[Any, ...]) -> GraphModule:
    """Return the graph of ``model`` after a check of its sizes, which tracing makes part of the program.

    Without the check, a size that the float model's Python fixed would be free wherever the operators accept
    any size.
    """
    edited = with_padded_packs(with_per_tensor_edges(model))
    signature = model.record.signature
    labels = tuple(signature.labelled(args))

    def check_sizes(*leaves: Any) -> None:
        signature.sizes.check(dict(zip(labels, leaves, strict=True)))

    placeholders = edited.graph.find_nodes(op="placeholder")
    with edited.graph.inserting_after(placeholders[-1] if placeholders else None):
        # torch.export interprets a GraphModule and calls neither its hooks nor its ``forward``.
        edited.graph.call_function(check_sizes, tuple(placeholders))
    edited.recompile()
    return edited


def _read_shape(recurrent: str) -> LoopShape:
    shapes = (LoopShape.ROLLED, LoopShape.UNROLLED, LoopShape.OPAQUE)
    if recurrent not in shapes and not isinstance(recurrent, LoopShape):
        raise ExportError(
            f"export: recurrent={recurrent!r} is not known.",
            hint="the shapes of a loop over time are "
            + ", ".join(repr(str(shape)) for shape in shapes)
            + ".",
        )
    return LoopShape(recurrent)


def _error(
    model: ConvertedGraphModule,
    args: tuple[Any, ...],
    shape: LoopShape,
    dynamic_shapes: Any,
    cause: Exception,
) -> TorchQCompatError:
    error = explain_failure(model, args, cause)
    return _export_refused(shape, dynamic_shapes, cause) if isinstance(error, CaptureError) else error


def _freeze(program: ExportedProgram) -> None:
    """Make the parameters require no gradient: a scan computes its steps differently if one requires it."""
    for name, value in program.state_dict.items():
        if isinstance(value, torch.nn.Parameter):
            program.state_dict[name] = torch.nn.Parameter(value.detach(), requires_grad=False)


def _warn_of_float_modules(model: ConvertedGraphModule) -> None:
    left = [d.path for d in model.record.decisions if d.action is Action.FLOAT and d.warn]
    if left:
        warn_user(f"the exported program computes these in floats: {', '.join(left)}; see explain(model).")


def _warn_of_fixed_sizes(model: ConvertedGraphModule, program: ExportedProgram) -> None:
    """Say which sizes the captured model leaves free and the program does not."""
    names = program.graph_signature.user_inputs
    nodes = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    fixed = [
        f"{name} in dimension {dimension.index} to {size}"
        for name, dimensions in zip(
            names, model.record.signature.sizes.of_placeholders(model.graph), strict=True
        )
        for dimension, size in zip(dimensions, _sizes(nodes.get(str(name))), strict=True)
        if not dimension.is_fixed and _constant(size) is not None
    ]
    if fixed:
        warn_user(
            f"the exported program fixes sizes that the converted model leaves free: {', '.join(fixed)}."
        )


def _sizes(node: Node | None) -> tuple[Any, ...]:
    """Return the sizes of a tensor input; an argument that is None has no node."""
    return tuple(getattr(node.meta.get("val"), "shape", ())) if node is not None else ()


def _constant(size: Any) -> int | None:
    """Return the value of ``size`` if it is fixed; a symbol may have become a constant after its creation."""
    value: int | None = size.node.maybe_as_int() if isinstance(size, torch.SymInt) else size
    return value


def _export_refused(shape: str, dynamic_shapes: object, cause: BaseException) -> ExportError:
    first_line = str(cause).strip().split("\n", 1)[0]
    hint = "this is a defect of torchq_compat: report it with the model's code."
    if dynamic_shapes is not None:
        hint = "leave dynamic_shapes out: then every size is free that the model leaves free; "
        hint += (
            "recurrent='unrolled' fixes the number of steps."
            if shape == "unrolled"
            else ("or give bounds that the example_inputs lie in, and free no size that the model fixes.")
        )
    return ExportError(
        f"torch.export refuses the converted model with recurrent={str(shape)!r} and "
        f"dynamic_shapes={dynamic_shapes}: {type(cause).__name__}: {first_line}",
        hint=hint,
    )
