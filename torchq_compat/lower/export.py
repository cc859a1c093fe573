"""Export a converted model as one program: quantize and dequantize ops, integer weights, any sizes."""

from __future__ import annotations

import copy
import functools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.nn.utils.rnn import PackedSequence

from torchq_compat.capture import torch_export
from torchq_compat.capture.opaque_calls import (
    OpaqueModule,
    layout_index,
    opaque_call_nodes,
    opaque_modules,
    tensor_arguments,
)
from torchq_compat.capture.sizes.find_sizes import SizeGroups, group_of, sizes_at
from torchq_compat.capture.trial_runs import kept_buffers, trial_sizes, with_sizes
from torchq_compat.errors import CaptureError, ExportError, TorchQCompatError
from torchq_compat.lower.padded_packs import with_padded_packs
from torchq_compat.lower.streaming import StreamingModel, StreamProgram
from torchq_compat.model.graph_module import ConvertedGraphModule
from torchq_compat.model.quantized_interface import take_integers
from torchq_compat.modules.user_modules import OpaqueUserModule
from torchq_compat.read.example_inputs import read_example_inputs
from torchq_compat.read.old_forms import takes_old_keywords
from torchq_compat.read.qdq import DEQUANTIZE, DEQUANTIZE_PER_CHANNEL, QUANTIZE
from torchq_compat.read.qparams import PerChannelQParams, PerTensorQParams, QParams
from torchq_compat.recurrent.over_time import LoopShape, exporting_loops_as
from torchq_compat.support import metadata
from torchq_compat.support.argument_checks import checked_arguments
from torchq_compat.support.decisions import Action
from torchq_compat.support.graph_nodes import copied_graph, position_of
from torchq_compat.support.process_state import without_autocast
from torchq_compat.support.report import slow_stages
from torchq_compat.support.upstream import guards_of, pytree, symbolic_shapes_config
from torchq_compat.support.user_warnings import warn_user

# Drop pairs of operators that cancel from an exported program, so that a backend finds its patterns.


TRANSPOSE = torch.ops.aten.transpose.int


def clean_up(program: ExportedProgram) -> None:
    """Drop the operators of ``program`` that change no bit."""
    for node in program.graph.find_nodes(op="call_function", target=QUANTIZE):
        source = node.args[0]
        if isinstance(source, Node) and _is_repeated(node, source):
            _read_instead(node, source.args[0])
    for node in program.graph.find_nodes(op="call_function", target=TRANSPOSE):
        source = node.args[0]
        if isinstance(source, Node) and source.target is TRANSPOSE and source.args[1:] == node.args[1:]:
            _read_instead(node, source.args[0])
    program.graph.eliminate_dead_code()
    program.graph_module.recompile()


def _is_repeated(quantize: Node, source: Node) -> bool:
    if source.target is not DEQUANTIZE or source.kwargs:
        return False
    qparams = PerTensorQParams.of_node(quantize)
    return qparams.is_kept_by_float32 and qparams == PerTensorQParams.of_node(source)


def _read_instead(node: Node, other: object) -> None:
    """Replace ``node`` by ``other``, except in the output: the program's signature names its results."""
    assert isinstance(other, Node)
    node.replace_all_uses_with(other, delete_user_cb=lambda user: user.op != "output")


# Drop guards of an exported program against sizes of 1: torch adds them where an operator reads strides.
#
# The model's own requirements on its sizes are checked by ``check_sizes`` in the program, with the same
# messages. A guard is dropped if the model accepts the sizes that the guard refuses, and if the program,
# run at these sizes, gives the bits of the model.


#: ``L['x'].size()[0]``, as a guard names a size.
SIZE = re.compile(r"L(?:\[[^\]]+\]|\.\w+)+\.size\(\)\[\d+\]")


