"""The handlers of recurrent modules, which the stages call: one for each family, one for dynamic QConfigs."""

import itertools
from dataclasses import replace
from typing import Any

from torch import nn
from torch.fx import GraphModule

from torchq_compat.annotate.patterns import takes_weight
from torchq_compat.capture.call_layouts import CallLayout
from torchq_compat.capture.opaque_calls import OpaqueBoundary, OpaqueModule
from torchq_compat.capture.opaque_stub import FakeCall
from torchq_compat.errors import CustomModuleError
from torchq_compat.fx_state.numbered import Required
from torchq_compat.fx_state.states import FxState
from torchq_compat.modules import parts_handler
from torchq_compat.modules.parts import DynamicPartSpecs, Part, PartOwner, PartSpecs
from torchq_compat.modules.registry import ConvertRequest, ObserveRequest, RequiredByModel, WriteOps, register
from torchq_compat.read.backend_configs import BackendTable
from torchq_compat.read.qspecs import OpSpecs
from torchq_compat.recurrent import families
from torchq_compat.recurrent.contracts import SequenceContract, contract_of
from torchq_compat.recurrent.exported_lstm.whole_op import whole_op_writer
from torchq_compat.recurrent.fx_names import required_by_dynamic, required_by_observed
from torchq_compat.recurrent.kernel.build import kernel_build
from torchq_compat.recurrent.recurrent_module import ObservedRecurrent, RecurrentModule
from torchq_compat.recurrent.states import give_initial_states, has_seen_no_hidden_state
from torchq_compat.support.dtypes import is_integer
from torchq_compat.support.user_warnings import warn_user


class _LoweredByTheCellLoop(parts_handler.PartOwnerHandler):
    """The base of both: converted modules are lowered as programs of the cell loop."""

    def lower(self, opaque: OpaqueModule) -> OpaqueModule | str:
        assert isinstance(opaque, RecurrentModule)
        kernel_build()  # Now and not in the first call: it takes seconds and may warn.
        problems = opaque.program_problems()
        return problems[0] if problems else opaque.lowered()


