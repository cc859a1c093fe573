"""A loop over time as a module, whose step is a model of its own that is called once per step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Interpreter
from torch.fx.traceback import preserve_node_meta


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
        #: The arguments of the step in the last call, the example for its capture; and in the first.
        self.example: tuple[Tensor, ...] = ()
        self.first: tuple[Tensor, ...] = ()

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
        results: Sequence[Tensor] = vars(self)["step"](*args)
        return results