@dataclass(frozen=True)
class _Guarded:
    """A program, and the model and arguments that it was exported from."""

    program: ExportedProgram
    model: ConvertedGraphModule
    args: tuple[Any, ...]
    is_streaming: bool

    def call_at(self, groups: SizeGroups) -> tuple[Any, ...]:
        """Return the arguments with the sizes ``groups``; the others stay as they are: a streaming program
        accepts only its own batch size."""
        signature = self.model.record.signature
        values = sizes_at(signature.sizes, groups)
        dimensions = signature.sizes.dimensions
        changed = {
            item.place: values[item.place] for item in dimensions if values[item.place] != item.example
        }
        return with_sizes(self.args, signature.labelled(self.args), changed)

    def broken_at(self, groups: SizeGroups) -> list[str]:
        """Return the guards that refuse the sizes ``groups``."""
        names, call = self.model.record.signature.names, self.call_at(groups)
        given = dict(zip(names, call, strict=True)) if names and not self.is_streaming else {"args": call}
        broken = []
        for guard in guards_of(self.program):
            with suppress(Exception):  # It may call what only torch.export has.
                if not eval(guard, {"math": math, "torch": torch, "L": given}):
                    broken.append(guard)
        return broken

    @functools.cached_property
    def unguarded(self) -> torch.nn.Module:
        """The program as a module without guards."""
        return self.program.module(check_guards=False)

    def is_right_at(self, groups: SizeGroups) -> bool:
        """Return whether the program, without guards, has the bits of the model at the sizes ``groups``."""
        call = self.call_at(groups)
        try:
            # A streaming program writes to its states.
            with torch.no_grad(), kept_buffers(self.unguarded):
                return _same_bits(self.model(*call), self.unguarded(*call))
        except Exception:
            # A kernel refuses what the guard refused: keep the guard, which names the size.
            return False


def drop_guards_of_ones(guarded: _Guarded) -> None:
    """Drop the guards that refuse sizes of 1, and none of 2, at which the program computes what the model
    does."""
    sizes, refused = guarded.model.record.signature.sizes, dict[str, list[SizeGroups]]()
    groups = dict.fromkeys(map(group_of, sizes.free))
    for ones in (*({group: 1} for group in groups), dict.fromkeys(groups, 1)):
        if sizes.broken_rule(sizes_at(sizes, ones)) is None and (broken := guarded.broken_at(ones)):
            at_two = guarded.broken_at(dict.fromkeys(ones, 2))
            for guard in broken:
                # What one size of 1 breaks all of them do.
                if guard not in at_two and (len(ones) == 1 or guard not in refused):
                    refused.setdefault(guard, []).append(ones)
    right = functools.cache(lambda ones: guarded.is_right_at(dict.fromkeys(ones, 1)))
    guards = guards_of(guarded.program)
    guards[:] = [
        guard
        for guard in guards
        if guard not in refused or not all(right(tuple(ones)) for ones in refused[guard])
    ]


def _same_bits(expected: Any, value: Any) -> bool:
    pairs = zip(pytree.tree_leaves(expected), pytree.tree_leaves(value), strict=True)
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs if isinstance(a, torch.Tensor))


# Use only per-tensor q-dq around opaque modules, for export: backends have no per-channel activations.
#
# An opaque module whose result is concatenated from pieces with different qparams, say of two directions,
# returns it as integers with per-channel qparams. If an exported program shows the qparams
# of the pieces inside the module, the module can as well return floats: the numbers are the same.


def with_per_tensor_edges(converted: GraphModule) -> GraphModule:
    """Return a copy of ``converted`` with floats instead of per-channel integers between opaque modules and
    the graph. The copy shares the weights; ``converted`` is not changed."""
    graph = copied_graph(converted.graph)
    edited = GraphModule(converted, graph)
    calls = opaque_call_nodes(edited)
    #: Call -> the positions of its results, and of its inputs, that become floats.
    results, inputs = defaultdict[Node, list[int]](list), defaultdict[Node, list[int]](list)
    for call, opaque in calls.items():
        for getitem in call.users if opaque.opaque_shows_result_qparams else ():
            readers = _readers(getitem, calls)
            if isinstance(metadata.INTEGERS.of(getitem), PerChannelQParams) and readers is not None:
                results[call].append(position_of(getitem))
                for reader, position in readers:
                    inputs[reader].append(position)
                for dequantize in [user for user in getitem.users if user not in calls]:
                    dequantize.replace_all_uses_with(getitem)
    for path in {str(call.target) for call in (*results, *inputs)}:
        opaque = copy.copy(opaque_modules(edited)[path])
        edited.set_submodule(path, opaque)
        for call in calls:
            if call.target == path:
                _set_floats(opaque, layout_index(call), inputs[call], results[call])
    graph.eliminate_dead_code()
    return GraphModule(edited, graph)


