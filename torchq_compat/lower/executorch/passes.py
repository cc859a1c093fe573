"""Passes over an exported program that make ExecuTorch compute the same numbers, and XNNPACK take its
part.
"""

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.infra.pass_base import PassResult

from torchq_compat.errors import ExportError, install_extra
from torchq_compat.read import qdq
from torchq_compat.read.qparams import PerTensorQParams
from torchq_compat.support.graph_nodes import replace_node
from torchq_compat.support.upstream import OpOverloadPacket
from torchq_compat.support.user_warnings import silenced

# Rewrite quantized operators to the form that ExecuTorch's kernels accept, with the same numbers.
#
# A kernel that is given another form stops the process, not the call, so every form has to be right before
# the program is written.


ATEN = torch.ops.aten


def fit_quantized_ops(program: ExportedProgram) -> None:
    """Rewrite in place: a per-channel quantize reads its scales as float64; a cast to float16 becomes a plain
    cast; a quantized embedding dequantizes the rows that are looked up, not the table."""
    for graph_module in graphs(program.graph_module):
        graph = graph_module.graph
        for quantize in graph.find_nodes(op="call_function", target=qdq.QUANTIZE_PER_CHANNEL):
            scales: Any = quantize.args[1]
            with graph.inserting_before(quantize):
                quantize.update_arg(1, _cast(graph, scales, torch.float64))
        for cast in graph.find_nodes(op="call_function", target=qdq.CONVERT_DTYPE):
            cast.kwargs, cast.target = {"dtype": cast.args[1]}, ATEN._to_copy.default
            cast.args = cast.args[:1]
        for embedding in graph.find_nodes(op="call_function", target=ATEN.embedding.default):
            _look_up_integers(graph, embedding)
        graph.eliminate_dead_code()
        graph_module.recompile()


def graphs(graph_module: GraphModule) -> Iterator[GraphModule]:
    """Return ``graph_module`` and the bodies of its loops."""
    return (module for module in graph_module.modules() if isinstance(module, GraphModule))


def _look_up_integers(graph: Graph, embedding: Node) -> None:
    """Rewrite ``dequantize_per_channel(table)[indices]`` as ``embedding_byte``: the dequantize kernel
    supports no float zero points, which embeddings have."""
    table: Any = embedding.args[0]
    if table.target is not qdq.DEQUANTIZE_PER_CHANNEL or table.kwargs or table.args[3] != 0:
        return
    integers, scales, zero_points, _, low, high, _ = table.args
    with graph.inserting_before(embedding):
        if zero_points.meta["val"].dtype != scales.meta["val"].dtype:
            zero_points = _cast(graph, zero_points, scales.meta["val"].dtype)
        lookup = graph.call_function(
            qdq.embedding_byte(), (integers, scales, zero_points, low, high, embedding.args[1])
        )
    lookup.meta = dict(embedding.meta)
    replace_node(embedding, lookup)


def _cast(graph: Graph, node: Node, dtype: torch.dtype) -> Node:
    cast = graph.call_function(ATEN._to_copy.default, (node,), {"dtype": dtype})
    cast.meta = {**node.meta, "val": node.meta["val"].to(dtype)}
    return cast


# Rewrite the q-dq graph so that XNNPACK reads it correctly, with the same numbers.
#
# XNNPACK computes on int8. It accepts a uint8 pattern too, but reads its integers as int8; and if an
# operator reads the integers themselves, XNNPACK drops the dequantize before it also for all other readers.
# Both silently give other numbers.


OFFSET = 128


def shift_to_int8(program: ExportedProgram) -> None:
    """Shift, in place, all uint8 qparams whose integers only a dequantize reads: subtract 128 from the zero
    point and the integers."""
    for graph_module in graphs(program.graph_module):
        for quantize in graph_module.graph.find_nodes(op="call_function", target=qdq.QUANTIZE):
            qparams = PerTensorQParams.of_node(quantize)
            read = {PerTensorQParams.of_call(user, qdq.DEQUANTIZE) for user in quantize.users}
            if qparams.dtype is torch.uint8 and read <= {qparams}:
                _shift(quantize)
        graph_module.recompile()


def dequantize_per_reader(program: ExportedProgram) -> None:
    """Give every reader of a dequantize its own copy, in place."""
    graph = program.graph
    for dequantize in graph.find_nodes(op="call_function", target=qdq.DEQUANTIZE):
        for reader in list(dequantize.users)[1:]:
            with graph.inserting_before(reader):
                own = graph.node_copy(dequantize)
            reader.replace_input_with(dequantize, own)
    program.graph_module.recompile()


