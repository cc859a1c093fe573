"""Checked capture: returns a graph that computes what the float model computes, or raises."""

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from torchq_compat.capture.inlined_blocks import Block, detach_writes
from torchq_compat.capture.packed_sequences import PackingMode
from torchq_compat.capture.row_order import check_row_order
from torchq_compat.capture.sizes.find_sizes import (
    GIVEN,
    Group,
    SizeGroups,
    admit_equal,
    admit_ones,
    find_sizes,
    group_of,
    sizes_at,
    sizes_of_symbols,
)
from torchq_compat.capture.sizes.input_sizes import (
    Dimension,
    InputSizes,
    Place,
    SizeRule,
    accepted_range,
    sizes_of,
)
from torchq_compat.capture.sizes.numbers import DependsOnValuesError
from torchq_compat.capture.sizes.other_ranks import words_of_ranks
from torchq_compat.capture.sizes.shape_program import ShapeProgram
from torchq_compat.capture.sizes.size_reads import ReadSizes, SizeReads
from torchq_compat.capture.torch_export import EVERY_SIZE, capture, capture_flat, clean_captured
from torchq_compat.capture.trial_runs import (
    AS_LARGE,
    CAPTURED,
    CAST,
    DOUBTFUL,
    FOLDED,
    LONG,
    FloatRun,
    Runs,
    difference,
    resized,
    run_prepared,
    sqnr,
    trial_sizes,
    with_sizes,
)
from torchq_compat.capture.unseen_python import marked_functions
from torchq_compat.capture.writes import make_out_of_place
from torchq_compat.codes import error_line, said
from torchq_compat.errors import CaptureError, TorchQCompatError
from torchq_compat.support import metadata
from torchq_compat.support.decisions import Action, Decision
from torchq_compat.support.graph_nodes import tensors_in
from torchq_compat.support.process_state import Kept
from torchq_compat.support.upstream import BatchNormBase, pytree

# One capture, and its comparison with the float model.


@dataclass(frozen=True)
class CaptureCase:
    """The model to capture and the inputs to capture it with.

    Attributes:
        model: the model, with opaque calls in the places of custom modules.
        inputs: the leaves of ``args`` by label.
        runs: runs the float model.
        example: the run of the float model on ``args``.
        packing: how sequences are packed in the graph.
        is_step: whether it is the step of a loop, called with sizes that the model around it checks.
        read: what Python asked of sizes before, in a model whose loops are rolled.
    """

    model: nn.Module
    args: tuple[Any, ...]
    inputs: Mapping[str, Any]
    dynamic_shapes: Any
    runs: Runs
    example: FloatRun
    packing: PackingMode = field(default_factory=lambda: PackingMode(whole=False))
    is_step: bool = False
    read: ReadSizes = field(default_factory=ReadSizes)


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


def attempt(case: CaptureCase, reads: SizeReads | None) -> Attempt:
    """Capture ``case``, and try the graph.

    Args:
        reads: answers reads of sizes; if None, these are symbols of torch.export, as the user's
            ``dynamic_shapes`` say, or all of them.

    Raises:
        Exception: whatever torch.export or the model raises.
    """
    shapes = EVERY_SIZE if case.dynamic_shapes is None else case.dynamic_shapes
    with case.runs.stubs.capturing(case.model), marked_functions():
        given = shapes if reads is None else None
        graph_module, conditions = capture(case.model, case.args, given, reads, case.packing)
    detach_writes(graph_module)
    follows = reads is not None and reads.follow
    if reads is not None:
        reads.write_results(graph_module)
        accepts = _acceptance(case, graph_module)
        # A step is a graph already, in which no Python decides anything.
        sizes = (
            InputSizes() if case.is_step else find_sizes(case.inputs, case.read.and_also(reads.read), accepts)
        )
    else:
        has_limits = case.dynamic_shapes is not None
        sizes = sizes_of_symbols(graph_module, case.inputs, case.read, conditions, has_limits=has_limits)
    clean_captured(graph_module)
    make_out_of_place(graph_module)
    result = Attempt(graph_module, sizes, tuple(case.packing.blocks.seen), None)
    result.problem = _compare(case, result, case.example)
    if result.problem is None and case.packing.packs:
        check_row_order(graph_module, case.runs, case.args)
    if result.problem is None and follows:
        result.sizes = _with_ones(case, result)
        result.sizes = _with_needless(case, result)
    if result.problem is None:
        for groups in trial_sizes(result.sizes, are_short=bool(case.runs.modules)):
            if not any(groups.items() <= trial.groups.items() for trial in result.trials):
                try_sizes(case, result, groups)
    return result


