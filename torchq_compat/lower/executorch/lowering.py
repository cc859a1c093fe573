"""``to_executorch``: lower a converted model to a ``.pte`` file."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from operator import getitem
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Node

from torchq_compat.errors import ExportError
from torchq_compat.lower.executorch import passes
from torchq_compat.lower.executorch.recurrent_kernel import load_recurrent_kernel
from torchq_compat.lower.export import export, newly_fixed
from torchq_compat.lower.streaming import StreamingModel
from torchq_compat.read.example_inputs import read_example_inputs
from torchq_compat.read.old_forms import takes_old_keywords
from torchq_compat.support.argument_checks import PATH, checked_arguments, optional
from torchq_compat.support.atomic_files import whole_file
from torchq_compat.support.dtypes import dtype_name
from torchq_compat.support.process_state import alone, without_autocast
from torchq_compat.support.report import slow_stages
from torchq_compat.support.upstream import limits_of, pytree
from torchq_compat.support.user_warnings import is_of_treespec, silenced, warn_user

# The inputs of an ExecuTorch program, with their largest sizes, for which it plans its memory.


class SizeRange(NamedTuple):
    """The sizes a dimension may have, both ends included."""

    low: int
    high: int

    def __str__(self) -> str:
        return str(self.high) if self.low == self.high else f"{self.low}..{self.high}"


@dataclass(frozen=True)
class InputSpec:
    """A flat input. ``dtype`` is None if it is unknown, ``sizes`` is None if the input is no tensor."""

    name: str
    dtype: torch.dtype | None
    sizes: tuple[SizeRange, ...] | None

    def check(self, index: int, value: Any) -> None:
        """Raise an ExportError if ``value`` does not fit this input."""
        if self.sizes is None:
            return
        if not isinstance(value, Tensor) or value.dim() != len(self.sizes):
            result = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise _other_inputs(f"input {index} is {result}", [str(self)])
        if self.dtype is not None and value.dtype is not self.dtype:
            raise _other_inputs(f"input {index} is {value.dtype}", [str(self)])
        for dimension, (size, allowed) in enumerate(zip(value.shape, self.sizes, strict=True)):
            if size > allowed.high and allowed.low != allowed.high:
                raise ExportError.of(
                    "TQ932.size", index=index, size=size, dimension=dimension, highest=allowed.high
                )
            if not allowed.low <= size <= allowed.high:
                raise _other_inputs(f"input {index} has size {size} in dimension {dimension}", [str(self)])

    def __str__(self) -> str:
        dtype = dtype_name(self.dtype) if self.dtype else "tensor"
        sizes = "" if self.sizes is None else f"[{', '.join(map(str, self.sizes))}]"
        return f"{self.name}: {dtype}{sizes}".removeprefix(": ")


def bounded_by(example_inputs: tuple[Any, ...]) -> Any:
    """Return ``dynamic_shapes`` with which every size that the model leaves free ranges from 1 to its value
    in ``example_inputs``."""

    def sizes(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return None
        return {i: Dim.AUTO(min=1, max=size) for i, size in enumerate(leaf.shape) if size > 1}

    return pytree.tree_map(sizes, example_inputs)


def read_inputs(program: ExportedProgram) -> tuple[InputSpec, ...]:
    """Return the flat inputs of ``program``.

    Raises:
        ExportError: a free size without an upper bound.
    """
    nodes = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    given = (spec for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT)
    return tuple(_input(nodes[spec.arg.name]) for spec in given)


def _input(placeholder: Node) -> InputSpec:
    value = placeholder.meta.get("val")
    if not isinstance(value, Tensor):
        return InputSpec(placeholder.name, None, None)
    ranges = tuple(_range(placeholder, i, size) for i, size in enumerate(value.shape))
    return InputSpec(placeholder.name, value.dtype, ranges)


def _range(placeholder: Node, dimension: int, size: int | torch.SymInt) -> SizeRange:
    # A size that was free and then fixed is still a SymInt.
    if not isinstance(size, torch.SymInt) or size.node.expr.is_number:
        return SizeRange(int(size), int(size))
    low, high = limits_of(size)
    if high is None:
        raise ExportError.of("TQ932.no_upper_bound", dimension=dimension, placeholder=placeholder.name)
    # torch.export assumes a free size to be at least 2, but such a program also runs with size 1.
    return SizeRange(1 if low == 2 else int(low), int(high))


# Report for every op whether an ExecuTorch backend took it or it runs on the portable kernels.


IN_LOOP = "in the body of a loop, where weights are arguments and a delegate wants constants"
NO_PATTERN = "no kernel of the backend, or not in the pattern it looks for"


@dataclass(frozen=True)
class DelegationReport:
    """Operators by name, each with its count; ``str()`` is a table.

    Attributes:
        backend: ``portable`` or ``xnnpack``.
        subgraphs: the number of delegates.
        delegated: the operators that run in the delegates.
        left: the operators that the portable kernels run: (operator, reason) -> count.
    """

    backend: str
    subgraphs: int = 0
    delegated: Mapping[str, int] = field(default_factory=dict)
    left: Mapping[tuple[str, str], int] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.backend}: {sum(self.delegated.values())} operators in {self.subgraphs} delegates"]
        lines += [f"  {count:4}  {name}" for name, count in sorted(self.delegated.items())]
        lines.append(f"portable kernels: {sum(self.left.values())} operators")
        lines += [
            f"  {count:4}  {name}" + (f"  ({reason})" if reason else "")
            for (name, reason), count in sorted(self.left.items())
        ]
        return "\n".join(lines)


def read_delegation(graph_module: GraphModule, backend: str, refused: Mapping[str, str]) -> DelegationReport:
    """Return the report for the graph of an edge program.

    Args:
        refused: name of a node -> why the backend must not have it.
    """
    delegated: Counter[str] = Counter()
    left: Counter[tuple[str, str]] = Counter()
    subgraphs = 0
    for node, in_loop in _calls(graph_module):
        name = _name(node)
        if name == "executorch_call_delegate":
            subgraphs += 1
            lowered: Any = graph_module.get_submodule(str(node.all_input_nodes[0].target))
            delegated.update(_name(item) for item, _ in _calls(lowered.original_module.graph_module))
        else:
            reason = refused.get(node.name) or (IN_LOOP if in_loop else NO_PATTERN)
            left[name, "" if backend == "portable" else reason] += 1
    return DelegationReport(backend, subgraphs, dict(delegated), dict(left))


def _calls(graph_module: GraphModule, *, in_loop: bool = False) -> Iterator[tuple[Node, bool]]:
    """Yield the calls that compute, and whether each is in a loop."""
    for node in graph_module.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is torch.ops.higher_order.scan:
            body = graph_module.get_submodule(str(node.args[0].target))
            assert isinstance(body, GraphModule)
            yield from _calls(body, in_loop=True)
        elif isinstance(node.meta.get("val"), (torch.Tensor, tuple, list)) and node.target is not getitem:
            yield node, in_loop


def _name(node: Node) -> str:
    return passes.name_of(node).removesuffix(".default")


# An ExecuTorch program: the bytes of a ``.pte`` file, and the signature of its inputs and results.


METHOD = "forward"


@dataclass(frozen=True)
class ExecutorchProgram:
    """A program made by ``to_executorch``; calling it with the model's arguments runs ExecuTorch's runtime.

    Attributes:
        pte: the content of a ``.pte`` file.
        inputs: the flat inputs, with the sizes they may have.
        report: which operators a backend took and which the portable kernels run; None for a program that was
            read from a file.
        structure: the structure of the results; None for a program that was read from a file, which returns a
            flat tuple.
    """

    pte: bytes = field(repr=False)
    inputs: tuple[InputSpec, ...]
    report: DelegationReport | None = None
    structure: pytree.TreeSpec | None = field(default=None, repr=False)

    @classmethod
    @checked_arguments(path=PATH)
    def read(cls, path: str | os.PathLike[str]) -> Self:
        """Return the program in a ``.pte`` file. The file states only the largest sizes of its inputs.

        Raises:
            ExportError: the file is no program that the runtime can load, or the extra is not installed.
        """
        pte = Path(path).read_bytes()
        try:
            meta = passes.runtime().load_program(pte).metadata(METHOD)
        except RuntimeError as cause:
            raise _unreadable(Path(path).name, cause) from cause
        tensors = (meta.input_tensor_meta(index) for index in range(meta.num_inputs()))
        all_sizes = (tuple(SizeRange(0, size) for size in tensor.sizes()) for tensor in tensors)
        return cls(pte, tuple(InputSpec("", None, sizes) for sizes in all_sizes))

    def load(self) -> None:
        """Load the program into the runtime of this process; otherwise, the first call does so.

        Raises:
            ExportError: the runtime refuses the program, or the extra is not installed.
        """
        try:
            self._method  # noqa: B018
        except RuntimeError as cause:
            raise _unreadable("the program", cause) from cause

    @checked_arguments(path=PATH)
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the ``.pte`` file, whole or not at all.

        Raises:
            OSError: the file cannot be written; an existing file is left unchanged.
        """
        with whole_file(Path(path)) as file:
            file.write(self.pte)

    def __call__(self, *args: Any) -> Any:
        """Run with positional ``args``, nested like the model's.

        Raises:
            ExportError: the number of inputs, a dtype or a size differs from those of the program, or the
                runtime stops with an error.
        """
        # The runtime reads memory in the order of the dimensions, without strides.
        ordered = pytree.tree_map_only(Tensor, lambda leaf: leaf.detach().contiguous(), args)
        leaves = pytree.tree_leaves(ordered)
        if len(leaves) != len(self.inputs):
            raise _other_inputs(f"{len(leaves)} inputs were given", [str(item) for item in self.inputs])
        for index, (leaf, spec) in enumerate(zip(leaves, self.inputs, strict=True)):
            spec.check(index, leaf)
        self.load()
        try:
            results = tuple(self._method.execute(leaves))
        except RuntimeError as cause:
            raise ExportError.of("TQ932.stopped", cause=cause) from cause
        return results if self.structure is None else pytree.tree_unflatten(results, self.structure)

    @cached_property
    def _method(self) -> Any:
        return passes.runtime().load_program(self.pte).load_method(METHOD)