def _shift(quantize: Node) -> None:
    qparams = PerTensorQParams.of_node(quantize)
    shifted = replace(
        qparams,
        zero_point=qparams.zero_point - OFFSET,
        quant_min=qparams.quant_min - OFFSET,
        quant_max=qparams.quant_max - OFFSET,
        dtype=torch.int8,
    )
    for node in (quantize, *quantize.users):
        node.args = (node.args[0], *shifted.arguments())
    quantize.meta["val"] = quantize.meta["val"].to(torch.int8)


# Compute values that no step of a loop changes, such as float weights of a recurrent layer, before the loop.
#
# The results are exact: the operators and their inputs are the same. The float copy takes no more memory
# than inside the loop, where it was computed again at every step.


SCAN = torch.ops.higher_order.scan


def move_loop_invariants(graph_module: GraphModule) -> PassResult:
    """Move invariant calls out of the body of every ``scan``, in place."""
    moved = [_move_out_of(graph_module, scan) for scan in graph_module.graph.nodes if scan.target is SCAN]
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()
    return PassResult(graph_module, any(moved))


def _move_out_of(graph_module: GraphModule, scan: Node) -> bool:
    given: Any = scan.args
    body_name, init, inputs, constants = given
    body = graph_module.get_submodule(str(body_name.target))
    assert isinstance(body, GraphModule)
    arguments = body.graph.find_nodes(op="placeholder")[len(init) + len(inputs) :]
    outside: dict[Node, Any] = dict(zip(arguments, constants, strict=True))
    invariant = _invariant(body, outside)
    with graph_module.graph.inserting_before(scan):
        for node in invariant:
            outside[node] = graph_module.graph.node_copy(node, outside.__getitem__)
    for node in invariant:
        if any(user not in outside for user in node.users):
            _take_as_argument(body, arguments, node, outside)
    for node in reversed(invariant):
        body.graph.erase_node(node)
    kept = [argument for argument in arguments if argument.users]
    for argument in arguments:
        if not argument.users:
            body.graph.erase_node(argument)
    scan.args = (body_name, init, inputs, tuple(outside[argument] for argument in kept))
    body.recompile()
    return bool(invariant)


def _invariant(body: GraphModule, constants: dict[Node, Any]) -> list[Node]:
    """Return the calls that depend on ``constants`` alone, in the order of the graph."""
    known = set(constants)
    result = []
    for node in body.graph.nodes:
        if node.op == "call_function" and node.all_input_nodes and known.issuperset(node.all_input_nodes):
            known.add(node)
            result.append(node)
    return result


def _take_as_argument(body: GraphModule, arguments: list[Node], node: Node, outside: dict[Node, Any]) -> None:
    """Make the body read ``node``, which is now computed outside, from an additional argument."""
    last = body.graph.find_nodes(op="placeholder")[-1]
    with body.graph.inserting_after(last):
        argument = body.graph.placeholder(f"{node.name}_outside")
    argument.meta = dict(node.meta)
    node.replace_all_uses_with(argument, delete_user_cb=lambda user: user not in outside)
    outside[argument] = outside[node]
    arguments.append(argument)


# Import the optional ExecuTorch packages when they are needed.


def executorch_module(name: str) -> Any:
    """Return ``executorch.<name>``, with the quantized operators registered.

    Raises:
        ExportError: the extra is not installed.
    """
    try:
        with silenced():  # The Python bindings warn that they are experimental.
            import_module("executorch.kernels.quantized")
            return import_module(f"executorch.{name}")
    except ImportError as cause:
        raise ExportError.of(
            "TQ932.not_installed", cause=cause, install=install_extra("executorch")
        ) from cause


def runtime() -> Any:
    """Return ExecuTorch's runtime in this process.

    Raises:
        ExportError: the extra is not installed.
    """
    return executorch_module("runtime").Runtime.get()


# Give the results of loops the sizes of the call: a repair of programs that ExecuTorch emits.
#
# ExecuTorch allocates a tensor at its upper bound, and its kernels resize the tensors they write. Two of
# the instructions that a ``scan`` becomes (pytorch/executorch#16028) do not: ``aten::copy_``, which writes
# the states, requires the size of its target; ``executorch_prim::et_copy_index``, which stacks the outputs,
# leaves a target unchanged that is longer than the loop. Below the bounds a program would stop, or return
# the rest of a buffer as further steps. Here, states are written by ``aten::copy.out``, which resizes, and
# a stack is resized to (steps, *output) before a step is written into it.


COPY_INTO = ("aten::copy_", "")
STACK = ("executorch_prim::et_copy_index", "tensor")
IS_LAST_STEP = ("executorch_prim::eq", "Scalar")