def _with_ones(case: CaptureCase, result: Attempt) -> InputSizes:
    """Return the sizes of ``result`` with every size of 1 at which Python decides otherwise, and the graph
    computes what the float model does all the same, as where a batch of one need not be expanded."""
    sizes = result.sizes
    for group in dict.fromkeys(group_of(item) for item in sizes.free if item.example > 1):
        rule = sizes.broken_rule(sizes_at(sizes, {group: 1}))
        if rule is None or rule.line is None:
            continue
        admitted = admit_ones(sizes, group, sizes_of(case.inputs))
        others = next(trial_sizes(result.sizes), {})
        trials = [sizes_at(admitted, groups) for groups in ({group: 1}, {**others, group: 1})]
        if all(admitted.broken_rule(trial) is None and _agrees(case, result, trial) for trial in trials):
            sizes = admitted
    return sizes


def _with_needless(case: CaptureCase, result: Attempt) -> InputSizes:
    """Return the sizes of ``result`` with those at which Python leaves out what changes nothing there, as a
    padding to a multiple of a window."""
    sizes, example = result.sizes, sizes_of(case.inputs)
    for rule in result.sizes.rules:
        admitted, trials = admit_equal(sizes, rule, example)
        if trials and all(_agrees(case, result, trial) for trial in trials):
            sizes = accepted_range(admitted, example)
    return sizes


def _agrees(case: CaptureCase, result: Attempt, sizes: Mapping[Place, int]) -> bool:
    run = case.runs.of_float_model(with_sizes(case.args, case.inputs, sizes))
    return run.error is None and _compare(case, result, run) is None


def _from_more(case: CaptureCase, result: Attempt, reads: SizeReads | None) -> tuple[CaptureCase, Attempt]:
    """Return ``result``, or, where Python or a symbol fixed sizes of 1, a capture at more with the same
    ``reads`` that is right at 1 too."""
    if (reads is not None and not reads.follow) or case.dynamic_shapes is not None:
        return case, result
    sizes, example = result.sizes, sizes_of(case.inputs)
    # Sizes of their own for each index, as equal ones change together.
    others = [size for size in range(2, 32) if size not in example.values()]

    def is_stuck(item: Dimension) -> bool:
        rules = [sizes.broken_rule({**example, item.place: size}) for size in others[:2]]
        return item.example == 1 and all(rule is not None and rule.by_python for rule in rules)

    stuck = [item for item in sizes.dimensions if is_stuck(item)]
    by_index = [[item for item in stuck if item.index == index] for index in {item.index for item in stuck}]
    for items in [stuck, *by_index] if len(by_index) > 1 else by_index:
        args = with_sizes(case.args, case.inputs, {item.place: others[item.index] for item in items})
        run = case.runs.of_float_model(args)
        if run.error is not None:
            continue
        inputs = dict(zip(case.inputs, pytree.tree_leaves(args), strict=True))
        wider = replace(case, args=args, inputs=inputs, example=run)
        with suppress(Exception):  # An error inside an attempt is a failed attempt.
            other = attempt(wider, reads)
            accepts = other.is_right and other.sizes.broken_rule(example) is None
            if accepts and _compare(case, other, case.example) is None:
                return wider, other
    return case, result


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
    depends_on_values = case.packing.packs or not runs_on_shapes(sizes_of(case.inputs))
    return runs_on_values if depends_on_values else runs_on_shapes


