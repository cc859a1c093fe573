"""A loop over time as a module, whose step is a model of its own that is called once per step."""

from __future__ import annotations

import itertools
import linecache
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Interpreter
from torch.fx.traceback import preserve_node_meta
from torch.overrides import TorchFunctionMode

from torchq_compat.capture import trial_runs
from torchq_compat.capture.sizes.numbers import frames, is_users, line_in_code, users_frames
from torchq_compat.capture.trial_runs import LONG, FloatRun, Runs, with_sizes


@dataclass(frozen=True)
class _Shared:
    """A graph that is not changed any more; copies of a model share it."""

    graph: Graph

    def __deepcopy__(self, memo: dict[int, Any]) -> _Shared:
        return self


class GraphModel(nn.Module):
    """A graph over a tree of modules with the classes and paths of the user's model.

    The nodes that torch.export creates from it keep the origins of the graph's nodes.
    """

    def __init__(self, tree: nn.Module, graph: Graph) -> None:
        super().__init__()
        vars(self)["_modules"] = dict(tree._modules)
        vars(self)["_parameters"] = dict(tree._parameters)
        vars(self)["_buffers"] = dict(tree._buffers)
        vars(self)["_non_persistent_buffers_set"] = set(tree._non_persistent_buffers_set)
        for name, value in vars(tree).items():
            # Tensors that are plain attributes, neither parameters nor buffers.
            if isinstance(value, Tensor) and name not in vars(self):
                vars(self)[name] = value
        self.training = tree.training
        self.shared = _Shared(graph)

    def forward(self, *args: Any) -> Any:
        with preserve_node_meta():
            return Interpreter(self, graph=self.shared.graph).run(*args)


@dataclass(frozen=True)
class Part:
    """How a tensor is divided into one part for each step.

    Attributes:
        dim: the dimension of the steps.
        backward: whether the first step reads the last part.
    """

    dim: int
    backward: bool = False

    def of_steps(self, whole: Tensor) -> Sequence[Tensor]:
        parts = whole.unbind(self.dim)
        return parts[::-1] if self.backward else parts

    def of_first(self, whole: Tensor) -> Tensor:
        """Return an empty tensor of the shape of a part, even if ``whole`` has no parts."""
        return whole.new_empty([*whole.shape[: self.dim], *whole.shape[self.dim + 1 :]])


@dataclass(frozen=True)
class LoopForm:
    """The form of a loop's inputs and results.

    Attributes:
        states: the number of tensors that one step passes to the next.
        parts: how each tensor that is read step by step is divided.
        stacked: for each value of a step, the dimension along which the values of all steps are stacked.
        counted: whether the last of the tensors in ``parts`` only gives the number of steps.
    """

    states: int
    parts: tuple[Part, ...]
    stacked: tuple[int, ...]
    counted: bool = False


