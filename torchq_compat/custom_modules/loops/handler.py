"""The handler of loops over time, which the stages call.

Legacy: none. FX traced a loop over time step by step, for one length. Here the step is prepared, converted
and lowered as its own model, by the rules of the model around it; the states passed between steps are floats.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from torchq_compat.annotate.call_boundary import OpaqueBoundary
from torchq_compat.capture.loops.loop_module import Loop
from torchq_compat.custom_modules.loops.opaque_loop import OpaqueLoop
from torchq_compat.custom_modules.registry import (
    ConvertRequest,
    CustomModuleHandler,
    ExplainModel,
    ObserveRequest,
    register,
)
from torchq_compat.custom_modules.user.fake_shapes import fake_call_of
from torchq_compat.graph.graph_module import QuantizationGraphModule
from torchq_compat.graph.other_engines import unguard
from torchq_compat.opaque_calls.capture_stub import FakeCall
from torchq_compat.opaque_calls.layouts import CallLayout
from torchq_compat.opaque_calls.opaque_module import OpaqueModule
from torchq_compat.support.decisions import Action, Decision

__all__ = ["LoopHandler"]


class LoopHandler(CustomModuleHandler):
    """The handler of float loop -> loop around a prepared step -> loop around a converted step."""

    def takes(self, float_class: type[nn.Module], observed_class: type[nn.Module]) -> bool:
        return False

    def holds_model(self, module: nn.Module) -> bool:
        return isinstance(module, Loop)

    def is_opaque(self, module: nn.Module) -> bool:
        return False

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

    def observe(self, request: ObserveRequest) -> OpaqueModule:
        loop = request.module
        assert isinstance(loop, Loop)
        assert request.prepare_inside is not None
        step = replace(request, module=vars(loop)["step"], example_inputs=loop.example)
        prepared = request.prepare_inside(step)
        assert isinstance(prepared, QuantizationGraphModule)
        # torchao checks for every module in the outer graph whether it is a standalone module.
        unguard(prepared)
        return OpaqueLoop(loop.form, prepared)

    def boundary(self, opaque: OpaqueModule, request: ObserveRequest, layout: CallLayout) -> OpaqueBoundary:
        """Return a boundary of floats: nothing is quantized around the call."""
        return OpaqueBoundary.floats(layout.inputs.count(), layout.outputs.count())

    def convert(self, request: ConvertRequest) -> OpaqueModule:
        opaque = request.observed
        assert isinstance(opaque, OpaqueLoop)
        assert request.convert_inside is not None
        converted: Any = request.convert_inside(opaque.step)
        unguard(converted)
        # A weight that asks for a gradient makes the scan of an exported program trace its steps backwards,
        # which steps on integers refuse.
        converted.requires_grad_(False)
        return opaque.with_step(converted)

    def mapping_hint(self, module: nn.Module) -> str | None:
        return None

    def explain(self, opaque: OpaqueModule, path: str, explain_model: ExplainModel) -> Iterator[Decision]:
        """Yield the decisions about the step, with paths of the user's model; those about the step's sizes
        are left out, since the user never passes its inputs."""
        assert isinstance(opaque, OpaqueLoop)
        for decision in explain_model(opaque.step):
            if decision.action not in (Action.FREE, Action.FIXED):
                yield decision


register(LoopHandler())