def try_sizes(case: CaptureCase, result: Attempt, groups: SizeGroups) -> None:
    """Add the trial at the sizes ``groups`` to ``result``, or, if the float model does not accept them
    together, a trial of each size alone."""
    run = case.runs.of_float_model(resized(case.args, case.inputs, result.sizes, groups))
    if run.error is None:
        result.trials.append(Trial(groups, run, _compare(case, result, run)))
        for group in groups:
            result.unknown.pop(group, None)
    elif len(groups) > 1:
        for group, size in groups.items():
            try_sizes(case, result, {group: size})
    elif not any(set(groups) <= set(trial.groups) for trial in result.trials):
        result.unknown.update(dict.fromkeys(groups, run.error))


def least_sqnr(blocks: tuple[Block, ...], least: float = CAPTURED) -> float:
    """Return the SQNR in dB from which results count as equal for a graph with ``blocks`` inlined."""
    return CAST if any(block.casts for block in blocks) else least


def _compare(case: CaptureCase, result: Attempt, run: FloatRun) -> str | None:
    run_graph = partial(case.runs.of_graph, result.graph_module, run.args)
    return compare_runs(case.runs, run, run_graph, least_sqnr(result.blocks))


def compare_runs(runs: Runs, run: FloatRun, other: Callable[..., Any], least: float) -> str | None:
    """Return how the result of ``other`` differs from that of ``run`` on the same inputs; None if they are
    equal. If the difference may be rounding, both run again in float64."""
    try:
        result = other(double=False)
    except Exception as cause:
        return error_line(cause)
    problem = difference(run.value, result, least)
    if problem is None or not problem.endswith("dB"):
        return problem
    wide = runs.of_float_model(run.args, double=True)
    if not _may_be_rounding(sqnr(run.value, result), run, wide):
        return problem
    if wide.error is not None:
        return f"{problem}; in float64 the float model fails: {error_line(wide.error)}"
    try:
        return difference(wide.value, other(double=True), least)
    except Exception as cause:
        return f"{problem}; in float64 it fails: {error_line(cause)}"


def _may_be_rounding(measured: float, run: FloatRun, wide: FloatRun) -> bool:
    """Return whether a difference of ``measured`` dB may be rounding: it is small, or the float model's own
    rounding error is as large. With an example of ones a batch norm in training divides zero by zero."""
    if measured >= DOUBTFUL:
        return True
    # If the expected values are zeros, every difference measures as minus infinity.
    return wide.error is None and (measured == -math.inf or sqnr(wide.value, run.value) < measured + AS_LARGE)


def differs(case: CaptureCase, stage: str, problem: str) -> CaptureError:
    """Return the error for a ``stage`` that differs from the float model, which may differ from itself."""
    name = type(case.runs.model).__name__
    again = case.runs.of_float_model(case.example.args)
    failed = again.error or case.example.error
    itself = None if failed else difference(case.example.value, again.value, CAPTURED)
    if itself is None and case.runs.draws_outside_torch(case.example.args):
        itself = "it draws from Python's or NumPy's generator, and a graph has no draws but torch's"
    if itself is None:
        return CaptureError.of("TQ920.differs", model=name, stage=stage, what=problem)
    return CaptureError.of("TQ920.random", model=name, what=itself)


# The captured graph runs beside the float model, at the example's sizes and at two others. A capture that
# fails or differs is followed by one that answers the model's Python with less freedom.


#: What is told in place of the user's line where no read of a size was seen.
DIFFERS = "code that makes the float model compute something else at other sizes"


def capture_checked(case: CaptureCase) -> tuple[CaptureCase, Attempt]:
    """Return the graph of ``case`` with as many free sizes as possible while it computes what the model does,
    and the case with the packing that it took.

    Raises:
        CaptureError: every captured graph computes something else than the float model.
        Exception: what was raised at the first attempt.
    """
    built: list[tuple[CaptureCase, Attempt]] = []
    errors: list[Exception] = []
    for changed, reads in attempts(case):
        try:
            result = attempt(changed, reads)
        except DependsOnValuesError:
            continue
        except Exception as cause:
            errors.append(cause)
            continue
        if result.is_right:
            return _from_more(changed, result, reads)
        built.append((changed, result))
    for changed, result in built:
        if result.problem is None:
            return changed, _fix_wrong_sizes(changed, result)
    if errors:
        # What this package says of a model is told rather than where torch stopped.
        raise next((error for error in errors if isinstance(error, TorchQCompatError)), errors[0])
    raise differs(case, "the captured graph", str(built[0][1].problem))