def _other_inputs(problem: str, expected: Iterable[str]) -> ExportError:
    return ExportError.of("TQ932.other_inputs", problem=problem, expected=", ".join(expected))


def _unreadable(name: str, cause: BaseException) -> ExportError:
    return ExportError.of("TQ932.unreadable", name=name, cause=cause)


# ``to_executorch``: lower a converted model to a ``.pte`` file.


BACKENDS = ("portable", "xnnpack")
SHAPES = ("rolled", "opaque")


@takes_old_keywords()
@checked_arguments(path=optional(PATH))
@without_autocast()
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
        converted: what ``convert_fx`` or ``convert_to_reference_fx`` returned, in evaluation mode; or what
            ``streaming`` returned, in the example's batch size.
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
        ExportError: the extra ``executorch`` is not installed; an unknown ``backend`` or ``recurrent``; a
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
        raise ExportError.of("TQ932.backend", backend=backend, backends=", ".join(map(repr, BACKENDS)))
    passes.executorch_module("exir")
    if recurrent not in SHAPES:
        raise ExportError.of("TQ932.recurrent", recurrent=recurrent, shapes=", ".join(map(repr, SHAPES)))
    if recurrent == "opaque":
        load_recurrent_kernel()
    args = read_example_inputs(example_inputs)
    bounds = bounded_by(args) if dynamic_shapes is None else dynamic_shapes
    with slow_stages("to_executorch") as begin:
        begin("export")
        exported = export(converted, args, recurrent=recurrent, dynamic_shapes=bounds)
        inputs = read_inputs(exported)
        if dynamic_shapes is None and not isinstance(converted, StreamingModel):
            # The q-dq graph of a lowered model is its attribute ``reference``.
            reference: Any = getattr(converted, "reference", converted)
            if fixed := [place for place, size in newly_fixed(exported, reference) if size > 1]:
                warn_user("TQ702", sizes=", ".join(fixed))
        begin("lower")
        structure = exported.call_spec.out_spec
        try:
            # With gradients enabled, every pass over the graph would also trace the backward of its loops.
            with alone(), torch.no_grad(), silenced(is_of_treespec, FutureWarning):
                pte, report = _lower(exported, backend)
        except ExportError:
            raise
        except Exception as cause:
            raise _cannot_lower(backend, cause) from cause
    if backend != "portable" and not report.subgraphs:
        warn_user("TQ704", backend=backend, report=report)
    program = ExecutorchProgram(pte, inputs, report, structure)
    program.load()
    if path is not None:
        program.save(path)
    return program


