"""One capture, and how it compares with the float model."""

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
        model: with opaque calls where the custom modules were.
        inputs: the leaves of ``args`` by label.
        runs: of the float model.
        example: what the float model makes of ``args``.
        packing: how sequences are packed in the graph.
        ones: dimensions known to be 1 always.
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
    """Float model and captured graph at other sizes.

    Attributes:
        groups: the sizes.
        run: what the float model made of them.
        problem: what the graph made otherwise; None if the results are equal.
    """

    groups: SizeGroups
    run: FloatRun
    problem: str | None


@dataclass
class Attempt:
    """A captured graph.

    Attributes:
        problem: what it makes of the example otherwise than the float model.
        trials: at sizes the float model takes.
        unknown: groups of sizes the float model took none other of, with its error.
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
        """Whether graph and float model agree at the example and at every other size that was tried."""
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
    """Drop the rules of operators that are broken at sizes where graph and float model agree all the same:
    the kernels of torch ask more than they need, above all of a batch of one."""
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
    """Return the trial at ``groups``, where rules are broken that then proved needless; None where they did
    not."""
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
    """Add the trial at the sizes ``groups`` to ``made``; or, where the float model does not take them all at
    once, that of each alone."""
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
    """Return the dB that count as equal for a graph with ``blocks`` inlined."""
    return CAST if any(block.casts for block in blocks) else least


def _compare(case: CaptureCase, made: Attempt, run: FloatRun) -> str | None:
    def run_again(*, double: bool) -> Any:
        return case.runs.of_graph(made.graph_module, run.args, double=double)

    return compare_runs(case.runs, run, run_again, least_sqnr(made.blocks))


def compare_runs(runs: Runs, run: FloatRun, other: Callable[..., Any], least: float) -> str | None:
    """Say how the result of ``other`` differs from that of ``run`` on the same inputs. Where the difference
    may be rounding, both run again in float64."""
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
    """Whether a difference of ``measured`` dB may be rounding: it is small, or the float model's own rounding
    is as large. An example of ones makes a batch norm in training divide nothing by nothing."""
    if measured >= DOUBTFUL:
        return True
    # Beside zeros every value is infinitely far.
    return wide.error is None and (measured == -math.inf or sqnr(wide.value, run.value) < measured + AS_LARGE)


def _told(cause: Exception) -> str:
    return f"{type(cause).__name__}: {str(cause).strip().splitlines()[0] if str(cause) else ''}"
