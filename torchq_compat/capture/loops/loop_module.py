"""A loop over time as a module: its step is a model of its own, called once for each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Interpreter
from torch.fx.traceback import preserve_node_meta

__all__ = ["GraphModel", "Loop", "LoopForm", "run_steps"]


@dataclass(frozen=True)
class _Shared:
    """A graph that nobody changes any more; copies of a model share it."""

    graph: Graph

    def __deepcopy__(self, memo: dict[int, Any]) -> _Shared:
        return self


class GraphModel(nn.Module):
    """A graph over a tree of modules, whose classes and paths are those of the user's model.

    Nodes that torch.export makes of it keep the origins that its own nodes have.
    """

    def __init__(self, tree: nn.Module, graph: Graph) -> None:
        super().__init__()
        vars(self)["_modules"] = dict(tree._modules)
        vars(self)["_parameters"] = dict(tree._parameters)
        vars(self)["_buffers"] = dict(tree._buffers)
        vars(self)["_non_persistent_buffers_set"] = set(tree._non_persistent_buffers_set)
        for name, value in vars(tree).items():
            # Tensors that are plain attributes.
            if isinstance(value, Tensor) and name not in vars(self):
                vars(self)[name] = value
        self.training = tree.training
        self.shared = _Shared(graph)

    def forward(self, *args: Any) -> Any:
        with preserve_node_meta():
            return Interpreter(self, graph=self.shared.graph).run(*args)


@dataclass(frozen=True)
class Part:
    """One tensor of which every step has a part.

    Attributes:
        dim: the dimension of the steps.
        backward: whether the last part is that of the first step.
    """

    dim: int
    backward: bool = False

    def of_steps(self, whole: Tensor) -> Sequence[Tensor]:
        parts = whole.unbind(self.dim)
        return parts[::-1] if self.backward else parts

    def of_first(self, whole: Tensor) -> Tensor:
        """The shape of a part; there may be none."""
        return whole.new_empty([*whole.shape[: self.dim], *whole.shape[self.dim + 1 :]])


@dataclass(frozen=True)
class LoopForm:
    """What goes round and what comes out.

    Attributes:
        states: how many tensors one step hands on to the next.
        parts: of the tensors that are read step by step.
        stacked: along which dimension the values of all steps are put together.
        counted: whether a last tensor of that kind only says how many steps there are.
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
    """Call ``step(*states, *parts, *same)`` for each step; it returns the new states, and values.

    Args:
        states: before the first step.
        wholes: what is read step by step.
        same: what every step reads.

    Returns:
        The last states, and the values of all steps, stacked.
    """
    parts = list(
        zip(*(part.of_steps(whole) for part, whole in zip(form.parts, wholes, strict=True)), strict=True)
    )
    used = len(wholes) - form.counted
    values: list[list[Tensor]] = [[] for _ in form.stacked]
    if not parts:
        # A loop behind a first step that is like no other: what it has to stack is empty, and of a shape that
        # the step alone knows.
        firsts = [part.of_first(whole).zero_() for part, whole in zip(form.parts, wholes, strict=True)]
        shapes = step(*states, *firsts[:used], *same)[form.states :]
        empty = [
            value.new_empty(_stacked(value, dim, 0)) for value, dim in zip(shapes, form.stacked, strict=True)
        ]
        return (*states, *empty)
    for at_step in parts:
        results = step(*states, *at_step[:used], *same)
        states = results[: form.states]
        for each, value in zip(values, results[form.states :], strict=True):
            each.append(value)
    stacked = [torch.stack(each, dim) for each, dim in zip(values, form.stacked, strict=True)]
    return (*states, *stacked)


def _stacked(value: Tensor, dim: int, steps: int) -> list[int]:
    return [*value.shape[:dim], steps, *value.shape[dim:]]


class Loop(nn.Module):
    """A float loop.

    Args:
        step: (*states, *parts, *same) -> (*new states, *values).
        ones: (argument, dimension) of ``step`` whose size is 1 whatever the inputs are.
    """

    def __init__(self, form: LoopForm, step: GraphModel, ones: tuple[tuple[int, int], ...]) -> None:
        super().__init__()
        self.form, self.ones = form, ones
        # No submodule: the modules in it are found as those of a model of its own.
        vars(self)["step"] = step
        self.training = step.training
        #: What the step was called with in the example, for the capture of the step.
        self.example: tuple[Tensor, ...] = ()

    def forward(
        self, states: Sequence[Tensor], wholes: Sequence[Tensor], same: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
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
        self.example = args
        results: Sequence[Tensor] = vars(self)["step"](*args)
        return results