def run_steps(
    form: LoopForm,
    step: Callable[..., Sequence[Tensor]],
    states: Sequence[Tensor],
    wholes: Sequence[Tensor],
    same: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    """Call ``step(*states, *parts, *same)``, which returns the new states and values, for each step.

    Args:
        states: the states before the first step.
        wholes: the tensors that are read step by step.
        same: the tensors that every step reads.

    Returns:
        The last states, and the stacked values of all steps.
    """
    parts = list(
        zip(*(part.of_steps(whole) for part, whole in zip(form.parts, wholes, strict=True)), strict=True)
    )
    used = len(wholes) - form.counted
    values: list[list[Tensor]] = [[] for _ in form.stacked]
    if not parts:
        # No steps are left, as when a different first step precedes the loop: the stacked values are empty,
        # and only a call of the step shows their shapes.
        firsts = [part.of_first(whole).zero_() for part, whole in zip(form.parts, wholes, strict=True)]
        shapes = step(*states, *firsts[:used], *same)[form.states :]
        empty = [
            value.new_empty([*value.shape[:dim], 0, *value.shape[dim:]])
            for value, dim in zip(shapes, form.stacked, strict=True)
        ]
        return (*states, *empty)
    for at_step in parts:
        results = step(*states, *at_step[:used], *same)
        states = results[: form.states]
        for item, value in zip(values, results[form.states :], strict=True):
            item.append(value)
    stacked = [torch.stack(entry, dim) for entry, dim in zip(values, form.stacked, strict=True)]
    return (*states, *stacked)


#: How often as long as the example the inputs are that show whether values grow.
LONGER = (2, 4)


class Loop(nn.Module):
    """A float loop over time.

    Args:
        step: the model of one step, (*states, *parts, *same) -> (*new states, *values).
    """

    def __init__(self, form: LoopForm, step: GraphModel) -> None:
        super().__init__()
        self.form = form
        # Not a submodule: the step's modules belong to a model of its own.
        vars(self)["step"] = step
        self.training = step.training
        self._code: Callable[..., Any] | None = None
        #: The arguments of the step in the last call, the example for its capture; and in the first.
        self.example: tuple[Tensor, ...] = ()
        self.first: tuple[Tensor, ...] = ()
        #: Size of the model's inputs -> the arguments in the last call at each of ``LONGER`` times the size.
        self.longer: dict[str, tuple[tuple[Tensor, ...], ...]] = {}

    def forward(
        self, states: Sequence[Tensor], wholes: Sequence[Tensor], same: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        self.first = ()
        return run_steps(self.form, self._step, list(states), list(wholes), list(same))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Loop:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        vars(self)["step"]._apply(fn, recurse)
        return self

    def train(self, mode: bool = True) -> Loop:
        super().train(mode)
        vars(self)["step"].train(mode)
        return self

    def _step(self, *args: Tensor) -> Sequence[Tensor]:
        self.example, self.first = args, self.first or args
        step = vars(self)["step"]
        if self._code is None:
            # An Interpreter takes ten times as long as the operators of a step.
            self._code = type(GraphModule(step, step.shared.graph)).forward
        results: Sequence[Tensor] = self._code(step, *args)
        return results


# Finds the sizes that determine how often a line of the model's Python runs.


Place = tuple[str, int]
#: A call in the model's code: the code and the instruction of each of the user's frames, from the innermost
#: to that of a module, and the path of the innermost module.
Site = tuple[tuple[tuple[Any, int], ...], str]


@dataclass(frozen=True)
class LoopedSizes:
    """The input dimensions that determine how often a line runs.

    Attributes:
        groups: the dimensions, grouped with those that must have the same size.
        repeated: the paths of the modules that are called more than once.
        lines: the lines of the loops, in the order in which they run.
    """

    groups: tuple[tuple[Place, ...], ...]
    repeated: frozenset[str]
    lines: tuple[str, ...] = ()

    def sizes(self, item: tuple[int, ...] | list[int]) -> dict[Place, int]:
        return {place: size for group, size in zip(self.groups, item, strict=True) for place in group}


def find_looped_sizes(
    runs: Runs, args: tuple[Any, ...], inputs: Mapping[str, Any]
) -> tuple[LoopedSizes | None, FloatRun]:
    """Return the sizes that determine how often lines run, None if there are none; and the run of the float
    model on ``args``.

    Args:
        inputs: the leaves of ``args`` by label.
    """
    sites, example = _count_calls(runs, args)
    if any(map(_asks_for_modes, runs.model.modules())):
        example = runs.of_float_model(args)
    if not sites.repeated:
        return None, example
    size = {
        (label, index): int(length)
        for label, leaf in inputs.items()
        if isinstance(leaf, Tensor)
        for index, length in enumerate(leaf.shape)
        if length > 1
    }
    # What takes long is tried on smaller inputs, if the model takes them.
    smaller = {**size, **{place: -(-length // 4) for place, length in size.items() if length > LONG}}
    if smaller != size:
        counted, run = _count_calls(runs, with_sizes(args, inputs, smaller))
        if run.error is None:
            sites.counts, size = counted.counts, smaller
    groups: list[tuple[Place, ...]] = []
    lines: dict[str, None] = {}
    unlooped = _unlooped(runs, args, inputs, sites, size)
    for place in size:
        if size[place] in unlooped or any(place in group for group in groups):
            continue
        alike = tuple(other for other in size if size[other] == size[place])
        pairs = [(place, other) for other in alike if other != place]
        # A loop may leave out every second step; and a table may have no entries for more steps.
        for more, group in itertools.product((2, -1), dict.fromkeys(((place,), alike, *pairs))):
            others, run = _count_calls(
                runs, with_sizes(args, inputs, {**size, **dict.fromkeys(group, size[place] + more)})
            )
            if run.error is not None:
                continue
            if changed := sites.differing(others):
                groups.append(group)
                lines.update(dict.fromkeys(filter(None, map(sites.repeated.get, changed))))
            break
    paths = frozenset(site[-1] for site in sites.repeated)
    return LoopedSizes(tuple(groups), paths, tuple(lines)) if groups else None, example


def _asks_for_modes(module: nn.Module) -> bool:
    """Return whether ``module`` may compute something else where calls are counted: the fast paths of
    transformers return zeros at padded positions, and are not taken there."""
    code = getattr(module.forward, "__code__", None)
    return code is not None and "has_torch_function" in code.co_names


def _unlooped(
    runs: Runs, args: tuple[Any, ...], inputs: Mapping[str, Any], sites: _CallSites, size: Mapping[Place, int]
) -> set[int]:
    """Return sizes that do not determine how often a line runs, as a run shows in which all of them change,
    each by another number: all sizes of the model, or all but one that it may need as it is."""
    known = dict.fromkeys(size.values())
    # The last size is mostly that of features, which a model needs as it is.
    for kept in (None, *(reversed(known) if len(known) > 1 else ())):
        more = {other: other + 2 + number for number, other in enumerate(known) if other != kept}
        changed = {place: more.get(other, other) for place, other in size.items()}
        others, run = _count_calls(runs, with_sizes(args, inputs, changed))
        if run.error is None:
            return set() if sites.differing(others) else {*more}
    return set()


def _count_calls(runs: Runs, args: tuple[Any, ...]) -> tuple[_CallSites, FloatRun]:
    sites = _CallSites()
    return sites, runs.of_float_model(args, watching=sites.of)


class _CallSites(TorchFunctionMode):
    """Counts the calls at each place of the model's Python that reach a function of torch: of several that
    one reaches, the first, as torch's own code has loops over weights.

    Attributes:
        repeated: a call that ran more than once -> the line of the loop around it; empty if none is seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Site] = Counter()
        self.repeated: dict[Site, str] = {}
        self._firsts: dict[Site, tuple[Any, int]] = {}
        self._paths: dict[int, str] = {}

    def of(self, model: nn.Module) -> _CallSites:
        self._paths = {id(module): path for path, module in model.named_modules()}
        return self

    def differing(self, others: _CallSites) -> list[Site]:
        """Return the calls of which ``others`` counted another number; what ran once or not is no loop."""
        return [
            site
            for site, count in self.counts.items()
            if count != others.counts[site] and max(count, others.counts[site]) > 1
        ]

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._count(sys._getframe(1))
        return function(*args, **(kwargs or {}))

    def _count(self, inner: FrameType) -> None:
        path, users = None, list[FrameType]()
        for frame in frames(inner, trial_runs.__file__):
            code = frame.f_code
            if is_users(code.co_filename):
                users.append(frame)
            if path is None and code.co_argcount:
                path = self._paths.get(id(frame.f_locals.get(code.co_varnames[0])))
            if path is not None and users:
                break
        else:
            return
        site, called = (tuple((f.f_code, f.f_lasti) for f in users), path), (inner.f_code, inner.f_lasti)
        if self._firsts.setdefault(site, called) == called:
            self.counts[site] += 1
            if self.counts[site] == 2:
                self.repeated[site] = _line_of_loop(users[0])


def _line_of_loop(inner: FrameType) -> str:
    """Return the line of the innermost loop statement around the calls that run; empty if none is seen."""
    for frame in users_frames(inner, trial_runs.__file__):
        code, number = frame.f_code, frame.f_lineno
        depth = sys.maxsize
        for at in range(number, code.co_firstlineno - 1, -1):
            text = linecache.getline(code.co_filename, at)
            own = len(text) - len(text.lstrip())
            if text.strip() and own < depth:
                depth = own
                if text.lstrip().startswith(("for ", "while ")) or (at == number and " for " in text):
                    return line_in_code(code.co_filename, at)
    return ""
