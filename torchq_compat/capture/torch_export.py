"""Calls torch.export, and says where its nodes come from and what its errors mean."""

import itertools
import re
import sys
import traceback
from contextlib import nullcontext, redirect_stderr
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from torchq_compat.capture.origins import OPERATOR_OF_METHOD, find_origin, innermost_call, is_fx_leaf_class
from torchq_compat.capture.packed_sequences import ListOfTensor, PackingMode
from torchq_compat.capture.sizes.numbers import is_of_libraries, is_users, line_in_code
from torchq_compat.capture.sizes.size_reads import SizeReads
from torchq_compat.capture.unseen_python import SeenFunctions, seen_python
from torchq_compat.capture.writes import make_out_of_place
from torchq_compat.codes import error_line
from torchq_compat.errors import CaptureError, InputError, TorchQCompatError
from torchq_compat.support import upstream
from torchq_compat.support.graph_nodes import SLICE_END, copied_model, tensors_in
from torchq_compat.support.process_state import alone, own_attribute, without_code
from torchq_compat.support.user_warnings import silenced

# Shortens what torch prints about a failed capture: our error says it once, with the user's line.


#: Logger -> the messages of a failed attempt, which is followed by one with fewer free sizes.
OF_ATTEMPTS = {
    "torch._subclasses.fake_tensor": "failed while attempting to run meta for",
    "torch.fx.experimental.symbolic_shapes": "Unable to find user code corresponding to",
}