def attempts(case: CaptureCase) -> Iterator[tuple[CaptureCase, SizeReads | None]]:
    """Yield what to capture, and what answers reads of sizes, one after the other until one is right."""
    if case.dynamic_shapes is not None:
        yield case, None
        return
    yield case, SizeReads()
    if case.example.error is not None:
        return  # Of a model that does not run, the first error is told.
    yield case, None
    if case.packing.packs:
        # The number of steps depends on the data, and the model computes with it.
        yield replace(case, packing=PackingMode(whole=True)), SizeReads()
    yield case, SizeReads(follow=False)


def _fix_wrong_sizes(case: CaptureCase, result: Attempt) -> Attempt:
    """Return ``result`` with rules that exclude the sizes at which it differs from the float model."""
    rules: dict[Group, list[SizeRule]] = {}
    for trial in [trial for trial in result.trials if trial.problem is not None]:
        alone = replace(result, trials=[], unknown=dict(result.unknown))
        for group, size in trial.groups.items():
            try_sizes(case, alone, {group: size})
        differing = [next(iter(other.groups.items())) for other in alone.trials if other.problem is not None]
        for group, size in differing or trial.groups.items():
            only_one = size == 1 and group not in rules
            rules[group] = list(_rules(result, group, only_one=only_one))
    sizes = replace(result.sizes, rules=(*result.sizes.rules, *itertools.chain(*rules.values())))
    kept = [
        trial
        for trial in result.trials
        if trial.problem is None and sizes.broken_rule(sizes_at(sizes, trial.groups)) is None
    ]
    return replace(result, sizes=sizes, trials=kept)


def _rules(result: Attempt, group: Group, *, only_one: bool) -> Iterator[SizeRule]:
    for number, dimension in enumerate(result.sizes.dimensions):
        if dimension.is_free and group_of(dimension) == group:
            rule = SizeRule.fixing(number, dimension, DIFFERS, by_python=True)
            if only_one:
                rule = replace(rule, condition=f"s{number} != 1", expected="more than 1")
            yield rule


# Checks that a prepared model with its observers off computes what the float model does.


#: From how many values on an example is large.
MANY = 2**14


def trial_runs(case: CaptureCase, result: Attempt) -> list[FloatRun]:
    """Return the runs of the float model at the example's sizes and at all others that were tried; prepared
    recurrent modules run step by step, so a long example is left out where short ones were tried."""
    others = [trial.run for trial in result.trials if trial.problem is None]
    long = any(dimension.example > LONG for dimension in result.sizes.free)
    return others if case.runs.modules and long and others else [case.example, *others]


def short_run(case: CaptureCase, result: Attempt) -> FloatRun:
    """Return the run for later trials: of ``trial_runs`` the first, or of a large example the smallest."""
    runs = trial_runs(case, result)
    return runs[0] if _values_in(runs[0]) <= MANY else min(runs, key=_values_in)


def _values_in(run: FloatRun) -> int:
    return sum(tensor.numel() for tensor in tensors_in(run.args))


