"""``to_executorch``: lower a converted model to a ``.pte`` file."""

from __future__ import annotations

import os
from typing import Any, Literal

import torch
from torch.export import ExportedProgram

from torchq_compat.capture.example_inputs import asks_for_examples, read_example_inputs
from torchq_compat.errors import ExecutorchError
from torchq_compat.lower.executorch.delegation import DelegationReport, read_delegation
from torchq_compat.lower.executorch.executorch_program import ExecutorchProgram
from torchq_compat.lower.executorch.inputs import bounded_by, read_inputs, unexpectedly_fixed
from torchq_compat.lower.executorch.int8_qparams import dequantize_for_each_reader, shift_to_int8
from torchq_compat.lower.executorch.loop_invariants import move_loop_invariants
from torchq_compat.lower.executorch.loop_results import size_loop_results
from torchq_compat.lower.executorch.quantized_ops import fit_quantized_ops
from torchq_compat.lower.executorch.recurrent_kernel import load_recurrent_kernel
from torchq_compat.lower.executorch.runtime import executorch_module, runtime
from torchq_compat.lower.executorch.whole_linears import restore_linears
from torchq_compat.lower.executorch.xnnpack import xnnpack_partitioner
from torchq_compat.lower.export import export
from torchq_compat.support.argument_checks import PATH, checked_arguments, optional
from torchq_compat.support.user_warnings import warn_user

__all__ = ["to_executorch"]

BACKENDS = ("portable", "xnnpack")
SHAPES = ("rolled", "opaque")


@asks_for_examples
@checked_arguments(path=optional(PATH))
def to_executorch(
    converted: torch.nn.Module,
    example_inputs: tuple[Any, ...],
    *,
    backend: Literal["portable", "xnnpack"] = "portable",
    recurrent: Literal["rolled", "opaque"] = "rolled",
    dynamic_shapes: Any = None,
    path: str | os.PathLike[str] | None = None,
) -> ExecutorchProgram:
    """Lower a converted model to ExecuTorch.

    Weights are stored as their integers. Recurrent modules are loops over time: the size of the program does
    not depend on the length. On the portable kernels the program computes the bits of
    ``convert_to_reference_fx``; with XNNPACK each delegated operator is within one quantization step. On a
    device, the kernels of ExecuTorch's quantized library have to be linked into the runtime.

    Args:
        converted: what ``convert_fx`` or ``convert_to_reference_fx`` returned, in evaluation mode.
        example_inputs: one example of every positional argument. ExecuTorch plans its memory beforehand, so
            their sizes are the **largest** that the program will accept; every size that the model leaves
            free may be smaller, except that a size of 1 here stays 1.
        backend: ``"portable"``, or ``"xnnpack"``, which takes the operators it supports and leaves the rest
            to the portable kernels: ``report`` of the result lists both. It takes none in the body of a loop.
        recurrent: how recurrent modules run. ``"rolled"``: as loops of portable kernels. ``"opaque"``: each
            as one kernel of this package, with the numbers and the speed of a lowered module; the kernel is
            compiled here at first use, and has to be linked in on the device.
        dynamic_shapes: which sizes are free and within which bounds, as in ``torch.export.export``; replaces
            the rule for ``example_inputs`` above. Every Dim needs a ``max``.
        path: where to write the ``.pte`` file, whole or not at all.

    Returns:
        The program: call it to run it here, or ``save`` it to a file.

    Raises:
        ExecutorchError: the extra ``executorch`` is not installed; an unknown ``backend`` or ``recurrent``; a
            size without bound; an operator for which ExecuTorch has no kernel; no compiler for this package's
            kernel.
        ExportError: not a converted model, one in training mode, or refused ``dynamic_shapes``.
        InputError: ``example_inputs`` missing, no inputs, or not fitting the model.
        OSError: the file cannot be written.

    Example:
        >>> import torch
        >>> from torch.ao.quantization import get_default_qconfig_mapping
        >>> from torchq_compat import convert_fx, prepare_fx, to_executorch
        >>> model, x = torch.nn.Sequential(torch.nn.Linear(4, 2)).eval(), torch.randn(3, 4)
        >>> prepared = prepare_fx(model, get_default_qconfig_mapping("x86"), (x,))
        >>> _ = prepared(torch.randn(50, 4))  # calibrate
        >>> to_executorch(convert_fx(prepared), (x,))(x).shape
        torch.Size([3, 2])
    """
    if backend not in BACKENDS:
        raise ExecutorchError(
            f"backend {backend!r} is not known.",
            hint=f"choose one of {', '.join(map(repr, BACKENDS))}; for another backend, give the program of "
            "torch.export.export to its partitioner.",
        )
    executorch_module("exir")
    if recurrent not in SHAPES:
        raise ExecutorchError(
            f"recurrent={recurrent!r} is not known.",
            hint=f"choose one of {', '.join(map(repr, SHAPES))}.",
        )
    if recurrent == "opaque":
        load_recurrent_kernel()
    args = read_example_inputs(example_inputs)
    bounds = bounded_by(args) if dynamic_shapes is None else dynamic_shapes
    exported = export(converted, args, recurrent=recurrent, dynamic_shapes=bounds)
    inputs = read_inputs(exported)
    if dynamic_shapes is None:
        # The q-dq graph of a lowered model is its attribute ``reference``.
        reference: Any = getattr(converted, "reference", converted)
        sizes = reference.record.signature.sizes.of_placeholders(reference.graph)
        _warn_of_fixed_sizes(unexpectedly_fixed(inputs, sizes))
    structure = exported.call_spec.out_spec
    try:
        # With gradients enabled, every pass over the graph would also trace the backward of its loops.
        with torch.no_grad():
            pte, report = _lower(exported, backend)
    except ExecutorchError:
        raise
    except Exception as cause:
        raise _cannot_lower(backend, cause) from cause
    if backend != "portable" and not report.subgraphs:
        warn_user(f"{backend} takes no operator of this model; all run on portable kernels.\n{report}")
    program = ExecutorchProgram(pte, inputs, report, structure)
    program.load()
    if path is not None:
        program.save(path)
    return program