def without_frames_of_torch(cause: Exception) -> Exception:
    """Return ``cause`` without its own causes, and without the frames of torch and of this package.

    The frames of the user's model stay. torch.export has a hundred frames, and raises while it handles
    another error.
    """
    cause.__cause__ = cause.__context__ = None
    frames = []
    step = cause.__traceback__
    while step is not None:
        if not is_of_libraries(step.tb_frame.f_code.co_filename):
            frames.append(step)
        step = step.tb_next
    kept: TracebackType | None = None
    for frame in reversed(frames):
        kept = TracebackType(kept, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return cause.with_traceback(kept)


class _WithoutGraphs:
    """A stream without the code of graphs: torch.export prints the one up to a failed op on stderr, however
    long it is."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        is_graph = text.lstrip().startswith("def forward(self, ")
        return len(text) if is_graph else int(self.stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


# Calls torch.export so that the sizes of a legacy model stay as free as they were in an FX graph.


#: As ``dynamic_shapes``: every size is free that the model allows.
EVERY_SIZE: Any = object()
#: As ``dynamic_shapes``: every size is that of the example.
NO_SIZE: Any = object()
#: Advice on traceable forms of code that usually computes with the values of lengths.
OF_LENGTHS = (
    "The values of lengths are known at run time only: give pack_padded_sequence the tensor itself; a bound "
    "is lengths.max().item(), as in x[:, : lengths.max()]; a mask is torch.arange(x.size(1)) < "
    "lengths[:, None]; the last steps are x[torch.arange(x.size(0)), lengths - 1]; they are sorted by "
    "lengths.sort(descending=True); and a loop over time runs over all x.size(1) steps."
)
#: The same for a model whose arguments hold no lengths.
OF_VALUES = "Compute with the tensor itself, or give the model the number as an argument."
#: Home of what torch.export makes of torch.vmap and the like; the words of its errors.
TRANSFORMS, OF_TRANSFORMS = "torch._functorch.predispatch", "dynamicLayerStack"
#: Words of errors about a block under torch.inference_mode, which runs only without gradients.
OF_INFERENCE = "Inference tensors"


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    dynamic_shapes: Any = None,
    reads: SizeReads | None = None,
    packing: PackingMode | None = None,
) -> tuple[GraphModule, tuple[str, ...]]:
    """Return ``model`` as an aten graph that keeps its input and output structure, dead code included.

    Args:
        model: the model, captured as it is, including its training flags.
        args: example positional arguments.
        dynamic_shapes, reads, packing: see ``export_with``.

    Returns:
        The graph, and what torch.export assumes of the sizes that ``dynamic_shapes`` names, as Python code.

    Raises:
        Exception: whatever torch.export or the model raises; see ``explain_failure``.
    """
    program = export_with(model, args, dynamic_shapes, reads, packing)
    for node in program.graph.nodes:
        # A call that failed inside of one would leave the process inside of it.
        if getattr(node.target, "__module__", None) == TRANSFORMS:
            raise NotImplementedError(f"{TRANSFORMS}.{node.target.__name__}")
    with without_code(program.graph):
        exported = program.module(check_guards=False)
    assert isinstance(exported, GraphModule)
    # Every pass that follows says that its code has changed, which nobody runs before observers are inserted.
    # Its hook stays behind, which checks that calls have the sizes of the example: this package does.
    graph_module = upstream.LazyGraphModule(exported, exported.graph)
    graph_module.meta.update(exported.meta)
    graph_module._in_spec, graph_module._out_spec = exported._in_spec, exported._out_spec
    return graph_module, tuple(upstream.guards_of(program))


def clean_captured(graph_module: GraphModule) -> None:
    """Remove what a captured graph computes and does not use."""
    graph_module.graph.eliminate_dead_code()
    _drop_full_slices(graph_module)


def export_with(
    model: nn.Module,
    args: tuple[Any, ...],
    dynamic_shapes: Any,
    reads: SizeReads | None = None,
    packing: PackingMode | None = None,
) -> torch.export.ExportedProgram:
    """Return the result of ``torch.export.export``.

    Where it fails it is repeated: without the replacements of Python's functions that the model called, whose
    symbols may be the cause, as one is no dict key; without gradients; and with the values that buffers have
    now where the model's Python asked for one, as FX did.

    Args:
        dynamic_shapes: as in torch.export, where None is static; or ``EVERY_SIZE`` or ``NO_SIZE``.
        reads: answers what the model's Python reads.
        packing: replaces calls that torch.export cannot trace, or would trace otherwise.

    Raises:
        Exception: whatever the first export raises.
    """
    args = copied_inputs(args, keeps_gradients=True)
    if dynamic_shapes is EVERY_SIZE:
        dynamic_shapes = _every_dimension(args)
    elif dynamic_shapes is NO_SIZE:
        dynamic_shapes = None
    quiet = silenced(_is_of_computed_weight, UserWarning)
    functions, first = SeenFunctions(), None
    # torch looks up the text of each of a hundred frames for each node, most of them its own, and for inputs
    # and weights drops it again; ``reads`` notes the line of the model.
    lines = own_attribute(torch.fx.config, "do_not_emit_stack_traces", reads is not None)
    # The passes of torch.export each generate code that nobody runs.
    lazily = upstream.lazy_graph_modules(True)
    with alone(), lazily, redirect_stderr(_WithoutGraphs(sys.stderr)), quiet, lines:
        for with_values, no_grad, as_python in itertools.product((False, True), repeat=3):
            if (
                (with_values and not (reads is not None and reads.asked))
                or (no_grad and OF_INFERENCE not in str(first))
                or (as_python and not functions.were_called)
            ):
                continue
            replaced = nullcontext() if packing is None else packing.during(model)
            answered = nullcontext() if reads is None else reads.during(model, with_values=with_values)
            gradients = torch.no_grad() if no_grad else nullcontext()
            try:
                python = seen_python(model, () if as_python else functions.replaced())
                with gradients, replaced, answered, python:
                    return torch.export.export(model, args, strict=False, dynamic_shapes=dynamic_shapes)
            except Exception as cause:
                first = first or cause
    assert first is not None
    raise first


def _is_of_computed_weight(text: str) -> bool:
    """Return whether ``text`` warns of weights that the hooks of weight_norm or prune assign in a call, or a
    recurrent module's own copy."""
    names = r"(weight|bias|_flat_weights\[\d+\])"
    assigned = re.match(rf"The tensor attributes? (self(\.\w+)*\.{names}(, )?)+ w.* assigned", text)
    return assigned is not None


def capture_freely(
    model: nn.Module,
    args: tuple[Any, ...],
    reads: SizeReads | None = None,
    packing: PackingMode | None = None,
) -> GraphModule:
    """Return ``model`` as an aten graph, with the sizes free that its Python reads; see ``SizeReads``.

    Args:
        model: the model.
        args: example positional arguments.
        reads: what answers the reads, and keeps what was decided.
        packing: see ``export_with``.

    Raises:
        Exception: whatever torch.export or the model raises.
    """
    reads = reads or SizeReads()
    captured, _ = capture(model, args, reads=reads, packing=packing)
    reads.write_results(captured)
    clean_captured(captured)
    return captured


def capture_flat(model: nn.Module, args: tuple[Tensor, ...]) -> GraphModule:
    """Return the graph of a module that takes tensors and returns a tuple of tensors, without pytree in its
    calling code, because the graph is called once per time step."""
    captured = capture_freely(model, args)
    make_out_of_place(captured)
    flat = upstream.LazyGraphModule(captured, captured.graph)
    flat.graph.set_codegen(torch.fx.graph.CodeGen())
    flat.recompile()
    return flat


def copied_inputs(args: tuple[Any, ...], *, keeps_gradients: bool = False) -> tuple[Any, ...]:
    """Return a copy of ``args`` for a trial run: a model may write into its inputs, and they may belong to an
    autograd graph.

    torch.export would take a tensor that is given twice, say as h0 and c0, for one input, and the captured
    model would read one argument for both. To recreate a view from its base, torch.export would check whether
    its sizes are 1, and guard on the answer.

    Args:
        keeps_gradients: whether copies require gradients where what they copy does.
    """

    def copied(tensor: Tensor) -> Tensor:
        return tensor.detach().clone().requires_grad_(keeps_gradients and tensor.requires_grad)

    copies: tuple[Any, ...] = upstream.pytree.tree_map_only(Tensor, copied, args)
    return copies


def explain_failure(model: nn.Module, args: tuple[Any, ...], cause: Exception) -> TorchQCompatError:
    """Return our error for a failed capture of the float ``model``; an ``InputError`` if ``model``
    does not run on ``args``."""
    try:
        with torch.no_grad():
            copied_model(model)(*copied_inputs(args))
    except Exception as problem:
        reason = cause if isinstance(cause, TorchQCompatError) else problem
        return InputError.does_not_fit(type(model).__name__, reason)
    if isinstance(cause, TorchQCompatError):
        return cause
    leaves = upstream.pytree.tree_leaves(args)
    may_have_lengths = any(
        isinstance(leaf, Tensor) and leaf.dim() == 1 and not leaf.is_floating_point() for leaf in leaves
    )
    of_values = OF_LENGTHS if may_have_lengths else OF_VALUES
    line = _user_line(cause)
    where = f"{type(model).__name__}{f' at {line}' if line else ''}"
    return CaptureError.of(_text_about(cause), where=where, cause=cause, of_values=of_values)


def _every_dimension(args: tuple[Any, ...]) -> torch.export.ShapesCollection:
    # Without this setting torch makes no symbol of a size of 1, and warns about each.
    least = 0 if upstream.symbolic_shapes_config.backed_size_oblivious else 2
    shapes = torch.export.ShapesCollection()  # type: ignore[no-untyped-call]
    for tensor in tensors_in(args):
        sizes = enumerate(tensor.shape)
        shapes[tensor] = {index: torch.export.Dim.AUTO for index, size in sizes if size >= least}
    return shapes


def _user_line(cause: BaseException) -> str | None:
    """Return file, line and text of the last frame of the user's, or None."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(cause.__traceback__)]
    return next((line_in_code(*place) for place in reversed(frames) if is_users(place[0])), None)


OF_SIZES = ("sympy", "symbolic", "Constraint", "SymInt", "SymFloat", "SymBool", "Dim", "size of tensor")
#: What is said of an error of torch.export -> words of its class and text; the first counts that has one.
ABOUT = {
    "TQ920.nesting_of_dynamic_shapes": ("dynamic_shapes", "`inputs`"),
    "TQ920.value_as_integer": ("specialized integer from data-dependent",),
    "TQ920.control_flow": ("DataDependent", "data-dependent", "Could not guard"),
    "TQ920.value_in_numpy": (ListOfTensor.__name__,),
    "TQ920.transform": (TRANSFORMS, OF_TRANSFORMS),
    "TQ920.size": OF_SIZES,
}


def _text_about(cause: BaseException) -> str:
    """Return the key of the text about ``cause``, the error of torch.export."""
    if isinstance(cause, RecursionError):
        return "TQ920.recursion"
    if any(word in error_line(cause) for word in ("register a pytree", "Unsupported input type")):
        return "TQ920.container"
    text = f"{type(cause).__module__}.{type(cause).__name__}: {cause}"
    about = (key for key, words in ABOUT.items() if any(word in text for word in words))
    return next(about, "TQ920.torch_export")


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


# Writes the function, or module class, that each op comes from into the metadata that Quantizers read.
#
# ``get_source_partitions(graph, [operator.add, torch.add])`` and similar functions of backends read
# ``source_fn_stack``, which torch.export writes only in strict mode.


#: torch's key of ``node.meta``.
SOURCE_FUNCTIONS = "source_fn_stack"


def restore_source_functions(graph_module: GraphModule, model: nn.Module) -> None:
    """Write the ``source_fn_stack`` of a strict export: the class of the torch.nn module that an op belongs
    to, or else the function or method.

    ``x + y`` and ``x.add(y)`` are written as ``operator.add``, other methods as their names; ``+=`` is
    ``operator.add``, too, because the graph computes it out of place. All ops of one call have the same name.

    Args:
        model: the exported module.
    """
    for node in graph_module.graph.nodes:
        if node.op == "call_function" and SOURCE_FUNCTIONS not in node.meta:
            source = _source(node, model)
            if source is not None:
                node.meta[SOURCE_FUNCTIONS] = [source]


def _source(node: Node, model: nn.Module) -> tuple[str, Any] | None:
    """Return (name of the call, the class, function or method called); None if it is unknown."""
    called = innermost_call(node)
    if called is not None and is_fx_leaf_class(called[1]):
        return called
    types = find_origin(node, model).object_types
    if not types or "torch_fn" not in node.meta:
        return None
    source, *_ = types
    # torch_fn counts the calls of each function.
    name = ".".join(node.meta["torch_fn"])
    return name, OPERATOR_OF_METHOD.get(source, source) if isinstance(source, str) else source
