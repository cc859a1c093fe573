"""One capture, and its comparison with the float model."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from torchq_compat.capture.checked.row_order import check_row_order
from torchq_compat.capture.checked.same_results import AS_LARGE, CAPTURED, CAST, DOUBTFUL, difference, sqnr
from torchq_compat.capture.checked.trial_inputs import SizeGroups, resized, trial_sizes, with_sizes
from torchq_compat.capture.checked.trial_runs import FloatRun, Runs
from torchq_compat.capture.inlined_blocks import Block, inline_blocks
from torchq_compat.capture.torch_export import EVERY_SIZE, capture, clean_captured
from torchq_compat.capture.wrapped_functions import marked_functions
from torchq_compat.capture.writes.out_of_place import make_out_of_place
from torchq_compat.errors import CaptureError
from torchq_compat.packed_sequences.packing_mode import PackingMode
from torchq_compat.sizes.find_sizes import Group, find_sizes
from torchq_compat.sizes.input_sizes import InputSizes, Place, sizes_of
from torchq_compat.sizes.shape_program import ShapeProgram
from torchq_compat.sizes.size_reads import SizeReads
from torchq_compat.sizes.symbolic_sizes import sizes_of_symbols
from torchq_compat.support.upstream import pytree

__all__ = [
    "Attempt",
    "CaptureCase",
    "DependsOnValuesError",
    "Trial",
    "Way",
    "attempt",
    "differs",
    "least_sqnr",
]


@dataclass(frozen=True)
class CaptureCase:
    """The model to capture and the inputs to capture it with.

    Attributes:
        model: the model, with opaque calls in the places of custom modules.
        inputs: the leaves of ``args`` by label.
        runs: runs the float model.
        example: the run of the float model on ``args``.
        packing: how sequences are packed in the graph.
    """

    model: nn.Module
    args: tuple[Any, ...]
    inputs: Mapping[str, Any]
    dynamic_shapes: Any
    runs: Runs
    example: FloatRun
    packing: PackingMode = field(default_factory=lambda: PackingMode(whole=False))


@dataclass(frozen=True)
class Trial:
    """A run of the float model and of the captured graph at other sizes.

    Attributes:
        groups: the sizes.
        run: the run of the float model.
        problem: how the result of the graph differs; None if the results are equal.
    """

    groups: SizeGroups
    run: FloatRun
    problem: str | None


@dataclass
class Attempt:
    """A captured graph.

    Attributes:
        problem: how its result for the example differs from the float model's; None if they are equal.
        trials: the trials at sizes that the float model accepts.
        unknown: the groups for which the float model accepts no other size, with its error.
    """

    graph_module: GraphModule
    sizes: InputSizes
    blocks: tuple[Block, ...]
    problem: str | None
    trials: list[Trial] = field(default_factory=list)
    unknown: dict[Group, Exception] = field(default_factory=dict)

    @property
    def is_right(self) -> bool:
        """Whether the graph and the float model agree on the example and at every other size tried."""
        return self.problem is None and all(trial.problem is None for trial in self.trials)


class Way(enum.Enum):
    """How sizes stay free in a capture."""

    #: Sizes that Python reads are followed; see ``SizeReads``.
    FOLLOWED = "followed"
    #: They are symbols of torch.export, as the user's ``dynamic_shapes`` say, or all of them.
    SYMBOLS = "symbols"
    #: Sizes that Python reads are fixed.
    FIXED = "fixed"


class DependsOnValuesError(Exception):
    """Sizes depend on values, such as lengths: torch.export has symbols for them, and computes with these and
    the sizes of inputs together."""


def _depends_on_values(graph_module: GraphModule) -> bool:
    values = (leaf for node in graph_module.graph.nodes for leaf in pytree.tree_leaves(node.meta.get("val")))
    return any(
        isinstance(value, torch.SymInt)
        or (isinstance(value, Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape))
        for value in values
    )


def attempt(case: CaptureCase, way: Way) -> Attempt:
    """Capture ``case`` in one ``way``, and try the graph.

    Raises:
        Exception: whatever torch.export or the model raises.
    """
    reads, stubs, is_static = SizeReads(follow=way is Way.FOLLOWED), case.runs.stubs, way is not Way.SYMBOLS
    shapes = EVERY_SIZE if case.dynamic_shapes is None else case.dynamic_shapes
    reading = reads.during(case.model) if is_static else nullcontext()
    with stubs.capturing(case.model), marked_functions(), case.packing.during(case.model), reading:
        graph_module, conditions = capture(case.model, case.args, None if is_static else shapes)
        blocks = inline_blocks(graph_module)
    if way is Way.FOLLOWED and (case.packing.packs or _depends_on_values(graph_module)):
        raise DependsOnValuesError
    if is_static:
        reads.write_results(graph_module)
        sizes = find_sizes(case.inputs, reads.read, _acceptance(case, graph_module))
    else:
        sizes = sizes_of_symbols(graph_module, case.inputs, conditions)
    clean_captured(graph_module)
    make_out_of_place(graph_module)
    made = Attempt(graph_module, sizes, blocks, None)
    made.problem = _compare(case, made, case.example)
    if made.problem is None and case.packing.packs:
        check_row_order(graph_module, case.runs, case.args)
    if made.problem is None:
        for groups in trial_sizes(made.sizes, are_short=bool(case.runs.modules)):
            if not any(groups.items() <= trial.groups.items() for trial in made.trials):
                try_sizes(case, made, groups)
    return made


def _acceptance(case: CaptureCase, graph_module: GraphModule) -> Callable[[Mapping[Place, int]], bool]:
    """Return a function that tells whether the model runs at given sizes of its inputs."""
    program = ShapeProgram.of(graph_module, case.inputs)

    def runs_on_shapes(sizes: Mapping[Place, int]) -> bool:
        try:
            with case.runs.stubs.active():
                program.values(sizes)
        except Exception:
            return False
        return True

    def runs_on_values(sizes: Mapping[Place, int]) -> bool:
        return case.runs.of_float_model(with_sizes(case.args, case.inputs, sizes)).error is None

    # Where shapes depend on values, as lengths, only values will do.
    return runs_on_shapes if runs_on_shapes(sizes_of(case.inputs)) else runs_on_values


def try_sizes(case: CaptureCase, made: Attempt, groups: SizeGroups) -> None:
    """Add the trial at the sizes ``groups`` to ``made``, or, if the float model does not accept them
    together, a trial of each size alone."""
    run = case.runs.of_float_model(resized(case.args, case.inputs, made.sizes, groups))
    if run.error is None:
        made.trials.append(Trial(groups, run, _compare(case, made, run)))
        for group in groups:
            made.unknown.pop(group, None)
    elif len(groups) > 1:
        for group, size in groups.items():
            try_sizes(case, made, {group: size})
    elif not any(set(groups) <= set(trial.groups) for trial in made.trials):
        made.unknown.update(dict.fromkeys(groups, run.error))


def least_sqnr(blocks: tuple[Block, ...], least: float = CAPTURED) -> float:
    """Return the SQNR in dB from which results count as equal for a graph with ``blocks`` inlined."""
    return CAST if any(block.casts for block in blocks) else least


def _compare(case: CaptureCase, made: Attempt, run: FloatRun) -> str | None:
    return _differs(case, made.graph_module, run, least_sqnr(made.blocks))


def _differs(case: CaptureCase, graph_module: GraphModule, run: FloatRun, least: float) -> str | None:
    def run_again(*, double: bool) -> Any:
        return case.runs.of_graph(graph_module, run.args, double=double)

    return compare_runs(case.runs, run, run_again, least)


def compare_runs(runs: Runs, run: FloatRun, other: Callable[..., Any], least: float) -> str | None:
    """Return how the result of ``other`` differs from that of ``run`` on the same inputs; None if they are
    equal. If the difference may be rounding, both run again in float64."""
    try:
        result = other(double=False)
    except Exception as cause:
        return _told(cause)
    problem = difference(run.value, result, least)
    if problem is None or not problem.endswith("dB"):
        return problem
    wide = runs.of_float_model(run.args, double=True)
    if not _may_be_rounding(sqnr(run.value, result), run, wide):
        return problem
    if wide.error is not None:
        return f"{problem}; in float64 the float model fails: {_told(wide.error)}"
    try:
        return difference(wide.value, other(double=True), least)
    except Exception as cause:
        return f"{problem}; in float64 it fails: {_told(cause)}"


def _may_be_rounding(measured: float, run: FloatRun, wide: FloatRun) -> bool:
    """Return whether a difference of ``measured`` dB may be rounding: it is small, or the float model's own
    rounding error is as large. With an example of ones a batch norm in training divides zero by zero."""
    if measured >= DOUBTFUL:
        return True
    # If the expected values are zeros, every difference measures as minus infinity.
    return wide.error is None and (measured == -math.inf or sqnr(wide.value, run.value) < measured + AS_LARGE)


def _told(cause: Exception) -> str:
    return f"{type(cause).__name__}: {str(cause).strip().splitlines()[0] if str(cause) else ''}"


def differs(case: CaptureCase, stage: str, problem: str) -> CaptureError:
    """Return the error for a ``stage`` that differs from the float model, which may differ from itself."""
    name = type(case.runs.model).__name__
    again = case.runs.of_float_model(case.example.args)
    failed = again.error or case.example.error
    itself = None if failed else difference(case.example.value, again.value, CAPTURED)
    return (
        CaptureError.differs(name, stage, problem) if itself is None else CaptureError.is_random(name, itself)
    )