def _lower(exported: ExportedProgram, backend: str) -> tuple[bytes, DelegationReport]:
    """Return the ``.pte`` and the report of ``exported``, which is modified."""
    exir = executorch_module("exir")
    fit_quantized_ops(exported)
    refused: dict[str, str] = {}
    partitioners = []
    if backend == "xnnpack":
        shift_to_int8(exported)
        dequantize_for_each_reader(exported)
        partitioners.append(xnnpack_partitioner(refused))
    edge = exir.to_edge_transform_and_lower(
        exported,
        partitioner=partitioners,
        # Quantize, dequantize and scan are not in core ATen.
        compile_config=exir.EdgeCompileConfig(_check_ir_validity=False),
    )
    report = read_delegation(edge.exported_program().graph_module, backend, refused)
    manager = edge.transform((restore_linears, move_loop_invariants)).to_executorch()
    _check_kernels(manager.executorch_program)
    return size_loop_results(manager.buffer), report


def _warn_of_fixed_sizes(fixed: list[str]) -> None:
    if fixed:
        warn_user(
            f"the ExecuTorch program fixes sizes that the converted model leaves free: {', '.join(fixed)}. A "
            "recurrent module that is not mapped to an observed one is unrolled."
        )


def _check_kernels(program: Any) -> None:
    needed = {(each.name, each.overload) for plan in program.execution_plan for each in plan.operators}
    known = runtime().operator_registry.operator_names
    missing = {".".join(filter(None, each)) for each in needed} - known
    if missing:
        raise ExecutorchError(
            f"ExecuTorch's runtime has no kernel for {', '.join(sorted(missing))}.",
            hint="leave the part of the model that computes this outside, or write it with other operators.",
        )


def _cannot_lower(stage: str, cause: BaseException) -> ExecutorchError:
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return ExecutorchError(
        f"ExecuTorch cannot take the model ({stage}): {type(cause).__name__}: {' '.join(lines[:2])}",
        hint="its operators have to be in ExecuTorch's portable library; move the part that needs the "
        "operator named here out of the model.",
    )
