"""``to_onnx``: write a converted model as an ONNX file."""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule

from torchq_compat.capture.example_inputs import asks_for_examples, read_example_inputs
from torchq_compat.custom_modules.recurrent.loop_shape import LoopShape
from torchq_compat.errors import OnnxError
from torchq_compat.graph.plain_tables import look_up_rows
from torchq_compat.lower.export import export
from torchq_compat.lower.onnx.biases import keep_biases
from torchq_compat.lower.onnx.onnx_model import OnnxModel, check_place, read_model
from torchq_compat.lower.onnx.packages import onnx_module
from torchq_compat.support.argument_checks import PATH, Expected, checked_arguments, optional

__all__ = ["to_onnx"]

#: The first opset with 16-bit QuantizeLinear.
OLDEST_OPSET = 21
#: How dynamically quantized LSTMs are written -> the loop shape of the program that is translated.
DYNAMIC_LSTMS = {"loop": LoopShape.ROLLED, "DynamicQuantizeLSTM": LoopShape.OPAQUE_DYNAMIC_LSTM}
OPSET = Expected("an int", lambda value: isinstance(value, int) and not isinstance(value, bool))


@asks_for_examples
@checked_arguments(path=optional(PATH), opset=OPSET)
def to_onnx(
    converted: torch.nn.Module,
    example_inputs: tuple[Any, ...],
    *,
    path: str | os.PathLike[str] | None = None,
    opset: int = OLDEST_OPSET,
    dynamic_lstm: Literal["loop", "DynamicQuantizeLSTM"] = "loop",
    dynamic_shapes: Any = None,
) -> OnnxModel:
    """Write a converted model as ONNX: quantize and dequantize operators, and weights as their integers.

    Recurrent modules become Scan operators, one for each layer and direction, of any length and batch size.
    With ONNX Runtime's optimizer off, the graph computes the bits of ``convert_to_reference_fx``, except for
    values halfway between two integers, where ONNX divides by the scale and torch multiplies by its inverse;
    with default options it has an SQNR of 40 dB or more relative to the reference.

    Args:
        converted: what ``convert_fx`` or ``convert_to_reference_fx`` returned, in evaluation mode.
        example_inputs: one example of every positional argument; only their structure, dtypes and ranks
            matter. Every size that the model leaves free is free in the graph.
        path: where to write the ``.onnx`` file, whole or not at all.
        opset: the version of ONNX's operators, 21 or newer.
        dynamic_lstm: how LSTMs with a dynamic QConfig are written. ``"loop"``: as other recurrent modules,
            with the numbers of this model. ``"DynamicQuantizeLSTM"``: as ONNX Runtime's own operator, which
            is a few times faster, quantizes over the whole range of 8 bits, and exists in no other runtime.
        dynamic_shapes: which sizes are free and within which bounds, as in ``torch.export.export``.

    Returns:
        The model: its ``proto``, its opset and the free sizes; ``save(path)`` writes it.

    Raises:
        OnnxError: the extra ``onnx`` is not installed, an opset that is too old or unknown, or an operator
            that has no form in ONNX.
        ExportError: not a converted model, one in training mode, or refused ``dynamic_shapes``.
        InputError: ``example_inputs`` missing, no inputs, or not fitting the model.
        OnnxFileError: the file cannot be written; it is an OSError too.

    Example:
        >>> import torch
        >>> from torch.ao.quantization import get_default_qconfig_mapping
        >>> from torchq_compat import convert_fx, prepare_fx, to_onnx
        >>> model, x = torch.nn.Sequential(torch.nn.Linear(4, 2)).eval(), torch.randn(3, 4)
        >>> prepared = prepare_fx(model, get_default_qconfig_mapping("x86"), (x,))
        >>> _ = prepared(torch.randn(50, 4))  # calibrate
        >>> to_onnx(convert_fx(prepared), (x,)).free_sizes
        ('input in dimension 0',)
    """
    if opset < OLDEST_OPSET:
        raise OnnxError(
            f"to_onnx: opset {opset} is too old.",
            hint=f"opset {OLDEST_OPSET} is the first whose quantize operators have all dtypes that models "
            f"here "
            "have; ONNX Runtime has it since 1.18.",
        )
    if dynamic_lstm not in list(DYNAMIC_LSTMS):
        raise OnnxError(
            f"to_onnx: dynamic_lstm={dynamic_lstm!r} is not known.",
            hint=f"choose one of {', '.join(map(repr, DYNAMIC_LSTMS))}.",
        )
    if path is not None:
        check_place(Path(path))
    newest = onnx_module("onnx.defs").onnx_opset_version()
    if opset > newest:
        raise OnnxError(
            f"to_onnx: opset {opset} is not known to the installed onnx.",
            hint=f"its newest is {newest}; leave opset out for one that every ONNX Runtime since 1.18 has.",
        )
    translations = onnx_module("torchq_compat.lower.onnx.translations").TRANSLATIONS
    args = read_example_inputs(example_inputs)
    # The loop shape for ONNX Runtime's own operator has no public name.
    shape: Any = DYNAMIC_LSTMS[dynamic_lstm]
    program = export(converted, args, recurrent=shape, dynamic_shapes=dynamic_shapes)
    _look_up_integers(program)
    keep_biases(program)
    model = read_model(_translate(program, opset, translations), opset)
    if path is not None:
        model.save(Path(path))
    return model


def _translate(program: ExportedProgram, opset: int, translations: Any) -> Any:
    try:
        with torch.no_grad(), _quiet():
            return torch.onnx.export(
                program,
                dynamo=True,
                opset_version=opset,
                verbose=False,
                custom_translation_table=translations,
            ).model_proto  # type: ignore[union-attr]
    except Exception as cause:
        raise _cannot_translate(opset, cause) from cause


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the progress that torch.onnx prints, and its warnings about future versions."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _cannot_translate(opset: int, cause: BaseException) -> OnnxError:
    causes = [cause]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    innermost = next((each for each in reversed(causes) if str(each).strip()), cause)
    lines = [line.strip() for line in str(innermost).splitlines() if line.strip()]
    found = f"{type(innermost).__name__}: {' '.join(lines[:2])}"
    return OnnxError(
        f"torch.onnx cannot write the model for opset {opset}: {found}",
        hint="every operator of the model needs a form in that opset; move an operator without one out of "
        "the model, or replace it by other operators.",
    )


def _look_up_integers(program: ExportedProgram) -> None:
    """Rewrite ``dequantize_per_channel(table)[indices]`` in place, as operators on the rows.

    Otherwise the optimizer of torch.onnx would fold the integer table into a float table.
    """
    for module in program.graph_module.modules():
        if isinstance(module, GraphModule):
            for embedding in module.graph.find_nodes(
                op="call_function", target=torch.ops.aten.embedding.default
            ):
                look_up_rows(module.graph, embedding)
            module.graph.eliminate_dead_code()
            module.recompile()
