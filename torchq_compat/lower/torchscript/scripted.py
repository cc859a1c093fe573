"""The compiled function of a captured model, and the plain module around it for torch.jit.script."""

from __future__ import annotations
import __future__

import itertools
import linecache
import math
import operator
import re
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Optional

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from torchq_compat.capture.call_layouts import CallLayout
from torchq_compat.capture.opaque_calls import OpaqueModule, layout_index
from torchq_compat.capture.sizes.find_sizes import rules_of_reads
from torchq_compat.capture.sizes.input_sizes import SizeRule
from torchq_compat.capture.sizes.size_reads import SizeReads
from torchq_compat.capture.torch_export import EVERY_SIZE, capture, capture_freely, clean_captured
from torchq_compat.errors import ExportError
from torchq_compat.lower.torchscript.source import (
    FUNCTIONS,
    HELPERS,
    FunctionSource,
    flat_results,
    literal,
    write_function,
)
from torchq_compat.model.other_tools import is_asked_by_torch_jit
from torchq_compat.modules.user_modules import OpaqueUserModule
from torchq_compat.read.qparams import QParams
from torchq_compat.recurrent.contracts import RecurrentContract, as_given
from torchq_compat.recurrent.over_time import LoopShape, exporting_loops_as
from torchq_compat.recurrent.python_loops import OpaqueLoop
from torchq_compat.recurrent.recurrent_module import RecurrentModule
from torchq_compat.support import metadata
from torchq_compat.support.upstream import pytree, symbolic_shapes_config, tracing_paused
from torchq_compat.support.user_warnings import warn_user

if TYPE_CHECKING:
    from torchq_compat.model.graph_module import QuantizationGraphModule


NAMES: dict[str, Any] = {"Dict": dict, "List": list, "Optional": Optional, "Tuple": tuple}
_FILES = itertools.count()
ATEN = torch.ops.aten
#: Conditions about sizes that are valid in TorchScript too.
PLAIN_CONDITION = re.compile(r"(?:[\w\s()+\-*%<>=!]|//)*")


@dataclass(frozen=True)
class ScriptedGraph:
    """A captured model in TorchScript.

    Attributes:
        model: the model it was made from.
        source: the text of ``function``, and its constants.
        function: maps its flat inputs and the constants to its flat results.
    """

    model: QuantizationGraphModule
    source: FunctionSource
    function: Any

    def call(self, args: tuple[Any, ...]) -> Any:
        """Call the function with positional arguments of the model, while torch.jit.trace records.

        Raises:
            ExportError: the model is what is traced, and returns what no trace can.
        """
        unknown = _without_form(_out_spec(self.model.reference))
        if unknown is not None and is_asked_by_torch_jit():
            raise _structure_refused(unknown)
        flat = pytree.tree_leaves(args, is_leaf=lambda leaf: leaf is None)
        result = self.function(*flat, *self.source.constants.values())
        results = iter(result if len(self.source.results) != 1 else (result,))
        returned = flat_results(self.model.reference.graph.output_node())
        leaves = [next(results) if isinstance(item, Node) else item for item in returned]
        return pytree.tree_unflatten(leaves, _out_spec(self.model.reference))

    def module(self) -> nn.Module:
        """Return a plain module that torch.jit.script compiles."""
        name, (parameters, lines) = type(self.model).__name__, _forward_lines(self)
        module = module_around(self.function, self.source.constants, name, parameters, lines)
        return module.train(self.model.training)


def scripted_graph(model: QuantizationGraphModule) -> ScriptedGraph:
    """Return the graph that ``model`` runs, compiled by torch.jit.

    Raises:
        ExportError: a module or operator that TorchScript cannot express; the error names it.
    """
    with tracing_paused():
        return _scripted_graph(model)


def _scripted_graph(model: QuantizationGraphModule) -> ScriptedGraph:
    if model.is_prepared:
        warn_user("TQ705")
    source = write_function(
        model, lambda path: operator.attrgetter(path)(model), partial(_call_of_module, model)
    )
    source.lines[:0] = _checks(model, [name for name, _ in source.inputs])
    source.is_without_gradients = model.reference is not model
    name = f"{re.sub('[^0-9A-Za-z]', '_', type(model).__name__)}_graph"
    return ScriptedGraph(model, source, script_source(source, name))