def check_prepared(
    prepared: nn.Module,
    case: CaptureCase,
    result: Attempt,
    users_own: Sequence[str],
    lost_forwards: Sequence[str],
    *,
    is_rewritten: bool,
) -> tuple[Decision, ...]:
    """Run ``prepared`` beside the float model in all ``trial_runs``; in the smallest, if all that became of
    the captured graph, which was run in all, are observers and other weights: no size depends on these.

    Args:
        is_rewritten: whether training or a user's Quantizer may have written ops of their own.
        users_own: paths of modules whose observed class the user wrote, which may compute something else.
        lost_forwards: paths of modules with a ``forward`` of their own that is no longer called.

    Returns:
        A decision to warn about, if the results differ and the user's own classes may be the cause.

    Raises:
        CaptureError: the results differ.
    """
    has_batch_norm = any(isinstance(m, BatchNormBase) for m in case.runs.model.modules())
    least = least_sqnr(result.blocks, FOLDED if has_batch_norm else CAPTURED)
    runs = trial_runs(case, result)
    for run in runs if is_rewritten or case.runs.modules else [min(runs, key=_values_in)]:
        problem = compare_runs(case.runs, run, partial(run_prepared, prepared, run.args), least)
        if problem is not None and users_own:
            reason = said("TQ416", problem=problem)
            return (
                Decision(
                    ", ".join(users_own), "observed class", Action.QUANTIZED, reason, warn=True, code="TQ416"
                ),
            )
        if problem is not None and lost_forwards:
            where = ", ".join(map(repr, lost_forwards))
            raise CaptureError.of("TQ920.lost_forward", model=case.runs.model, modules=where, what=problem)
        if problem is not None:
            raise differs(case, "the prepared model", problem)
    return ()


# Decisions about a capture, for ``explain``: about each dimension of each input, and each inlined block.


def decide_sizes(case: CaptureCase, result: Attempt) -> Iterator[Decision]:
    """Yield a decision about every dimension of ``result``, and every input that is a number; a warning if
    Python code fixed a dimension that the float model accepts at other sizes too."""
    rules: dict[tuple[str, int], list[SizeRule]] = {}
    for rule in result.sizes.rules:
        rules.setdefault((rule.dimension.label, rule.dimension.index), []).append(rule)
    for dimension in result.sizes.dimensions:
        yield _decide(case, result, dimension, rules.get((dimension.label, dimension.index), []))
    for label, words in words_of_ranks(result.sizes.other_ranks):
        yield Decision(f"input {label}", "rank", Action.FREE, words)
    for label, value in result.sizes.constants.items():
        if isinstance(value, (int, float)):
            reason = f"at {value!r}, its value in example_inputs; only tensors stay free"
            yield Decision(f"input {label}", "value", Action.FIXED, reason)


def decide_values(decided: Sequence[tuple[str, Any]]) -> Iterator[Decision]:
    """Yield a decision about every ``assert`` on values that is left out, and every value of a buffer that
    Python decided by."""
    for line, value in decided:
        if value is None:
            yield Decision("", "assert", Action.DROPPED, said("TQ603", line=line), code="TQ603")
        else:
            reason = said("TQ604", line=line, value=value)
            yield Decision("", "value of a buffer", Action.FIXED, reason, code="TQ604")


def decide_blocks(result: Attempt, *, is_qat: bool) -> Iterator[Decision]:
    """Yield a decision about every value that Python asked for, and every block, of no_grad or autocast."""
    yield from decide_values(metadata.VALUES_DECIDED.of(result.graph_module) or ())
    for block in result.blocks:
        if block.casts:
            reason = (
                "its ops are quantized and run in the dtype they are given, as in FX, which traced through"
            )
            yield Decision(block.path, block.context, Action.DROPPED, reason, code="TQ314")
        else:
            reason = said("TQ314")
            yield Decision(block.path, block.context, Action.DROPPED, reason, warn=is_qat, code="TQ314")


def _decide(case: CaptureCase, result: Attempt, dimension: Dimension, rules: list[SizeRule]) -> Decision:
    path, kind = f"input {dimension.label}", f"dimension {dimension.index}"
    if dimension.is_fixed:
        rule = rules[0] if rules else None
        at = f"at {dimension.example}"
        line = f" by {rule.line}" if rule is not None and rule.line else ""
        warn = rule is not None and rule.by_python and _runs_elsewhere(case, result, dimension)
        return Decision(path, kind, Action.FIXED, f"{at}{line}", warn=warn)
    # What no tried size breaks is listed, and not warned about.
    by_python = any(rule.by_python and not rule.is_unbroken for rule in rules)
    warn = by_python and _runs_elsewhere(case, result, dimension)
    constant = f"{dimension.name} == {dimension.example}"
    is_constant = any(rule.expected in (constant, str(dimension.example)) for rule in rules)
    action = Action.FIXED if is_constant else Action.FREE
    return Decision(path, kind, action, _conditions(result, dimension, rules), warn=warn)