def size_loop_results(pte: bytes) -> bytes:
    """Return ``pte`` with the results of its loops sized by the call; unchanged if it has no loops."""
    _serialize = executorch_module("exir._serialize")
    file = _serialize._deserialize_pte_binary(pte)
    names = {
        (operator.name, operator.overload)
        for plan in file.program.execution_plan
        for operator in plan.operators
    }
    if not names & {COPY_INTO, STACK}:
        return pte
    for plan in file.program.execution_plan:
        editor = _PlanEditor(plan)
        for chain in plan.chains:
            chain.instructions = editor.with_sized_results(chain.instructions)
    return bytes(_serialize._serialize_pte_binary(file, extract_delegate_segments=True))


class _PlanEditor:
    """Adds operators, values and instructions to an ``executorch.exir.schema.ExecutionPlan``."""

    def __init__(self, plan: Any) -> None:
        self.schema = executorch_module("exir.schema")
        self.plan = plan
        self.none = self._value(self.schema.Null())

    def with_sized_results(self, instructions: list[Any]) -> list[Any]:
        steps = {args[0]: args[1] for name, args in map(self._call, instructions) if name == IS_LAST_STEP}
        edited: list[Any] = []
        place_of: list[int] = []
        for instruction in instructions:
            place_of.append(len(edited))
            edited.extend(self._replacement(instruction, steps))
        for instruction in edited:
            if isinstance(instruction.instr_args, self.schema.JumpFalseCall):
                target = instruction.instr_args.destination_instruction
                instruction.instr_args.destination_instruction = place_of[target]
        return edited

    def _replacement(self, instruction: Any, steps: dict[int, int]) -> Iterator[Any]:
        name, args = self._call(instruction)
        if name == COPY_INTO:
            target, source, blocking, _ = args
            yield self._kernel("aten::copy", "out", source, source, blocking, target, target)
            return
        if name == STACK:
            stack, output, step = args
            yield from self._resize(stack, steps[step], output)
        yield instruction

    def _resize(self, stack: int, steps: int, output: int) -> Iterator[Any]:
        sizes = [steps]
        for dimension in range(len(self.plan.values[output].val.sizes)):
            sizes.append(self._value(self.schema.Int(0)))
            yield self._kernel(
                "aten::sym_size", "int", output, self._value(self.schema.Int(dimension)), sizes[-1]
            )
        size = self._value(self.schema.IntList(sizes))
        yield self._kernel("aten::empty", "out", size, self.none, stack, stack)

    def _call(self, instruction: Any) -> tuple[tuple[str, str] | None, list[int]]:
        call = instruction.instr_args
        if not isinstance(call, self.schema.KernelCall):
            return None, []
        operator = self.plan.operators[call.op_index]
        return (operator.name, operator.overload), call.args

    def _kernel(self, name: str, overload: str, *args: int) -> Any:
        operator = self.schema.Operator(name, overload)
        if operator not in self.plan.operators:
            self.plan.operators.append(operator)
        return self.schema.Instruction(
            self.schema.KernelCall(self.plan.operators.index(operator), list(args))
        )

    def _value(self, value: Any) -> int:
        self.plan.values.append(self.schema.EValue(value))
        return len(self.plan.values) - 1


# Restore ``linear`` from ``addmm`` and ``mm`` by a transposed weight, to which ExecuTorch decomposes it.
#
# The kernel for ``linear`` is a matrix product of a BLAS; the kernel for ``addmm`` is three loops after a
# copy of the weight, thirty times slower in an LSTM of 512 hidden units.


def restore_linears(graph_module: GraphModule) -> PassResult:
    """Rewrite an edge graph and the bodies of its loops in place."""
    edge = executorch_module("exir.dialects._ops").ops.edge.aten
    changed = False
    for item in graphs(graph_module):
        for node in item.graph.nodes:
            if (operands := _operands(node)) is not None:
                node.target, node.args = edge.linear.default, operands
                changed = True
        item.graph.eliminate_dead_code()
        item.recompile()
    return PassResult(graph_module, changed)


def _operands(node: Node) -> tuple[Node | None, ...] | None:
    """Return (x, weight, bias) if ``node`` is a decomposed linear; else None."""
    aten = torch.ops.aten
    if node.kwargs or not (_is(node, aten.addmm) or _is(node, aten.mm)):
        return None
    *bias, x, transposed = (arg for arg in node.args if isinstance(arg, Node))
    if not _is(transposed, aten.permute_copy) or transposed.args[1] != [1, 0]:
        return None
    if any(bia.meta["val"].dim() != 1 for bia in bias):
        return None
    return x, transposed.all_input_nodes[0], bias[0] if bias else None


