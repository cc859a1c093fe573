"""A module as one opaque call of the outer graph, with the q-dq around it."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType, MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn.utils.rnn import PackedSequence
from torchao.quantization.pt2e.quantizer import QuantizationSpec

from torchq_compat.capture.call_layouts import CallLayout, Field, Structure, check_form
from torchq_compat.capture.opaque_stub import OPAQUE_OP, ORIGINAL, StubRegistry
from torchq_compat.errors import ConvertError
from torchq_compat.ops import those
from torchq_compat.read.qparams import QParams
from torchq_compat.support.graph_nodes import (
    called_modules,
    copied_values,
    replace_node,
    replace_results,
)
from torchq_compat.support.torch_ao import EAGER_ENGINE, QuantType
from torchq_compat.support.upstream import pytree

# The module behind an opaque call of the outer graph.


def refuse_eager_engine(module: nn.Module, frame: FrameType) -> None:
    """Raise if torch.ao's eager mode is the caller and would convert only what is inside of custom modules.

    Raises:
        ConvertError: a function of torch.ao was given a model that ``quantize_eager`` prepared.
    """
    if frame.f_globals.get("__name__") == EAGER_ENGINE and any(
        isinstance(item, OpaqueModule) and "qconfig" in vars(item) for item in module.modules()
    ):
        raise ConvertError.of("TQ950.other_engine", stage="prepared")


class BoundCall(NamedTuple):
    """A call of the bound operator of recurrent modules.

    Attributes:
        places: the indices of x and the states among the arguments of the graph's call.
        batch_first: whether x is (B, T, I).
    """

    places: tuple[int, ...]
    batch_first: bool


class OpaqueModule(nn.Module):
    """A custom module that can be called in two ways.

    A user calls it with the arguments and results of the float module that it replaces (``opaque_call``). The
    graph calls it with flat tensors and the index of a ``CallLayout``; at a quantized boundary the tensors
    are integers. Names begin with ``opaque`` or ``leaf``: the class is also mixed into classes of users.
    """

    opaque_layouts: list[CallLayout]
    opaque_quant_type = QuantType.STATIC
    #: The class the script mapped the float module to.
    opaque_observed_class: type[nn.Module] | None = None
    #: Whether the results of ``opaque_call`` are already rounded to ``opaque_output_qparams``, and an
    #: exported program shows the per-tensor qparams that they are computed with.
    opaque_shows_result_qparams = False
    #: Whether it accepts and returns floats rounded to the qparams of its layouts, in place of integers.
    opaque_in_floats = False
    #: Whether it rounds float inputs to the qparams of its layouts, and accepts integers too; a call's
    #: ``leaf_quantized`` then gives the results to return as integers.
    leaf_quantizes = False

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Iterate as every module; see ``refuse_eager_engine``."""
        refuse_eager_engine(self, sys._getframe(1))
        return super().named_children()

    def opaque_call(self, *args: Any, **kwargs: Any) -> Any:
        """Compute with floats, with the arguments and results of the float module."""
        raise NotImplementedError

    def opaque_forget_packed(self) -> None:
        """Drop what kernels packed of its weights, until the next call."""

    def opaque_output_qparams(self, results: list[Tensor]) -> tuple[QParams | None, ...]:
        """Return the qparams of each of the flat ``results`` (of any device, also ``meta``); None: floats."""
        return (None,) * len(results)

    def forward(self, *args: Any, opaque_layout: int | None = None, **kwargs: Any) -> Any:
        if opaque_layout is None:
            return self.opaque_call(*args, **kwargs)
        return self._opaque_call_flat(self.opaque_layouts[opaque_layout], args)

    def opaque_call_from_graph(
        self, layout: CallLayout, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return the result of ``opaque_call`` for a call of the graph, whose qparams are in ``layout``."""
        return self.opaque_call(*args, **kwargs)

    def opaque_bound(self, index: int, quantized: tuple[int, ...]) -> BoundCall | None:
        """Return how the bound operator makes call ``index`` of the graph, with the results ``quantized`` as
        integers; None if it cannot."""
        return None

    def opaque_ticket(self, index: int, quantized: tuple[int, ...]) -> int:
        """Return the ticket with which the bound operator makes that call.

        Raises:
            RuntimeError: it cannot make it as the module is now.
        """
        raise RuntimeError("the module has no bound operator")

    def opaque_receive(self, q: Tensor, qparams: QParams) -> Tensor:
        """Return the argument of ``opaque_call`` for the integers ``q`` with ``qparams``."""
        return qparams.dequantize(q, self.opaque_float_dtype())

    def opaque_hand_out(self, result: Tensor, qparams: QParams | None) -> Tensor:
        """Return the value that the graph receives for a ``result`` of ``opaque_call``."""
        return result if qparams is None else qparams.quantize(result)

    def opaque_set_qparams(
        self, index: int, inputs: tuple[QParams | None, ...], outputs: tuple[QParams | None, ...]
    ) -> None:
        """Set the qparams of the integers of call ``index``."""
        layouts = list(self.opaque_layouts)
        layouts[index] = replace(layouts[index], input_qparams=inputs, output_qparams=outputs)
        self.opaque_layouts = layouts

    def opaque_check_results(self, layout: CallLayout, results: Any) -> None:
        """Raise if ``results`` have another structure than in capture; does nothing unless overridden."""

    def _opaque_call_flat(self, layout: CallLayout, flat: tuple[Any, ...]) -> tuple[Tensor, ...]:
        count = layout.inputs.count()
        tensors, sizes = flat[:count], flat[count:]
        if layout.input_qparams:
            tensors = tuple(map(self._as_floats, tensors, layout.input_qparams))
        args, kwargs = layout.inputs.put_together(tensors, sizes)
        nested = self.opaque_call_from_graph(layout, args, kwargs)
        self.opaque_check_results(layout, nested)
        _, results = Structure.take_apart(nested)
        if self.opaque_in_floats:
            return tuple(results)
        output_qparams = layout.output_qparams or (None,) * len(results)
        return tuple(self.opaque_hand_out(*pair) for pair in zip(results, output_qparams, strict=True))

    def _as_floats(self, tensor: Tensor, qparams: QParams | None) -> Tensor:
        if qparams is None or (self.opaque_in_floats and tensor.is_floating_point()):
            return tensor
        return self.opaque_receive(tensor, qparams)

    def opaque_float_dtype(self) -> torch.dtype:
        """Return the float dtype that the module computes in."""
        return torch.float32


# Replaces captured opaque ops by calls of the modules that do the work.


ATEN = torch.ops.aten


class ChecksForm:
    """A hook of a float module that is called whole, for what it decides by sizes that were not tried."""

    def __init__(self, path: str, layouts: Sequence[CallLayout]) -> None:
        self.path, self.layouts = path, tuple(layouts)

    def __call__(self, module: nn.Module, args: Any, result: Any) -> None:
        if not torch.compiler.is_dynamo_compiling():
            check_form(self.path, result, self.layouts)


def check_forms(stubs: StubRegistry, modules: Mapping[str, nn.Module]) -> None:
    """Let float ``modules``, by handle, refuse sizes at which their results have another form than in
    capture."""
    for handle, module in modules.items():
        layouts = stubs.layouts(handle)
        may_be_other = any(layout.ranks for layout in layouts)
        if may_be_other and not isinstance(module, OpaqueModule | torch.jit.ScriptModule):
            module.register_forward_hook(ChecksForm(handle, layouts))


def insert_calls(
    graph_module: GraphModule,
    stubs: StubRegistry,
    modules: dict[str, nn.Module],
    writers: Mapping[str, Callable[..., list[Node] | None]] = MappingProxyType({}),
) -> list[str]:
    """Replace every opaque op in ``graph_module`` by a call of ``modules[handle]``, at the path ``handle``.

    A float module that is never called is added if the model reads parameters of it.

    Args:
        writers: functions that write float modules as ops instead, by path; see
            ``CustomModuleHandler.ops_writer``.

    Returns:
        The names of the parameters of observed modules that the model itself reads, from copies.
    """
    copied = [name for entry in modules.items() for name in _keep_parameters_read(graph_module, *entry)]
    for node in list(graph_module.graph.nodes):
        if node.target is not OPAQUE_OP:
            continue
        tensors, sizes, handle, index = node.args
        module = modules[handle]
        graph_module.add_submodule(handle, module)
        layouts = stubs.layouts(handle)
        if isinstance(module, OpaqueModule):
            module.opaque_layouts = layouts
            _call_flat(graph_module, node, handle, (*tensors, *sizes), index)
        else:
            args, kwargs = layouts[index].inputs.put_together(tensors, sizes)
            write = writers.get(handle)
            results = None if write is None else write(graph_module, node, handle, args, kwargs)
            if results is not None:
                replace_results(node, results)
                continue
            _call_nested(graph_module, node, handle, args, kwargs, layouts[index].outputs)
    graph_module.graph.eliminate_dead_code()
    graph_module.graph.lint()
    graph_module.recompile()
    return copied


def _keep_parameters_read(graph_module: GraphModule, handle: str, module: nn.Module) -> list[str]:
    """Keep the parameters of the float custom module at ``handle`` that the model itself reads.

    If ``module`` is the float module, the graph reads its parameters. Otherwise ``module`` replaces the float
    module, and the parameters become buffers of the graph, empty ones if only dtype and device are used.
    Return the names of the parameters whose values were copied.
    """
    prefix, copied = f"{handle}.{ORIGINAL}.", []
    for node in list(graph_module.graph.nodes):
        if node.op != "get_attr" or not str(node.target).startswith(prefix):
            continue
        if not node.users:
            graph_module.graph.erase_node(node)
            continue
        name = f"{handle}.{str(node.target).removeprefix(prefix)}"
        if not isinstance(module, OpaqueModule):
            graph_module.add_submodule(handle, module)
            node.target = name
            continue
        value = operator.attrgetter(str(node.target))(graph_module).detach()
        only_metadata = all(user.target in those("new tensor") for user in node.users)
        kept = name.replace(".", "_") + ("_like" if only_metadata else "")
        nn.Module.register_buffer(
            graph_module, kept, value.new_empty(0) if only_metadata else copied_values(value)
        )
        node.target = kept
        if not only_metadata:
            copied.append(name)
    return copied


def opaque_call_nodes(graph_module: GraphModule) -> dict[Node, OpaqueModule]:
    """Return the calls of opaque modules in ``graph_module``, with the modules."""
    called = called_modules(graph_module)
    return {call: module for call, module in called if isinstance(module, OpaqueModule)}


def opaque_modules(graph_module: GraphModule) -> dict[str, OpaqueModule]:
    """Return the opaque modules that ``graph_module`` calls, by path, in the order of their first calls."""
    return {str(call.target): module for call, module in opaque_call_nodes(graph_module).items()}


def layout_index(call: Node) -> int:
    """Return which of the layouts of its module an opaque call has."""
    index = call.kwargs["opaque_layout"]
    assert isinstance(index, int)
    return index


def tensor_arguments(call: Node, module: OpaqueModule) -> tuple[Node, ...]:
    """Return the tensor arguments of an opaque call, which precede its sizes."""
    tensors = call.args[: module.opaque_layouts[layout_index(call)].inputs.count()]
    assert all(isinstance(tensor, Node) for tensor in tensors)
    return tuple(tensor for tensor in tensors if isinstance(tensor, Node))


def example_call(
    call: Node, module: OpaqueModule, tensors: Sequence[Tensor]
) -> tuple[list[Any], list[Tensor]]:
    """Return the arguments of an opaque call in the example, its ``tensors`` followed by sizes, and zeros of
    the shapes and dtypes of its results."""
    count = len(tensor_arguments(call, module))
    sizes = [_example_size(size) for size in call.args[count:]]
    return [*tensors, *sizes], [_zeros(value) for value in call.meta["val"]]


def _zeros(value: Tensor) -> Tensor:
    shape = [_example_size(size) for size in value.shape]
    return torch.zeros(shape, dtype=value.dtype, device=value.device)


def _example_size(size: Any) -> int:
    value = size.meta["val"] if isinstance(size, Node) else size
    if not isinstance(value, torch.SymInt):
        return int(value)
    # The number of rows of a PackedSequence is known only at run time.
    return value.node.hint if value.node.has_hint() else 1


def _is_packed(value: Any) -> bool:
    return isinstance(value, PackedSequence)


def _call_flat(graph_module: GraphModule, node: Node, path: str, flat: tuple[Any, ...], index: int) -> None:
    with graph_module.graph.inserting_before(node):
        call = graph_module.graph.call_module(path, flat, {"opaque_layout": index})
    call.meta = dict(node.meta)
    replace_node(node, call)
    call._rename(path.replace(".", "_"))


def _call_nested(
    graph_module: GraphModule,
    node: Node,
    path: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outputs: Structure,
) -> None:
    """Replace the opaque op ``node`` by a call of a float module in the module's own form: nested arguments,
    and a chain of lookups for each result."""
    graph = graph_module.graph
    with graph.inserting_before(node):
        args, kwargs = pytree.tree_map(
            lambda leaf: graph.call_function(PackedSequence, tuple(leaf)) if _is_packed(leaf) else leaf,
            (args, kwargs),
            is_leaf=_is_packed,
        )
        call = graph.call_module(path, args, kwargs)
        call.meta = {key: value for key, value in node.meta.items() if key != "val"}
        for position, keys in enumerate(outputs.tensor_keys()):
            for getitem in [user for user in node.users if user.args[1] == position]:
                result = call
                for key in keys:
                    lookup = getattr if isinstance(key, Field) else operator.getitem
                    result = graph.call_function(lookup, (result, key))
                result.meta = dict(getitem.meta)
                replace_node(getitem, result)
    graph.erase_node(node)


# The specs that the outer graph has around one call of a custom module.


@dataclass(frozen=True)
class OpaqueBoundary:
    """The specs at the inputs and outputs of one call of a custom module.

    Attributes:
        input_specs: the spec of each flat input that arrives as floats; None if it is not observed.
        output_dtypes: the quantized dtype of each flat output that the module quantizes itself; None
            for floats.
        output_specs: the spec of each flat output that leaves as floats; None if it is not observed.
        accepted: quantized dtypes that an input may have besides that of its spec.
    """

    input_specs: tuple[QuantizationSpec | None, ...]
    output_dtypes: tuple[torch.dtype | None, ...]
    output_specs: tuple[QuantizationSpec | None, ...]
    accepted: frozenset[torch.dtype] = field(default=frozenset())

    @classmethod
    def floats(cls, inputs: int, outputs: int) -> OpaqueBoundary:
        """Return the boundary of a call with float inputs and outputs, none of which is observed."""
        return cls((None,) * inputs, (None,) * outputs, (None,) * outputs)
