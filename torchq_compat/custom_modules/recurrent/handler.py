"""Recurrent modules as custom modules: the handlers the stages call, one for each family."""

from __future__ import annotations

from torch import nn
from torch.fx import GraphModule

from torchq_compat.annotate.call_boundary import OpaqueBoundary
from torchq_compat.annotate.dtype_rules import takes_weight
from torchq_compat.config.backend_configs import BackendTable
from torchq_compat.custom_modules.parts.handler import (
    PartOwnerHandler,
    converted_by_its_class,
    has_own_forward,
    hint_to_map,
    observed_by_its_class,
    warn_if_forward_overridden,
)
from torchq_compat.custom_modules.parts.part_specs import DynamicPartSpecs, PartSpecs
from torchq_compat.custom_modules.recurrent.modules.dynamic import (
    DynamicRecurrent,
    convert_dynamic,
    prepare_dynamic,
)
from torchq_compat.custom_modules.recurrent.modules.families import (
    FAMILIES,
    RecurrentFamily,
    fake_call,
    family_of,
)
from torchq_compat.custom_modules.recurrent.modules.recurrent_module import (
    ConvertedRecurrent,
    ObservedRecurrent,
    RecurrentModule,
)
from torchq_compat.custom_modules.recurrent.native.build import kernel_build
from torchq_compat.custom_modules.registry import ConvertRequest, ObserveRequest, register
from torchq_compat.errors import RecurrentModuleError
from torchq_compat.opaque_calls.capture_stub import FakeCall
from torchq_compat.opaque_calls.layouts import CallLayout
from torchq_compat.opaque_calls.opaque_module import OpaqueModule
from torchq_compat.qspecs.quantization_specs import OpSpecs

__all__ = ["DynamicRecurrentHandler", "RecurrentHandler"]


class RecurrentHandler(PartOwnerHandler):
    """One family: a float class, its observed class and its converted class."""

    def __init__(self, family: RecurrentFamily) -> None:
        self.family = family

    def takes(self, float_class: type[nn.Module], observed_class: type[nn.Module]) -> bool:
        ours = tuple(filter(None, (self.family.observed, self.family.legacy_observed)))
        return issubclass(float_class, self.family.float_class) and issubclass(observed_class, ours)

    def is_opaque(self, module: nn.Module) -> bool:
        return isinstance(module, self.family.float_class) and isinstance(module, nn.RNNBase)

    def fake_call(self, module: nn.Module, path: str) -> FakeCall:
        return fake_call(module, path)

    def owns(self, opaque: nn.Module) -> bool:
        return isinstance(opaque, (self.family.observed, self.family.converted))

    def loses_forward(self, module: nn.Module) -> bool:
        return has_own_forward(module, self.family.float_class)

    def observe(self, request: ObserveRequest) -> OpaqueModule:
        warn_if_forward_overridden(request.module, self.family.float_class, request.path)
        observed = self._observed(request)
        observed.module_path = request.path
        return observed

    def _observed(self, request: ObserveRequest) -> ObservedRecurrent:
        specs = PartSpecs(request.specs)
        made = observed_by_its_class(
            request,
            (self.family.observed, self.family.legacy_observed),
            lambda: self.family.observed.observe(request.module, specs),
        )
        if isinstance(made, self.family.observed):
            return made
        if self.family.legacy_observed is not None and isinstance(made, self.family.legacy_observed):
            if any(isinstance(m, GraphModule) for m in made.modules()):
                raise RecurrentModuleError(
                    f"the LSTM at {request.path!r} was observed by the FX engine.",
                    hint="import get_lstm_with_individually_observed_parts from torchq_compat.lstm_utils, or "
                    "start the script with 'torchq-compat run'.",
                )
            # Observed by the eager engine, every part from its qconfig: the cells that are built here.
            return self.family.observed.observe(request.module, specs, split_gates=_is_split(made))
        raise RecurrentModuleError.unusable_result(request.path, "from_float", made)

    def convert(self, request: ConvertRequest) -> OpaqueModule:
        made = converted_by_its_class(
            request,
            (self.family.converted, self.family.legacy_converted),
            lambda: self.family.converted.from_observed(request.observed),
        )
        if not isinstance(made, ConvertedRecurrent):
            raise RecurrentModuleError.unusable_result(request.path, "from_observed", made)
        return made

    def lower(self, opaque: OpaqueModule) -> OpaqueModule | str:
        return _lower(opaque)

    def mapping_hint(self, module: nn.Module) -> str | None:
        if not isinstance(module, self.family.float_class):
            return None
        return hint_to_map(self.family.float_class, self.family.map_to)


def _is_split(module: nn.Module) -> bool:
    return any(isinstance(getattr(m, "igates", None), nn.ModuleDict) for m in module.modules())


def _lower(opaque: OpaqueModule) -> OpaqueModule | str:
    assert isinstance(opaque, RecurrentModule)
    kernel_build()  # Not in the first call: it takes seconds, and may have something to tell.
    problems = opaque.program_problems()
    return problems[0] if problems else opaque.lowered()


class DynamicRecurrentHandler(PartOwnerHandler):
    """Recurrent modules a dynamic QConfig is about and nothing maps, where the backend lists them."""

    def takes(self, float_class: type[nn.Module], observed_class: type[nn.Module]) -> bool:
        return False

    def takes_unmapped(self, module: nn.Module, specs: OpSpecs, backend: BackendTable) -> bool:
        if family_of(module) is None or not specs.is_dynamic:
            return False
        entry = backend.find((type(module),))
        return entry is not None and takes_weight(entry, specs)

    def is_opaque(self, module: nn.Module) -> bool:
        return False

    def fake_call(self, module: nn.Module, path: str) -> FakeCall:
        return fake_call(module, path)

    def owns(self, opaque: nn.Module) -> bool:
        return isinstance(opaque, DynamicRecurrent)

    def observe(self, request: ObserveRequest) -> OpaqueModule:
        prepared = prepare_dynamic(request.module, DynamicPartSpecs(request.specs))
        prepared.module_path = request.path
        return prepared

    def boundary(self, opaque: OpaqueModule, request: ObserveRequest, layout: CallLayout) -> OpaqueBoundary:
        """Floats in and out."""
        return OpaqueBoundary.floats(layout.inputs.count(), layout.outputs.count())

    def convert(self, request: ConvertRequest) -> OpaqueModule:
        assert isinstance(request.observed, DynamicRecurrent)
        return convert_dynamic(request.observed)

    def lower(self, opaque: OpaqueModule) -> OpaqueModule | str:
        return _lower(opaque)

    def mapping_hint(self, module: nn.Module) -> str | None:
        return None


for family in FAMILIES:
    register(RecurrentHandler(family))
register(DynamicRecurrentHandler())
