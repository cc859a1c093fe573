"""A prepared or converted loop, which is one opaque call of the outer graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call

from torchq_compat.capture.loops.loop_module import LoopForm, run_steps
from torchq_compat.custom_modules.recurrent.loop_shape import LoopShape, shape_in_export
from torchq_compat.custom_modules.recurrent.over_time import scan_steps
from torchq_compat.graph.graph_module import QuantizationGraphModule
from torchq_compat.opaque_calls.opaque_module import OpaqueModule

__all__ = ["OpaqueLoop"]


class OpaqueLoop(OpaqueModule):
    """A loop whose step is a prepared, converted or lowered model.

    Args:
        step: (*states, *parts, *same) -> (*new states, *values).
    """

    def __init__(self, form: LoopForm, step: QuantizationGraphModule) -> None:
        super().__init__()
        self.form = form
        self.step = step
        self.training = step.training
        self.opaque_layouts = []

    def with_step(self, step: QuantizationGraphModule) -> Self:
        """Return this loop with ``step``, another form of its step."""
        made = type(self)(self.form, step)
        made.opaque_layouts = list(self.opaque_layouts)
        return made

    def opaque_call(
        self, states: Sequence[Tensor], wholes: Sequence[Tensor], same: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Run all steps, see ``run_steps``; as a ``scan`` in an exported program, unless it is unrolled."""
        if torch.compiler.is_exporting() and shape_in_export() is not LoopShape.UNROLLED:
            return _scan(self.form, self.step, states, wholes, same)
        return run_steps(self.form, self._calls_of_step(), states, wholes, same)

    def _calls_of_step(self) -> Callable[..., Any]:
        """Return the function for the steps: only its first call checks the arguments and that packed weights
        are current, since all steps have the same."""
        step, called = self.step, False
        if step._forward_hooks or step._forward_pre_hooks or torch.compiler.is_compiling():
            return step

        def call(*args: Tensor) -> Any:
            nonlocal called
            if called:
                return step.forward(*args)
            called = True
            return step(*args)

        return call


def _scan(
    form: LoopForm,
    step: nn.Module,
    states: Sequence[Tensor],
    wholes: Sequence[Tensor],
    same: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    """Run all steps as a ``scan``, with the same bits as ``run_steps``."""
    count, read = len(states), len(wholes) - form.counted
    weights = {**dict(step.named_parameters()), **dict(step.named_buffers())}
    weights = {name: value for name, value in weights.items() if isinstance(value, Tensor)}

    def body(*flat: Any) -> list[Tensor]:
        now, rest = flat[:count], flat[count:]
        parts, rest = rest[: len(wholes)], rest[len(wholes) :]
        given, rest = rest[: len(same)], rest[len(same) :]
        args = (*now, *parts[:read], *given)
        results = functional_call(step, dict(zip(weights, rest, strict=True)), args)
        # scan refuses a result that is also another result, or an argument.
        return [each.clone() for each in results]

    xs = []
    for part, whole in zip(form.parts, wholes, strict=True):
        first = whole.movedim(part.dim, 0)
        xs.append(first.flip([0]) if part.backward else first)
    results = scan_steps(body, [each.clone() for each in states], xs, (*same, *weights.values()))
    stacked = [each.movedim(0, dim) for each, dim in zip(results[count:], form.stacked, strict=True)]
    return (*results[:count], *stacked)
