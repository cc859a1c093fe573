"""Loops over time written in Python: one step is quantized as its own model, and called for each."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call

from torchq_compat.annotate.unmatched import RULE
from torchq_compat.capture.call_layouts import CallLayout
from torchq_compat.capture.loops.loop_module import Loop, LoopForm, run_steps
from torchq_compat.capture.opaque_calls import OpaqueModule
from torchq_compat.capture.opaque_stub import FakeCall
from torchq_compat.model.graph_module import QuantizationGraphModule
from torchq_compat.model.other_tools import unguard
from torchq_compat.modules import registry
from torchq_compat.modules.user_shapes import fake_call_of
from torchq_compat.recurrent.over_time import LoopShape, scan_steps, shape_in_export
from torchq_compat.recurrent.states import CallKey, active_streams
from torchq_compat.support.decisions import Decision
from torchq_compat.support.process_state import is_compiling, is_exporting

# A prepared or converted loop, which is one opaque call of the outer graph.


class OpaqueLoop(OpaqueModule):
    """A loop whose step is a prepared, converted or lowered model.

    Args:
        step: (*states, *parts, *same) -> (*new states, *values).
        path: its path in the model, which calls it once.
    """

    def __init__(self, form: LoopForm, step: QuantizationGraphModule, path: str) -> None:
        super().__init__()
        self.form, self.path = form, path
        self.step = step
        self.training = step.training
        self.opaque_layouts = []

    def with_step(self, step: QuantizationGraphModule) -> Self:
        """Return this loop with ``step``, another form of its step."""
        result = type(self)(self.form, step, self.path)
        result.opaque_layouts = list(self.opaque_layouts)
        return result

    @property
    def key(self) -> CallKey:
        """Its name in streams."""
        return self.path, 0

    def opaque_call_from_graph(
        self, layout: CallLayout, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        streams = None if torch.compiler.is_dynamo_compiling() else active_streams()
        if streams is None or self.key not in streams.kept:
            return self.opaque_call(*args, **kwargs)
        states, wholes, same = args

        def run(now: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
            results = self.opaque_call(now, wholes, same)
            return results[len(states) :], results[: len(states)]

        values, last = streams.call(self.key, lambda: tuple(states), run)
        return (*last, *values)

    def opaque_call(
        self, states: Sequence[Tensor], wholes: Sequence[Tensor], same: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Run all steps, see ``run_steps``; as a ``scan`` in an exported program, unless it is unrolled."""
        if is_exporting() and shape_in_export() is not LoopShape.UNROLLED:
            return self._scan(states, wholes, same)
        at_once = self.step.steps_at_once(self.form, states, wholes, same)
        return at_once or run_steps(self.form, self._calls_of_step(), states, wholes, same)

    def _calls_of_step(self) -> Callable[..., Any]:
        """Return the function for the steps: only its first call checks the arguments and that packed weights
        are current, since all steps have the same."""
        step, called = self.step, False
        if step._forward_hooks or step._forward_pre_hooks or is_compiling():
            return step

        def call(*args: Tensor) -> Any:
            nonlocal called
            if called:
                return step.call_again(*args)
            called = True
            return step(*args)

        return call

    def _scan(
        self, states: Sequence[Tensor], wholes: Sequence[Tensor], same: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Run all steps as a ``scan``, with the same bits as ``run_steps``."""
        form, step = self.form, self.step
        count, read = len(states), len(wholes) - form.counted
        weights = {**dict(step.named_parameters()), **dict(step.named_buffers())}
        weights = {name: value for name, value in weights.items() if isinstance(value, Tensor)}

        def body(*flat: Any) -> list[Tensor]:
            now, remaining = flat[:count], flat[count:]
            parts, remaining = remaining[: len(wholes)], remaining[len(wholes) :]
            given, remaining = remaining[: len(same)], remaining[len(same) :]
            args = (*now, *parts[:read], *given)
            results = functional_call(step, dict(zip(weights, remaining, strict=True)), args)
            # scan refuses a result that is also another result, or an argument.
            return [result.clone() for result in results]

        xs = []
        for part, whole in zip(form.parts, wholes, strict=True):
            first = whole.movedim(part.dim, 0)
            xs.append(first.flip([0]) if part.backward else first)
        results = scan_steps(body, [state.clone() for state in states], xs, (*same, *weights.values()))
        stacked = [item.movedim(0, dim) for item, dim in zip(results[count:], form.stacked, strict=True)]
        return (*results[:count], *stacked)


# The handler of loops over time, which the stages call.
#
# Legacy: none. FX traced a loop over time step by step, for one length. Here the step is prepared,
# converted and lowered as its own model, by the rules of the model around it; the states passed between
# steps are floats.


class LoopHandler(registry.CustomModuleHandler):
    """The handler of float loop -> loop around a prepared step -> loop around a converted step."""

    def holds_model(self, module: nn.Module) -> bool:
        return isinstance(module, Loop)

    def fake_call(self, module: nn.Module, path: str) -> FakeCall:
        assert isinstance(module, Loop)
        form, fake_step = module.form, fake_call_of(vars(module)["step"], path)

        def fake(states: list[Tensor], wholes: list[Tensor], same: list[Tensor]) -> tuple[Tensor, ...]:
            parts = [part.of_first(whole) for part, whole in zip(form.parts, wholes, strict=True)]
            results = fake_step(*states, *parts[: len(wholes) - form.counted], *same)
            steps = wholes[0].shape[form.parts[0].dim]
            values = []
            for value, dim in zip(results[form.states :], form.stacked, strict=True):
                values.append(value.new_empty([*value.shape[:dim], steps, *value.shape[dim:]]))
            return (*(torch.empty_like(state) for state in states), *values)

        return fake

    def owns(self, opaque: nn.Module) -> bool:
        return isinstance(opaque, OpaqueLoop)

    def observe(self, request: registry.ObserveRequest) -> OpaqueModule:
        loop = request.module
        assert isinstance(loop, Loop)
        assert request.prepare_inside is not None
        module = vars(loop)["step"]
        step = replace(
            request,
            module=module,
            example_inputs=loop.example,
            first_inputs=loop.first,
            longer_inputs=loop.longer,
            states=loop.form.states,
        )
        prepared = request.prepare_inside(step)
        # torchao checks for every module in the outer graph whether it is a standalone module.
        unguard(prepared)
        return OpaqueLoop(loop.form, prepared, request.path)

    def convert(self, request: registry.ConvertRequest) -> OpaqueModule:
        opaque = request.observed
        assert isinstance(opaque, OpaqueLoop)
        assert request.convert_inside is not None
        converted = request.convert_inside(opaque.step)
        unguard(converted)
        # A weight that asks for a gradient makes the scan of an exported program trace its steps backwards,
        # which steps on integers refuse.
        converted.requires_grad_(False)
        return opaque.with_step(converted)

    def explain(
        self, opaque: OpaqueModule, path: str, explain_model: registry.ExplainModel
    ) -> Iterator[Decision]:
        """Yield the decisions about the step, with paths of the user's model; a rule that matches nothing in
        the step may match in the model around it."""
        assert isinstance(opaque, OpaqueLoop)
        for decision in explain_model(opaque.step):
            if decision.kind != RULE:
                yield decision


registry.register(LoopHandler())