def _conditions(result: Attempt, dimension: Dimension, rules: list[SizeRule]) -> str:
    # The limits of operators are those of the float model too, and are not reported.
    of_python = [rule for rule in rules if rule.by_python or "==" in rule.expected or rule.line == GIVEN]
    of_python = [rule for rule in of_python if not rule.is_unbroken] or of_python
    words = [rule.expected if ".size(" in rule.expected else f"it is {rule.expected}" for rule in of_python]
    texts = [
        f"{word} ({rule.line})" if rule.line else word for word, rule in zip(words, of_python, strict=True)
    ]
    texts = list(dict.fromkeys(texts))
    if group_of(dimension) in result.unknown:
        error = str(result.unknown[group_of(dimension)]).strip().split("\n", 1)[0]
        texts.append(f"not checked, the float model itself fails at other sizes: {error[:120]}")
    return "as long as " + "; ".join(texts) if texts else "checked against the float model"


def _runs_elsewhere(case: CaptureCase, result: Attempt, dimension: Dimension) -> bool:
    """Return whether the float model accepts another size of ``dimension``, alone or together with all
    dimensions of the same size in the example."""
    if not dimension.is_fixed and any(group_of(dimension) in trial.groups for trial in result.trials):
        return True
    alike = {item.place for item in result.sizes.dimensions if item.example == dimension.example}
    inputs: Mapping[str, Any] = case.inputs
    for places in ({dimension.place}, alike) if len(alike) > 1 else (alike,):
        for size in (dimension.example - 1, 2 * dimension.example + 1):
            args = with_sizes(case.args, inputs, dict.fromkeys(places, size))
            if size > 0 and case.runs.of_float_model(args).error is None:
                return True
    return False


# Captures modules of this package once for all that have the same structure: layers, directions and models
# whose cells differ in nothing but the values of their weights.


PLAIN = (bool, int, str, tuple)
#: Structures that are remembered, without weights.
_CAPTURED: Kept[GraphModule] = Kept(128)


def capture_by_structure(module: nn.Module, args: tuple[Tensor, ...]) -> GraphModule:
    """Return the graph of ``module``, with its parameters, for inputs of any size.

    Args:
        module: a module whose Python reads no sizes: its graph is right at every size, though captured at
            those of ``args``. Its tensors are parameters.
        args: tensors; see ``capture_flat``.
    """
    key = (
        tuple(_structure(module)),
        tuple(map(_form, args)),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
    )
    captured = _CAPTURED.of(key, lambda: _without_weights(capture_flat(module, args)))
    return _with_parameters(captured, dict(_parameters(module)))


def _without_weights(captured: GraphModule) -> GraphModule:
    shapes = {name: nn.Parameter(p.to("meta"), p.requires_grad) for name, p in _parameters(captured)}
    return _with_parameters(captured, shapes)


def _structure(module: nn.Module) -> Iterator[Any]:
    for path, item in module.named_modules():
        settings = {name: value for name, value in vars(item).items() if isinstance(value, PLAIN)}
        yield path, type(item), tuple(sorted(settings.items())), item.extra_repr()
    for name, parameter in _parameters(module):
        yield name, _form(parameter)


def _parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return module.named_parameters(remove_duplicate=False)


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def _with_parameters(graph_module: GraphModule, parameters: Mapping[str, nn.Parameter]) -> GraphModule:
    """Return a copy of ``graph_module`` with ``parameters``, by name, in place of its own."""
    memo: dict[int, Any] = {id(own): parameters[name] for name, own in _parameters(graph_module)}
    return copy.deepcopy(graph_module, memo)