def _is(node: Node, packet: OpOverloadPacket) -> bool:
    return getattr(node.target, "_op", None) is packet.default


def keep_initial_states(graph_module: GraphModule) -> PassResult:
    """Have the values of buffers written, which ExecuTorch leaves out of those that the model changes."""
    for placeholder in graph_module.graph.find_nodes(op="placeholder"):
        placeholder.meta["et_init_buffer"] = True
    return PassResult(graph_module, True)


# XNNPACK's partitioner, restricted to patterns that XNNPACK computes correctly.
#
# Its own checks inspect the pattern around a matmul or a convolution, but not the qparams: it takes uint8,
# 16-bit and narrowed qparams, and computes other numbers. It also marks the dequantize before an operator
# that it then refuses as an op that does not compute; taken alone, the dequantize would return integers as
# floats. So quantize and dequantize are taken only along with the operator between them. XNNPACK also
# reshapes, even around a convolution of one dimension, and a reshape of several free sizes fails when the
# program is written.


def xnnpack_partitioner(refused: dict[str, str]) -> Any:
    """Return the partitioner for ``to_edge_transform_and_lower``.

    Args:
        refused: filled with name of a node -> reason, for nodes whose qparams XNNPACK does not support.
    """
    partition = "backends.xnnpack.partition"
    all_configs = executorch_module(f"{partition}.config").ALL_PARTITIONER_CONFIGS
    partitioner = executorch_module(f"{partition}.xnnpack_partitioner").XnnpackPartitioner
    configs = [config for config in all_configs if "quantize" not in config.target_name]
    return partitioner(configs=[_held_to_int8(config, refused) for config in configs])


def _held_to_int8(config: type[Any], refused: dict[str, str]) -> type[Any]:
    class HeldToInt8(config):  # type: ignore[misc]
        def check_constraints(self, node: Node, ep: ExportedProgram) -> bool:
            if not super().check_constraints(node, ep):
                return False
            reason = _why_not(node, {node, *self.get_node_and_deps(node, ep)}, ep)
            if reason:
                refused[node.name] = reason
            return not reason

    HeldToInt8.__name__ = config.__name__
    return HeldToInt8


def _is_constant(node: Any, program: ExportedProgram) -> bool:
    """Return whether ``node`` is a parameter or buffer."""
    return node.op == "placeholder" and node.name not in program.graph_signature.user_inputs


def _why_not(node: Node, partition: set[Node], program: ExportedProgram) -> str:
    """Return why XNNPACK must not have ``partition``, ``node`` and its surroundings; empty if it may."""
    if any(map(_reshapes_free_sizes, partition)):
        return "XNNPACK reshapes a tensor with one free size at most"
    quantized = [entry for entry in partition if _is_quantized(entry)]
    if not quantized and any(_is_quantized(producer) for producer in node.all_input_nodes):
        return "not in the pattern of a quantized operator: dequantize, operator, quantize"
    reasons = (_wrong_qparams(item, is_weight=_is_constant(item.args[0], program)) for item in quantized)
    return next(filter(None, reasons), "")


def _wrong_qparams(node: Node, *, is_weight: bool) -> str:
    if "per_channel" in name_of(node):
        dtype = node.args[6]
        return "" if dtype is torch.int8 else f"XNNPACK computes on int8, not {dtype}"
    qparams = PerTensorQParams.of_node(node)
    # A weight is stored as its integers: nothing is clamped at run time.
    narrow = (qparams.quant_min, qparams.quant_max) != (-128, 127) and not is_weight
    if qparams.dtype is torch.int8 and not narrow:
        return ""
    result = f"{qparams.dtype} [{qparams.quant_min}, {qparams.quant_max}]"
    return f"XNNPACK computes on int8 from -128 to 127, not {result}"


def _reshapes_free_sizes(node: Node) -> bool:
    """Return whether XNNPACK reshapes for ``node``, to or from a shape with several free sizes."""
    name = name_of(node)
    shapes = [item.meta["val"].shape for item in (node, *node.all_input_nodes[:1]) if "val" in item.meta]
    is_1d_convolution = "convolution" in name and len(shapes[0]) == 3
    if not is_1d_convolution and "squeeze_copy" not in name:
        return False
    return any(sum(isinstance(size, torch.SymInt) for size in shape) > 1 for shape in shapes)


def _is_quantized(node: Node) -> bool:
    # Variants with qparams as tensors, not "default", choose the qparams at run time.
    return "quantize_per_" in name_of(node) and "default" in name_of(node)


def name_of(node: Node) -> str:
    """Return the name of the operator that ``node`` calls."""
    return getattr(node.target, "__name__", str(node.target))