class RecurrentHandler(_LoweredByTheCellLoop, parts_handler.FamilyHandler):
    """The handler of one family: a float class, its observed class and its converted class."""

    unusable = "TQ941.unusable_result"

    def takes_unmapped(self, module: nn.Module, specs: OpSpecs, backend: BackendTable) -> bool:
        """Return whether ``module`` is an observed class that the model was built with, not yet observed."""
        return isinstance(module, self.family.observed) and module.qconfig is None and specs.is_static

    def is_opaque(self, module: nn.Module) -> bool:
        return self._is_of_family(module) and not parts_handler.has_own_forward(
            module, self.family.float_class
        )

    def is_users_own(self, module: nn.Module) -> bool:
        return self._is_of_family(module) and parts_handler.has_own_forward(module, self.family.float_class)

    def _is_of_family(self, module: nn.Module) -> bool:
        return isinstance(module, self.family.float_class) and isinstance(module, nn.RNNBase)

    def give_states(self, module: nn.Module) -> None:
        give_initial_states(module)

    def ops_writer(self, module: nn.Module) -> WriteOps | None:
        return whole_op_writer(module, self.family.float_class)

    def fake_call(self, module: nn.Module, path: str) -> FakeCall:
        contract = module.contract if isinstance(module, ObservedRecurrent) else contract_of(module)
        return contract.fake_call(path)

    def observe(self, request: ObserveRequest) -> OpaqueModule:
        if not isinstance(request.module, self.family.observed):
            return super().observe(request)
        built: Any = request.module
        specs = PartSpecs(request.specs)
        observed: ObservedRecurrent = self.family.observed.observe(
            built.as_float(), specs, split_gates=built.split_gates
        )
        observed.module_path = request.path
        return observed

    def observed_result(self, result: Any, request: ObserveRequest) -> PartOwner:
        legacy = self.family.legacy_observed
        if isinstance(result, self.family.observed) or legacy is None or not isinstance(result, legacy):
            return super().observed_result(result, request)
        if any(isinstance(m, GraphModule) for m in result.modules()):
            raise CustomModuleError.of("TQ941.observed_by_fx", path=request.path)
        # The eager engine observed every part by the qconfig: the cells built here do the same.
        is_split = any(isinstance(getattr(m, "igates", None), nn.ModuleDict) for m in result.modules())
        observed: ObservedRecurrent = self.family.observed.observe(
            request.module, PartSpecs(request.specs), split_gates=is_split
        )
        return observed

    def boundary(self, opaque: OpaqueModule, request: ObserveRequest, layout: CallLayout) -> OpaqueBoundary:
        """Return the base class's boundary, in which states that the parts keep in floats are not
        quantized."""
        assert isinstance(opaque, RecurrentModule)
        boundary = super().boundary(opaque, request, layout)
        numbered = layout.inputs.put_together(range(layout.inputs.count()), itertools.repeat(None))
        _, hidden = opaque.contract.arguments_of(opaque.module_path, *numbered)
        places = hidden if isinstance(hidden, (tuple, list)) else (hidden,)
        floats = {
            place
            for place, state in zip(places, opaque.contract.kind.states, strict=False)
            if not is_integer(opaque.specs.group_dtype(state.group))
        }
        specs = (None if place in floats else spec for place, spec in enumerate(boundary.input_specs))
        return replace(boundary, input_specs=tuple(specs))

    def copies_parameters(self, quantized_class: type[nn.Module] | None) -> bool:
        """Cells are copied one at a time, so that a large module is never there twice."""
        return quantized_class is None or self.family.has_standard("from_observed", quantized_class)

    def convert(self, request: ConvertRequest) -> OpaqueModule:
        """Convert; warn if calibration ran only single steps from zeros. Cells are left out: a cell
        calibrated without states is also run without states."""
        observed = request.observed
        if (
            isinstance(observed, ObservedRecurrent)
            and isinstance(observed.contract, SequenceContract)
            and has_seen_no_hidden_state(cell for _, cell in observed.cells())
        ):
            warn_user("TQ409", path=request.path)
        return super().convert(request)

    def required_of_fx(
        self, opaque: OpaqueModule, state: FxState, prefix: str, required_by_model: RequiredByModel
    ) -> Required:
        assert isinstance(opaque, RecurrentModule)
        return required_by_observed(opaque, state, prefix)

    def mending_profile(self, part: Part) -> str:
        profile = "int8_with_int16_cell" if part.group == "cell_state" else "int16_parts"
        return f": torchq_compat.profiles.{profile} keeps it in 16 bits"

    def mapping_hint(self, module: nn.Module) -> str | None:
        hint, float_class = super().mapping_hint(module), self.family.float_class
        if hint is None or type(module).forward is float_class.forward:
            return hint
        name = type(module).__name__
        return (
            f"{name} has a forward of its own: {parts_handler.map_class(name, self.family.map_to)}, and "
            f"what is quantized is nn.{float_class.__name__} without it"
        )


class DynamicRecurrentHandler(_LoweredByTheCellLoop):
    """The handler of unmapped recurrent modules with a dynamic QConfig, if the backend lists them."""

    def takes_unmapped(self, module: nn.Module, specs: OpSpecs, backend: BackendTable) -> bool:
        if families.family_of(module) is None or not specs.is_dynamic:
            return False
        entry = backend.find((type(module),))
        return entry is not None and takes_weight(entry, specs)

    def fake_call(self, module: nn.Module, path: str) -> FakeCall:
        return contract_of(module).fake_call(path)

    def owns(self, opaque: nn.Module) -> bool:
        return isinstance(opaque, families.DynamicRecurrent)

    def observe(self, request: ObserveRequest) -> OpaqueModule:
        prepared = families.prepare_dynamic(request.module, DynamicPartSpecs(request.specs))
        prepared.module_path = request.path
        return prepared

    def copies_parameters(self, quantized_class: type[nn.Module] | None) -> bool:
        return True

    def convert(self, request: ConvertRequest) -> OpaqueModule:
        assert isinstance(request.observed, families.DynamicRecurrent)
        return families.DynamicRecurrent.converted_from(request.observed)

    def required_of_fx(
        self, opaque: OpaqueModule, state: FxState, prefix: str, required_by_model: RequiredByModel
    ) -> Required:
        assert isinstance(opaque, families.DynamicRecurrent)
        return required_by_dynamic(opaque, prefix)


for family in families.FAMILIES:
    register(RecurrentHandler(family))
register(DynamicRecurrentHandler())