def _lower(exported: ExportedProgram, backend: str) -> tuple[bytes, DelegationReport]:
    """Return the ``.pte`` and the report of ``exported``, which is modified."""
    exir = passes.executorch_module("exir")
    passes.fit_quantized_ops(exported)
    call: Any = exported.module_call_graph[0].signature
    call.in_spec, call.out_spec = _without_namedtuples(call.in_spec), _without_namedtuples(call.out_spec)
    refused: dict[str, str] = {}
    partitioners = []
    if backend == "xnnpack":
        passes.shift_to_int8(exported)
        passes.dequantize_per_reader(exported)
        partitioners.append(passes.xnnpack_partitioner(refused))
    # Quantize, dequantize and scan are not in core ATen.
    config = exir.EdgeCompileConfig(_check_ir_validity=False)
    if partitioners:
        edge = exir.to_edge_transform_and_lower(exported, partitioner=partitioners, compile_config=config)
    else:  # It decomposes once, the other twice.
        edge = exir.to_edge(exported, compile_config=config)
    report = read_delegation(edge.exported_program().graph_module, backend, refused)
    transforms = (passes.restore_linears, passes.move_loop_invariants, passes.keep_initial_states)
    manager = edge.transform(transforms).to_executorch()
    _check_kernels(manager.executorch_program)
    return passes.size_loop_results(manager.buffer), report


def _without_namedtuples(spec: pytree.TreeSpec) -> pytree.TreeSpec:
    """Return ``spec`` with tuples instead, which a file has words for. The runtime's values are flat."""

    def with_tuples(nested: Any) -> Any:
        is_named = pytree.is_namedtuple_instance
        return pytree.tree_map(
            lambda item: with_tuples(tuple(item)) if is_named(item) else item, nested, is_leaf=is_named
        )

    return pytree.tree_structure(with_tuples(pytree.tree_unflatten([0] * spec.num_leaves, spec)))


def _check_kernels(program: Any) -> None:
    needed = {(op.name, op.overload) for plan in program.execution_plan for op in plan.operators}
    known = passes.runtime().operator_registry.operator_names
    if missing := {".".join(filter(None, item)) for item in needed} - known:
        raise ExportError.of("TQ932.no_kernel", missing=", ".join(sorted(missing)))


def _cannot_lower(stage: str, cause: BaseException) -> ExportError:
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    # What ExecuTorch says of a loop whose length is that of the longest packed sequence.
    key = "TQ932.data_sizes" if "symbolic metadata" in str(cause) else "TQ932.cannot_lower"
    return ExportError.of(key, stage=stage, cause=cause, lines=" ".join(lines[:2]))