def _readers(getitem: Node, calls: dict[Node, OpaqueModule]) -> list[tuple[Node, int]] | None:
    """Return the opaque calls that read ``getitem`` as integers, each with the position of the input; None if
    an op other than dequantize reads it as well."""
    readers: list[tuple[Node, int]] = []
    for user in getitem.users:
        if user in calls and _takes_floats(calls[user]):
            arguments = tensor_arguments(user, calls[user])
            readers.extend((user, index) for index, node in enumerate(arguments) if node is getitem)
        elif user.target is not DEQUANTIZE_PER_CHANNEL:
            return None
    return readers


def _takes_floats(opaque: OpaqueModule) -> bool:
    """Return whether ``opaque``, or a copy of it, computes the same from floats as from integers."""
    return type(opaque).opaque_receive is OpaqueModule.opaque_receive and not isinstance(opaque, GraphModule)


def _set_floats(opaque: OpaqueModule, index: int, inputs: list[int], outputs: list[int]) -> None:
    """Mark these positions of call ``index`` as floats."""
    layout = opaque.opaque_layouts[index]
    opaque.opaque_set_qparams(
        index, _without(layout.input_qparams, inputs), _without(layout.output_qparams, outputs)
    )
    if inputs:
        lying_on = tuple(
            input_qparam if position in inputs else None
            for position, input_qparam in enumerate(layout.input_qparams)
        )
        opaque.opaque_layouts[index] = replace(opaque.opaque_layouts[index], float_qparams=lying_on)


def _without(all_qparams: tuple[QParams | None, ...], positions: list[int]) -> tuple[QParams | None, ...]:
    return tuple(None if position in positions else qparams for position, qparams in enumerate(all_qparams))


# Export a converted model as one program: quantize and dequantize ops, integer weights, any length.


@takes_old_keywords()
@checked_arguments()
@without_autocast()
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
    shapes = (LoopShape.ROLLED, LoopShape.UNROLLED, LoopShape.OPAQUE)
    if recurrent not in shapes:
        listed = ", ".join(repr(str(shape)) for shape in shapes)
        raise ExportError.of("TQ930.recurrent", recurrent=recurrent, shapes=listed)
    with slow_stages("export"):
        return exported(converted, example_inputs, LoopShape(recurrent), dynamic_shapes)


def exported(
    converted: torch.nn.Module,
    example_inputs: tuple[Any, ...],
    shape: LoopShape,
    dynamic_shapes: Any,
    around: Callable[[GraphModule], GraphModule] = lambda graph_module: graph_module,
) -> ExportedProgram:
    """See ``export``; what ``around`` makes of the q-dq graph is exported."""
    streams = converted.streams if isinstance(converted, StreamingModel) else None
    model = _reference(converted.model if isinstance(converted, StreamingModel) else converted)
    args = model.record.signature.bind(read_example_inputs(example_inputs), {})
    args = take_integers(args, model.input_qparams())
    # Without this an example of batch 1 fixes the batch to 1 (0/1 specialization).
    ones_free = symbolic_shapes_config.patch(backed_size_oblivious=dynamic_shapes is None)
    with exporting_loops_as(shape), ones_free:
        try:
            checked: torch.nn.Module = around(with_size_rules(model, args))
            if streams is not None:
                checked = StreamProgram(checked, model, streams, args)
                # Its forward takes ``*args``.
                dynamic_shapes = None if dynamic_shapes is None else (dynamic_shapes,)
            program = torch_export.export_with(
                checked, args, torch_export.EVERY_SIZE if dynamic_shapes is None else dynamic_shapes
            )
        except Exception as cause:
            result = _error(model, args, shape, dynamic_shapes, cause)
            raise result from torch_export.without_frames_of_torch(cause)
    guarded = _Guarded(program, model, args, streams is not None)
    if dynamic_shapes is None:
        drop_guards_of_ones(guarded)
    for name, value in program.state_dict.items():
        # A scan computes its steps differently if a parameter requires gradients.
        if isinstance(value, torch.nn.Parameter):
            program.state_dict[name] = torch.nn.Parameter(value.detach(), requires_grad=False)
    clean_up(program)
    if left := [d.path for d in model.record.decisions if d.action is Action.FLOAT and d.warn]:
        warn_user("TQ703", ops=", ".join(left))
    if streams is None and dynamic_shapes is None and shape is not LoopShape.UNROLLED:
        _warn_of_fixed_sizes(guarded)
    return program