def _call_of_module(
    model: QuantizationGraphModule, node: Node, function: FunctionSource, args: list[str]
) -> str:
    """Write the call of a module: an observer, or one that is opaque to the graph."""
    path = str(node.target)
    module = operator.attrgetter(path)(model)
    if hasattr(module, "activation_post_process") or hasattr(module, "fake_quant_enabled"):
        return _fake_quantized(module, function, args[0], path)
    if hasattr(module, "calculate_qparams"):
        return args[0]
    inner = _function_of_leaf(module, node, model)
    if isinstance(module, OpaqueModule) and module.leaf_quantizes:
        inner.is_without_gradients = True
        _take_and_hand_integers(inner, module.opaque_layouts[layout_index(node)], node)
    name = f"module_{len(function.called)}"
    function.called[name] = script_source(inner, name)
    constants = [function.constant(value) for value in inner.constants.values()]
    call = f"{name}({', '.join([*args, *constants])})"
    return f"({call},)" if len(inner.results) == 1 and isinstance(module, OpaqueModule) else call


def _function_of_leaf(leaf: nn.Module, node: Node, model: QuantizationGraphModule) -> FunctionSource:
    """Return a call of ``leaf`` as a function, from its exported form, with its loops rolled. A float
    module has the results of its own call, an opaque one flat ones."""
    counterpart, is_opaque = _reference_node(node, model), isinstance(leaf, OpaqueModule)
    kwargs = {"opaque_layout": node.kwargs.get("opaque_layout")} if is_opaque else counterpart.kwargs
    given, form = pytree.tree_flatten((counterpart.args, kwargs))
    places = [index for index, item in enumerate(given) if isinstance(item, Node)]
    # A reference graph does not say which arguments its lowered form has in integers.
    own = pytree.tree_leaves((node.args, kwargs)) if is_opaque else given
    examples = tuple(_example(given[index], own[index], leaf) for index in places)
    path = str(node.target)
    if any(not isinstance(example, Tensor) for example in examples):
        raise _refused(
            type(leaf).__name__, path, "it is called with a size, or with one that depends on values"
        )

    class Called(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.leaf = leaf

        def forward(self, *flat: Tensor) -> Any:
            leaves = dict(enumerate(given)) | dict(zip(places, flat, strict=True))
            args, kwargs = pytree.tree_unflatten(list(leaves.values()), form)
            return self.leaf(*args, **kwargs)

    observed = ExportError.of("TQ930.script_observers", leaf=leaf, path=path)
    if model.is_prepared and isinstance(leaf, RecurrentModule):
        raise observed  # Its loop would be unrolled.
    has_loop = any(isinstance(module, OpaqueLoop) for module in leaf.modules())
    reads = SizeReads()
    try:
        with exporting_loops_as(LoopShape.ROLLED), torch.no_grad():
            called = Called().train(leaf.training)
            if has_loop and _reads_sizes(leaf):
                # The body of a scan is traced on its own, where sizes are numbers unless torch has symbols.
                with symbolic_shapes_config.patch(backed_size_oblivious=True):
                    captured, _ = capture(called, examples, EVERY_SIZE)
                clean_captured(captured)
            else:
                captured = capture_freely(called, examples, reads)
    except Exception as cause:
        if model.is_prepared:
            raise observed from cause
        raise _refused(type(leaf).__name__, path, f"{type(cause).__name__}: {cause}") from cause

    source = _source_of_graph(captured, type(leaf).__name__, path)
    if not is_opaque or isinstance(leaf, OpaqueUserModule | GraphModule):
        # The function is what the module's Python decides at the sizes of the example.
        labels = {f"argument {n} of {path}": name for n, (name, _) in enumerate(source.inputs)}
        rules = rules_of_reads(dict(zip(labels, examples, strict=True)), reads.read)
        source.lines[:0] = _checks_of(rules, labels)
    if not is_opaque:
        source.results = [_result_of_call(captured, source.results)]
    return source


def _reads_sizes(leaf: nn.Module) -> bool:
    graphs = (module.graph for module in leaf.modules() if isinstance(module, GraphModule))
    return any(graph.find_nodes(op="call_function", target=ATEN.sym_size.int) for graph in graphs)


def _take_and_hand_integers(inner: FunctionSource, layout: CallLayout, node: Node) -> None:
    """Make the function of a leaf dequantize integers, and quantize the results read as such."""

    def call_of(op: Any, value: str, qparams: QParams) -> str:
        numbers = qparams.arguments("", lambda _, tensor: inner.constant(tensor), torch.device("cpu"))
        return f"{FUNCTIONS[op].__name__}({value}, {', '.join(map(str, numbers))})"

    lines = []
    for (name, _), qparams in zip(inner.inputs, layout.input_qparams, strict=False):
        if qparams is not None:
            floats = call_of(qparams.dequantize_op, name, qparams)
            lines.append(f"{name} = {name} if {name}.is_floating_point() else {floats}")
    inner.lines[:0] = lines
    asked: Any = node.kwargs.get("leaf_quantized", ())
    for position in asked:
        qparams = layout.output_qparams[position]
        assert qparams is not None
        inner.results[position] = call_of(qparams.quantize_op, inner.results[position], qparams)


def _source_of_graph(captured: GraphModule, kind: str = "the module", path: str = "") -> FunctionSource:
    """Return the function of a graph that calls no modules, with constants that require no gradient.

    Raises:
        ExportError: the graph calls a module, or an operator that TorchScript cannot express.
    """

    def no_module(call: Node, *_: Any) -> str:
        raise _refused(kind, path, f"it calls {call.target!s}")

    return write_function(captured, lambda name: operator.attrgetter(name)(captured), no_module)


def _reference_node(node: Node, model: QuantizationGraphModule) -> Node:
    """Return the counterpart of ``node`` in the reference graph, whose nodes know their shapes."""
    if model.reference is model:
        return node
    name = metadata.REFERENCE_NODE.of(node)
    result: Node = next(item for item in model.reference.graph.nodes if item.name == name)
    return result


def _example(argument: Node, own: Node, leaf: nn.Module) -> Any:
    """Return a tensor of the sizes of ``argument`` in the example, and the dtype of ``own``, which stands for
    it; in floats if ``leaf`` accepts floats."""
    source, value = argument, argument.meta.get("val")
    while not isinstance(value, Tensor) and source.all_input_nodes:
        source = source.all_input_nodes[0]
        value = source.meta.get("val")
    if not isinstance(value, Tensor) or any(
        isinstance(size, torch.SymInt) and size.node.hint is None for size in value.shape
    ):
        return None
    sizes = [int(size) if isinstance(size, int) else int(size.node.hint) for size in value.shape]
    dtype = value.dtype
    if (integers := metadata.INTEGERS.of(own)) is not None:
        dtype = integers.dtype
    if isinstance(leaf, OpaqueModule) and leaf.opaque_in_floats and not dtype.is_floating_point:
        dtype = leaf.opaque_float_dtype()
    return torch.zeros(sizes, dtype=dtype)


def _fake_quantized(module: nn.Module, function: FunctionSource, x: str, path: str) -> str:
    scale, zero_point = getattr(module, "scale", None), getattr(module, "zero_point", None)
    enabled = getattr(module, "fake_quant_enabled", None)
    if not isinstance(scale, Tensor) or not isinstance(zero_point, Tensor) or not isinstance(enabled, Tensor):
        raise _refused(type(module).__name__, path, "it has no scale and zero point of its own")
    if not bool(enabled[0]):
        return x
    qparams = [function.constant(scale.detach()), function.constant(zero_point.detach())]
    source: Any = getattr(module, "activation_post_process", module)
    bounds = [str(int(source.quant_min)), str(int(source.quant_max))]
    if scale.numel() > 1:
        axis = str(int(getattr(module, "ch_axis", 0)))
        return f"torch.fake_quantize_per_channel_affine({', '.join([x, *qparams, axis, *bounds])})"
    return f"torch.fake_quantize_per_tensor_affine({', '.join([x, *qparams, *bounds])})"


def script_source(source: FunctionSource, name: str) -> Any:
    """Return ``source`` compiled by torch.jit.

    Raises:
        ExportError: torch.jit cannot compile it.
    """
    return _scripted_text(source.text(name), name, tuple(source.called.items()))


@lru_cache(maxsize=64)
def _scripted_text(text: str, name: str, called: tuple[tuple[str, Any], ...]) -> Any:
    """Compile a text once: torch.jit.trace traces twice and compares the functions."""
    try:
        return torch.jit.script(compile_text(text, name, {**HELPERS, **dict(called)}))
    except RuntimeError as cause:
        first = next(line for line in str(cause).splitlines() if line.strip())
        raise ExportError.of("TQ930.script_graph", first=first) from cause


def compile_text(text: str, name: str, known: dict[str, Any]) -> Callable[..., Any]:
    """Return the Python function of ``text``, kept in linecache for torch.jit, which reads it by inspect."""
    file = f"<torchq_compat.torchscript.{next(_FILES)}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    namespace = {**NAMES, **known, "torch": torch, "math": math, "__name__": "torchq_compat.torchscript"}
    exec(
        compile(text, file, "exec", flags=__future__.annotations.compiler_flag, dont_inherit=True), namespace
    )
    function: Callable[..., Any] = namespace[name]
    return function


# --- the module around the function ---


def module_around(
    function: Any, constants: dict[str, Tensor], name: str, parameters: Sequence[str], lines: Sequence[str]
) -> nn.Module:
    """Return a module of ``constants``, with the body ``lines`` that call ``graph_function``."""
    text = f"def forward(self, {', '.join(parameters)}):\n" + "".join(f"    {line}\n" for line in lines)
    forward = compile_text(text, "forward", {"graph_function": function, "Tensor": Tensor})
    module: nn.Module = type(f"Scripted{name}", (nn.Module,), {"forward": forward})()
    for constant, value in constants.items():
        module.register_buffer(constant, value)
    return module


def _forward_lines(scripted: ScriptedGraph) -> tuple[list[str], list[str]]:
    model = scripted.model
    info = model.reference.graph._codegen.pytree_info  # type: ignore[attr-defined]
    spec = info.in_spec.children()[0]
    names = list(model.record.signature.names or info.orig_args)
    kinds = iter(kind for _, kind in scripted.source.inputs)
    typed, flat = [], []
    for name, child in zip(names, spec.children(), strict=True):
        typed.append(f"{name}: {_type_of_spec(child, kinds)}")
        flat += list(_leaves_of(child, name))
    constants = [f"self.{name}" for name in scripted.source.constants]
    lines = [f"results = graph_function({', '.join([*flat, *constants])})"]
    count = len(scripted.source.results)
    results = ["results"] if count == 1 else [f"results[{i}]" for i in range(count)]
    lines.append(f"return {_result_of_call(model.reference, results)}")
    return typed, lines


def _checks(model: QuantizationGraphModule, names: Sequence[str]) -> Iterator[str]:
    """Yield assertions about the values and sizes that capture fixed or related to each other, of flat inputs
    with these ``names``."""
    spec = model.reference.graph._codegen.pytree_info.in_spec.children()[0]  # type: ignore[attr-defined]
    labels = model.record.signature.labelled(pytree.tree_unflatten([None] * len(names), spec))
    inputs, sizes = dict(zip(labels, names, strict=True)), model.record.signature.sizes
    for label, value in sizes.constants.items():
        message = f"{label} is not as captured: {value!r}"
        same = "is" if value is None else "=="
        yield f"assert {inputs[label]} {same} {literal(value, '', {})}, {message!r}"
    for label, rank in sizes.ranks.items() if sizes.rules else ():
        message = f"{label} has to have {rank} dimensions in TorchScript"
        yield f"assert {inputs[label]}.dim() == {rank}, {message!r}"
    yield from _checks_of(sizes.rules, inputs)


def _checks_of(rules: Iterable[SizeRule], inputs: Mapping[str, str]) -> Iterator[str]:
    """Yield assertions of ``rules`` on the sizes of inputs, each called as in ``inputs``."""
    written = set[str]()
    for rule in filter(None, (item.as_plain() for item in rules)):
        condition = rule.condition
        if not PLAIN_CONDITION.fullmatch(condition):
            continue
        for name, (label, index) in rule.places.items():
            if name not in written:
                written.add(name)
                yield f"{name} = {inputs[label]}.size({index})"
        message = f"{rule.dimension.name} is not as captured: {rule.expected}"
        yield f"assert {condition}, {message!r}"


def _out_spec(model: GraphModule) -> Any:
    return model.graph._codegen.pytree_info.out_spec  # type: ignore[attr-defined]


def _result_of_call(model: GraphModule, flat: Sequence[str]) -> str:
    """Return what a call of ``model`` returns, given those of its ``flat`` results that it computes."""
    computed, returned = iter(flat), flat_results(model.graph.output_node())
    leaves = iter(next(computed) if isinstance(item, Node) else repr(item) for item in returned)
    return _rebuilt(_out_spec(model), leaves)


def _is_leaf(spec: Any) -> bool:
    return spec.type is None or spec.is_leaf()


def _without_form(spec: Any) -> Any:
    """Return a spec inside ``spec`` of a class that torch.jit has no type for, or None."""
    if _is_leaf(spec) or spec.type is namedtuple or issubclass(spec.type, (tuple, list, dict)):
        return next(filter(None, map(_without_form, spec.children())), None)
    return spec


def _type_of_spec(spec: Any, kinds: Iterator[str]) -> str:
    if _is_leaf(spec):
        return next(kinds)
    inner = [_type_of_spec(child, kinds) for child in spec.children()]
    if spec.type is tuple:
        return f"Tuple[{', '.join(inner)}]"
    if spec.type is list and set(inner) == {"Tensor"}:
        return "List[Tensor]"
    if spec.type is dict and set(inner) == {"Tensor"}:
        return "Dict[str, Tensor]"
    raise _structure_refused(spec)


def _leaves_of(spec: Any, place: str) -> Iterator[str]:
    if _is_leaf(spec):
        yield place
        return
    keys = spec.context if spec.type is dict else range(len(spec.children()))
    for key, child in zip(keys, spec.children(), strict=True):
        yield from _leaves_of(child, f"{place}[{key!r}]")


def _rebuilt(spec: Any, leaves: Iterator[str]) -> str:
    if _is_leaf(spec):
        return next(leaves)
    inner = [_rebuilt(child, leaves) for child in spec.children()]
    if spec.type is tuple or (isinstance(spec.type, type) and issubclass(spec.type, tuple)):
        return f"({', '.join(inner)},)"
    if spec.type is list:
        return f"[{', '.join(inner)}]"
    if spec.type is dict:
        return (
            "{" + ", ".join(f"{key!r}: {item}" for key, item in zip(spec.context, inner, strict=True)) + "}"
        )
    raise _structure_refused(spec)


def _structure_refused(spec: Any) -> ExportError:
    return ExportError.of("TQ930.script_structure", kind=spec.type.__name__)


def _refused(kind: str, path: str, why: str) -> ExportError:
    return ExportError.of("TQ930.script_module", kind=kind, path=path, why=why)


# --- a recurrent module of an eager model: torch.nn's signature around one compiled function ---


class _Flat(nn.Module):
    """The module, called with its states as separate arguments."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, *states: Tensor) -> Any:
        return self.module(x, as_given(states))


def scripted_recurrent(module: nn.Module, contract: RecurrentContract) -> nn.Module:
    """Return a plain module that torch.jit.script compiles, called like ``module`` with batched tensors."""
    leading = (["batch", "steps"] if contract.batch_first else ["steps", "batch"])[3 - contract.rank :]
    rank, batch, shapes = contract.rank, leading.index("batch"), contract.state_shapes([*leading, -1])
    sizes = {"batch": 2, "steps": 3}
    x, *states = (
        torch.zeros([sizes.get(size, size) for size in shape])
        for shape in ([*leading, contract.input_size], *shapes)
    )
    with exporting_loops_as(LoopShape.ROLLED), torch.no_grad():
        captured = capture_freely(_Flat(module).eval(), (x, *states))
    source = _source_of_graph(captured)
    source.results = [_result_of_call(captured, source.results)]
    zeros = [f"input.new_zeros([{', '.join(map(str, shape))}])" for shape in shapes]
    kind, given, zero = "Tensor", ["hx"], zeros[0]
    if len(shapes) > 1:
        kind, zero = f"Tuple[{', '.join(['Tensor'] * len(shapes))}]", f"({', '.join(zeros)})"
        given = [f"hx[{index}]" for index in range(len(shapes))]
    constants = [f"self.{name}" for name in source.constants]
    lines = [
        f"assert input.dim() == {rank}, 'the input has to have {rank} dimensions in TorchScript'",
        f"batch = input.size({batch})",
        f"if hx is None: hx = {zero}",
        f"return graph_function({', '.join(['input', *given, *constants])})",
    ]
    name, parameters = contract.kind.name, ["input: Tensor", f"hx: Optional[{kind}] = None"]
    return module_around(
        script_source(source, f"{name}_call"), source.constants, name, parameters, lines
    ).eval()
