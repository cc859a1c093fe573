"""``to_onnx``: write a converted model as an ONNX file."""

import contextlib
import errno
import io
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.export import ExportedProgram

from torchq_compat.capture.torch_export import copied_inputs
from torchq_compat.capture.trial_runs import difference, kept_buffers, resized, trial_sizes
from torchq_compat.errors import ExportError, PathError, install_extra
from torchq_compat.lower.export import constant_size, exported
from torchq_compat.lower.onnx.forms import in_onnx_forms
from torchq_compat.model.graph_module import record_of
from torchq_compat.ops import written_by
from torchq_compat.read.example_inputs import read_example_inputs
from torchq_compat.read.old_forms import takes_old_keywords
from torchq_compat.recurrent.over_time import LoopShape
from torchq_compat.support.argument_checks import INDEX, PATH, checked_arguments, optional
from torchq_compat.support.atomic_files import whole_file
from torchq_compat.support.graph_nodes import tensors_in
from torchq_compat.support.process_state import alone, draws_kept, without_autocast
from torchq_compat.support.report import slow_stages
from torchq_compat.support.upstream import pytree
from torchq_compat.support.user_warnings import silenced, warn_user

# The result of ``to_onnx``: an ONNX model, its opset and its free sizes.


@dataclass(frozen=True)
class OnnxModel:
    """An ONNX model.

    Attributes:
        proto: the ``onnx.ModelProto``.
        opset: the version of ONNX's standard operators.
        free_sizes: the sizes of inputs that may differ from call to call, as "x in dimension 0".
    """

    proto: Any = field(repr=False)
    opset: int
    free_sizes: tuple[str, ...]

    @checked_arguments(path=PATH)
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model to ``path``, whole or not at all.

        Raises:
            ExportError: the model exceeds the 2 GiB limit of a file.
            PathError: the file cannot be written; an existing file is left unchanged.
        """
        content = self.to_bytes()
        try:
            with whole_file(Path(path)) as file:
                file.write(content)
        except OSError as cause:
            raise _not_written(Path(path), cause) from cause

    def to_bytes(self) -> bytes:
        """Return the content of the file, as ``onnxruntime.InferenceSession`` accepts it.

        Raises:
            ExportError: the model exceeds the 2 GiB limit of a file.
        """
        try:
            content: bytes = self.proto.SerializeToString()
        except Exception as cause:
            raise ExportError.of("TQ933.one_file", cause=cause) from cause
        return content


def check_place(path: Path) -> None:
    """Refuse a path that no file can have, before the model is translated.

    Raises:
        PathError: the folder does not exist, or the path is a folder.
    """
    if path.is_dir():
        raise _not_written(path, IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR)))
    if not path.absolute().parent.is_dir():
        raise _not_written(path, FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)))


def _not_written(path: Path, cause: OSError) -> PathError:
    return PathError.of("TQ934", path=path, cause=cause.strerror or cause)


def read_model(proto: Any, opset: int) -> OnnxModel:
    """Return ``proto`` with the free sizes of its inputs; correct its opset imports."""
    free = tuple(
        f"{value.name} in dimension {dimension}"
        for value in proto.graph.input
        for dimension, size in enumerate(value.type.tensor_type.shape.dim)
        if size.HasField("dim_param")
    )
    imported = {item.domain for item in proto.opset_import}
    for domain in sorted({node.domain for node in proto.graph.node} - imported - {""}):
        proto.opset_import.add(domain=domain, version=1)
    return OnnxModel(proto, opset, free)


# Loads what was written with ONNX Runtime, if it is installed, and compares.


#: The SQNR in dB under which ONNX Runtime's results are told to be others, and its optimizer's beside those.
LEAST, LEAST_OPTIMIZED = 20.0, 30.0


def check_in_runtime(model: OnnxModel, converted: torch.nn.Module, trials: Sequence[tuple[Any, ...]]) -> None:
    """Run ``model`` beside ``converted`` on the ``trials`` that it takes, and warn of other results.

    Raises:
        ExportError: ONNX Runtime refuses the model.
    """
    try:
        onnxruntime = import_module("onnxruntime")
    except ImportError:
        return
    content, levels = model.to_bytes(), onnxruntime.GraphOptimizationLevel
    session, optimized = (
        _session(onnxruntime, content, level) for level in (levels.ORT_DISABLE_ALL, levels.ORT_ENABLE_ALL)
    )
    is_told = False
    for args in trials:
        given = tensors_in(args)
        inputs = session.get_inputs()
        if len(given) != len(inputs) or not all(map(_fits, inputs, given)):
            continue
        shapes = ", ".join(str(tuple(item.shape)) for item in given)
        try:
            with torch.no_grad(), draws_kept(), kept_buffers(converted):
                expected = converted(*copied_inputs(args))
        except Exception:  # The model takes no such values, as lengths longer than the sequences.
            continue
        try:
            named = {entry.name: value.cpu().numpy() for entry, value in zip(inputs, given, strict=True)}
            plain, changed = (_floats(item.run(None, named)) for item in (session, optimized))
        except Exception as cause:
            raise _refused(f"{cause}, at {shapes}") from cause
        expected = _floats(pytree.tree_map_only(Tensor, Tensor.cpu, expected))
        if (problem := difference(expected, plain, LEAST)) is not None:
            warn_user("TQ436", shapes=shapes, problem=problem)
        elif not is_told and (problem := difference(plain, changed, LEAST_OPTIMIZED)) is not None:
            warn_user("TQ443", problem=problem)
            is_told = True


def _session(onnxruntime: Any, content: bytes, level: Any) -> Any:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = level
    options.log_severity_level = 4
    try:
        return onnxruntime.InferenceSession(content, options)
    except Exception as cause:
        raise _refused(str(cause)) from cause


def _floats(results: Any) -> list[Tensor]:
    arrays = pytree.tree_leaves(results)
    leaves = [torch.from_numpy(leaf) if type(leaf).__module__ == "numpy" else leaf for leaf in arrays]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _at_other_sizes(converted: torch.nn.Module, args: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    record = record_of(converted)
    if record is None:
        return []
    inputs, sizes = record.signature.labelled(args), record.signature.sizes
    return [resized(args, inputs, sizes, groups) for groups in itertools.islice(trial_sizes(sizes), 1)]


def _fits(declared: Any, given: Tensor) -> bool:
    return len(declared.shape) == given.dim() and all(
        not isinstance(size, int) or size == own
        for size, own in zip(declared.shape, given.shape, strict=True)
    )


def _refused(reason: str) -> ExportError:
    first_line = next(iter(reason.strip().splitlines()), "")
    return ExportError.of("TQ707", reason=first_line)


# Import the optional ONNX packages when they are needed.


def onnx_module(name: str) -> Any:
    """Return the module ``name``, which needs the packages of the extra.

    Raises:
        ExportError: the extra is not installed.
    """
    try:
        import_module("onnx")
        import_module("onnxscript")
        return import_module(name)
    except ImportError as cause:
        raise ExportError.of("TQ933.not_installed", cause=cause, install=install_extra("onnx")) from cause


# ``to_onnx``: write a converted model as an ONNX file.


#: The first opset with 16-bit QuantizeLinear.
OLDEST_OPSET = 21
#: How dynamically quantized LSTMs are written -> the loop shape of the program that is translated.
DYNAMIC_LSTMS = {"loop": LoopShape.ROLLED, "DynamicQuantizeLSTM": LoopShape.DYNAMIC_QUANTIZE_LSTM}


@takes_old_keywords()
@checked_arguments(path=optional(PATH), opset=INDEX)
@without_autocast()
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
    with default options it has an SQNR of 40 dB or more relative to the reference. Where ONNX Runtime is
    installed, it runs what was written once, at two sizes, and other results are warned of.

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
        ExportError: the extra ``onnx`` is not installed, an opset that is too old or unknown, or an operator
            that has no form in ONNX.
        ExportError: ONNX Runtime refuses what was written.
        ExportError: not a converted model, one in training mode, or refused ``dynamic_shapes``.
        InputError: ``example_inputs`` missing, no inputs, or not fitting the model.
        PathError: the file cannot be written; it is an OSError too.

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
        raise ExportError.of("TQ933.old_opset", opset=opset, oldest=OLDEST_OPSET)
    if dynamic_lstm not in list(DYNAMIC_LSTMS):
        raise ExportError.of(
            "TQ933.dynamic_lstm", dynamic_lstm=dynamic_lstm, choices=", ".join(map(repr, DYNAMIC_LSTMS))
        )
    if path is not None:
        check_place(Path(path))
    newest = onnx_module("onnx.defs").onnx_opset_version()
    if opset > newest:
        raise ExportError.of("TQ933.new_opset", opset=opset, newest=newest)
    args = read_example_inputs(example_inputs)
    shape = DYNAMIC_LSTMS[dynamic_lstm]
    with slow_stages("to_onnx") as begin:
        begin("export")
        program = exported(converted, args, shape, dynamic_shapes, in_onnx_forms)
        if written := _written_buffers(program):
            warn_user("TQ709", buffers=", ".join(written))
        begin("translate")
        model = read_model(_translate(program, opset), opset)
        begin("check")
        if dynamic_lstm == "loop":
            check_in_runtime(model, converted, [args, *_at_other_sizes(converted, args)])
    if path is not None:
        model.save(Path(path))
    return model


def _written_buffers(program: ExportedProgram) -> list[str]:
    buffers = program.graph_signature.inputs_to_buffers
    written = {
        item for node in program.graph.nodes for item in written_by(node.target, node.args, node.kwargs)
    }
    return [buffers[node.name] for node in program.graph.nodes if node in written and node.name in buffers]


def _settle_sizes(program: ExportedProgram) -> None:
    """Make numbers of the sizes of inputs that turned out to be fixed: torch.onnx takes their symbols for
    free sizes, and cannot read them where an operator needs numbers."""
    for placeholder in program.graph.find_nodes(op="placeholder"):
        value = placeholder.meta.get("val")
        if isinstance(value, Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape):
            sizes = [size if (fixed := constant_size(size)) is None else fixed for size in value.shape]
            with value.fake_mode:  # type: ignore[attr-defined]
                placeholder.meta["val"] = torch.empty(sizes, dtype=value.dtype, device=value.device)


def _translate(program: ExportedProgram, opset: int) -> Any:
    _settle_sizes(program)
    try:
        with torch.no_grad(), _quiet():
            exported_program = torch.onnx.export(program, dynamo=True, opset_version=opset, verbose=False)
            return exported_program.model_proto  # type: ignore[union-attr]
    except Exception as cause:
        raise _cannot_translate(opset, cause) from cause


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the progress that torch.onnx prints, and its warnings about future versions."""
    with alone(), contextlib.redirect_stdout(io.StringIO()), silenced():
        yield


def _cannot_translate(opset: int, cause: BaseException) -> ExportError:
    causes = [cause]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    innermost = next((item for item in reversed(causes) if str(item).strip()), cause)
    lines = [line.strip() for line in str(innermost).splitlines() if line.strip()]
    result = f"{type(innermost).__name__}: {' '.join(lines[:2])}"
    return ExportError.of("TQ933.cannot_translate", opset=opset, result=result)