def _reference(converted: torch.nn.Module) -> ConvertedGraphModule:
    model = getattr(converted, "reference", None)
    if not isinstance(model, ConvertedGraphModule):
        raise ExportError.of("TQ930.not_converted", converted=converted)
    if model.training:
        raise ExportError.of("TQ930.training_mode")
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


def _error(
    model: ConvertedGraphModule,
    args: tuple[Any, ...],
    shape: LoopShape,
    dynamic_shapes: Any,
    cause: Exception,
) -> TorchQCompatError:
    error = torch_export.explain_failure(model, args, cause)
    if not isinstance(error, CaptureError):
        return error
    packed, own = [], []
    for call in model.graph.find_nodes(op="call_module"):
        module = model.get_submodule(str(call.target))
        kind = getattr(module, "opaque_users_class", type(module)).__qualname__
        if any(item.target is PackedSequence for item in call.all_input_nodes):
            packed.append(repr(call.target))
        elif isinstance(module, OpaqueUserModule) or not isinstance(module, OpaqueModule):
            own.append(f"{kind} at {call.target!r}")
    key = "TQ930.refused_unrolled" if shape is LoopShape.UNROLLED else "TQ930.refused_sizes"
    key = "TQ930.refused" if dynamic_shapes is None else key
    key = "TQ930.refused_at_packed" if packed else key
    key = "TQ930.refused_at_module" if own else key
    places = {"shape": str(shape), "dynamic_shapes": dynamic_shapes, "cause": cause}
    return ExportError.of(key, **places, modules=", ".join(own or packed))


def _warn_of_fixed_sizes(guarded: _Guarded) -> None:
    """Say which sizes the captured model leaves free and the program does not."""
    model = guarded.model
    fixed = [place for place, _ in newly_fixed(guarded.program, model)]
    for groups in () if fixed else trial_sizes(model.record.signature.sizes):
        if broken := guarded.broken_at(groups):
            with suppress(Exception), torch.no_grad():  # The model may refuse the sizes, too.
                model(*guarded.call_at(groups))
                fixed.append(SIZE.sub(lambda match: match[0][3:].replace("']", "", 1), broken[0]))
    if fixed:
        warn_user("TQ701", sizes=", ".join(dict.fromkeys(fixed)))


def newly_fixed(program: ExportedProgram, model: ConvertedGraphModule) -> Iterator[tuple[str, int]]:
    """Yield the sizes that ``program`` fixes and ``model`` leaves free: "x in dimension 0 to 5", and 5."""
    nodes = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    all_dimensions = model.record.signature.sizes.of_placeholders(model.graph)
    for name, dimensions in zip(program.graph_signature.user_inputs, all_dimensions, strict=True):
        # An argument that is None has no node.
        value = nodes[str(name)].meta.get("val") if name in nodes else None
        for dimension, size in zip(dimensions, getattr(value, "shape", ()), strict=True):
            if not dimension.is_fixed and (number := constant_size(size)) is not None:
                yield f"{name} in dimension {dimension.index} to {number}", number


def constant_size(size: Any) -> int | None:
    """Return the value of ``size`` if it is fixed; a symbol may have become a constant after its creation."""
    value: int | None = size.node.maybe_as_int() if isinstance(size, torch.SymInt) else size
    return value
