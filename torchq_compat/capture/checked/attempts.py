"""One capture, and its comparison with the float model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torch.fx import GraphModule

from torchq_compat.capture.checked.row_order import check_row_order
from torchq_compat.capture.checked.same_results import AS_LARGE, CAPTURED, CAST, DOUBTFUL, difference, sqnr
from torchq_compat.capture.checked.trial_inputs import (
    Group,
    SizeGroups,
    group_of,
    resized,
    symbol_values,
    trial_sizes,
)
from torchq_compat.capture.checked.trial_runs import FloatRun, Runs
from torchq_compat.capture.inlined_blocks import Block, inline_blocks
from torchq_compat.capture.sizes.input_sizes import InputSizes
from torchq_compat.capture.sizes.size_guards import GuardLog
from torchq_compat.capture.torch_export import Statics, capture
from torchq_compat.capture.wrapped_functions import marked_functions
from torchq_compat.capture.writes.out_of_place import make_out_of_place
from torchq_compat.packed_sequences.packing_mode import PackingMode

__all__ = ["Attempt", "CaptureCase", "Trial", "attempt", "least_sqnr"]


@dataclass(frozen=True)
class CaptureCase:
    """The model to capture and the inputs to capture it with.

    Attributes:
        model: the model, with opaque calls in the places of custom modules.
        inputs: the leaves of ``args`` by label.
        runs: runs the float model.
        example: the run of the float model on ``args``.
        packing: how sequences are packed in the graph.
        ones: dimensions whose size is always 1.
    """

    model: nn.Module
    args: tuple[Any, ...]
    inputs: Mapping[str, Any]
    dynamic_shapes: Any
    runs: Runs
    example: FloatRun
    packing: PackingMode = field(default_factory=lambda: PackingMode(whole=False))
    ones: Statics = ()


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
    statics: Statics
    problem: str | None
    trials: list[Trial] = field(default_factory=list)
    unknown: dict[Group, Exception] = field(default_factory=dict)

    @property
    def is_right(self) -> bool:
        """Whether the graph and the float model agree on the example and at every other size tried."""
        return self.problem is None and all(trial.problem is None for trial in self.trials)


def attempt(case: CaptureCase, statics: Statics) -> Attempt:
    """Capture ``case`` with the dimensions ``statics`` fixed, and try the graph.

    Raises:
        Exception: whatever torch.export or the model raises.
    """
    log = GuardLog()
    watching = log.watch(case.model)
    try:
        stubs = case.runs.stubs
        with stubs.capturing(case.model), marked_functions(), case.packing.during(case.model):
            graph_module = capture(case.model, case.args, case.dynamic_shapes, statics)
            blocks = inline_blocks(graph_module)
            make_out_of_place(graph_module)
    finally:
        watching.remove()
    sizes = InputSizes.of(graph_module, case.inputs, log.guards())
    made = Attempt(graph_module, sizes, blocks, statics, None)
    made.problem = _compare(case, made, case.example)
    if made.problem is None and case.packing.packs:
        check_row_order(graph_module, case.runs, case.args)
    if made.problem is None:
        drop_needless_rules(case, made)
        for groups in trial_sizes(made.sizes):
            if not any(groups.items() <= trial.groups.items() for trial in made.trials):
                try_sizes(case, made, groups)
    return made


def drop_needless_rules(case: CaptureCase, made: Attempt) -> None:
    """Drop the operators' rules that are broken at sizes where graph and float model agree nevertheless:
    torch's operators require more than their kernels need, above all of a batch of one."""
    for rule in made.sizes.rules:
        if rule.excludes_one:
            _without_rules(case, made, made.sizes, {group_of(rule.dimension): 1})
    hard = replace(made.sizes, rules=tuple(rule for rule in made.sizes.rules if not rule.is_soft))
    if len(hard.rules) == len(made.sizes.rules):
        return
    for groups in trial_sizes(hard):
        together = _without_rules(case, made, hard, groups)
        for group, size in groups.items() if together is None and len(groups) > 1 else ():
            _without_rules(case, made, hard, {group: size})


def _without_rules(case: CaptureCase, made: Attempt, hard: InputSizes, groups: SizeGroups) -> Trial | None:
    """Drop the rules broken at ``groups`` if graph and float model agree there, and return the trial; None if
    they differ, or no rule is broken."""
    values = symbol_values(hard, groups)
    broken = [rule for rule in made.sizes.rules if not rule.holds(values)]
    if not broken:
        return None
    run = case.runs.of_float_model(resized(case.args, case.inputs, hard, groups))
    if run.error is not None or _compare(case, made, run) is not None:
        return None
    made.sizes = replace(made.sizes, rules=tuple(rule for rule in made.sizes.rules if rule not in broken))
    trial = Trial(groups, run, None)
    made.trials.append(trial)
    return trial


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
    def run_again(*, double: bool) -> Any:
        return case.runs.of_graph(made.graph_module, run.args, double=double)

    return compare_runs(case.runs, run, run_again, least_sqnr(made.blocks))


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
