"""Standalone modules: quantized on their own, with their own configuration."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import wraps
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.graph import PythonCode

from torchq_compat.annotate.observed_graph import observer_nodes
from torchq_compat.capture.call_layouts import CallLayout
from torchq_compat.capture.opaque_calls import OpaqueBoundary, OpaqueModule
from torchq_compat.capture.opaque_stub import FakeCall
from torchq_compat.errors import ConfigError
from torchq_compat.fx_state.numbered import Required
from torchq_compat.fx_state.states import FxState
from torchq_compat.model.graph_module import ConvertedGraphModule, QuantizationGraphModule, preserved_of
from torchq_compat.model.other_tools import unguard
from torchq_compat.model.quantized_interface import quantize_inputs
from torchq_compat.modules import registry
from torchq_compat.modules.user_shapes import fake_call_of
from torchq_compat.read.qparams import QParams
from torchq_compat.support import metadata
from torchq_compat.support.decisions import Decision
from torchq_compat.support.upstream import pytree

# A standalone module as one opaque call of the outer graph: a prepared or converted model at the module's
# path.


T = TypeVar("T")


def standalone(kind: type[T]) -> type[T]:
    """Let ``kind``, a class of captured models that is opaque too, take calls of an outer graph."""
    parent: Any = super(kind, kind)

    def layouts(self: Any) -> list[CallLayout]:
        # In meta, because GraphModule.__deepcopy__ drops other attributes.
        matches: list[CallLayout] = self.meta.get(metadata.LAYOUTS.name, [])
        return matches

    def set_layouts(self: Any, layouts: list[CallLayout]) -> None:
        self.meta[metadata.LAYOUTS.name] = layouts

    def call(self: Any, *args: Any, opaque_layout: int | None = None, **kwargs: Any) -> Any:
        if opaque_layout is None:
            return parent.__call__(self, *args, **kwargs)
        return self._opaque_call_flat(self.opaque_layouts[opaque_layout], args)

    def recompile(self: Any) -> PythonCode:
        code: PythonCode = parent.recompile(self)
        of_instance = type(self)  # A class with one instance; Dynamo calls its forward and not ``__call__``.
        compiled = of_instance.forward

        @wraps(compiled)
        def forward(self: Any, *args: Any, opaque_layout: int | None = None) -> Any:
            if opaque_layout is None:
                return compiled(self, *args)
            return self._opaque_call_flat(self.opaque_layouts[opaque_layout], args)

        of_instance.forward = forward
        return code

    value: Any = kind
    value.opaque_layouts, value.__call__, value.recompile = property(layouts, set_layouts), call, recompile
    # Quantized results are integers already.
    value.opaque_hand_out = lambda self, result, qparams: result
    return kind


@standalone
class PreparedStandalone(OpaqueModule, QuantizationGraphModule):
    """A prepared standalone module."""

    def opaque_call(self, *args: Any, **kwargs: Any) -> Any:
        return QuantizationGraphModule.__call__(self, *args, **kwargs)


@standalone
class ConvertedStandalone(OpaqueModule, ConvertedGraphModule):
    """A converted standalone module."""

    def opaque_call(self, *args: Any, **kwargs: Any) -> Any:
        bound = self.record.signature.bind(args, kwargs)
        return ConvertedGraphModule.__call__(self, *quantize_inputs(bound, self.input_qparams()))

    def opaque_output_qparams(self, results: list[Tensor]) -> tuple[QParams | None, ...]:
        leaves = pytree.tree_leaves(self.graph.output_node().args[0])
        # Constants among the returned values do not count as results of the opaque module.
        return tuple(
            qparams
            for qparams, leaf in zip(self.output_qparams(), leaves, strict=True)
            if hasattr(leaf, "meta")
        )


OpaqueStandalone = PreparedStandalone | ConvertedStandalone


# The handler of standalone modules, which the stages call.
#
# Legacy: ``PrepareCustomConfig.set_standalone_module_name`` and ``set_standalone_module_class``. As in FX
# the module is prepared and converted as its own model. Its inputs and outputs are floats, except those
# listed in its own ``input_quantized_indexes`` and ``output_quantized_indexes``. Without its own
# QConfigMapping or BackendConfig it has the QConfig selected for its path and the BackendConfig of the
# outer model.


class StandaloneHandler(registry.CustomModuleHandler):
    """The handler of float module -> prepared model -> converted model, each at the module's path."""

    carries_standalone = True

    def fake_call(self, module: nn.Module, path: str) -> FakeCall:
        return fake_call_of(module, path, decides_at_calls=False)  # It is captured as a model of its own.

    def owns(self, opaque: nn.Module) -> bool:
        return isinstance(opaque, OpaqueStandalone)

    def observe(self, request: registry.ObserveRequest) -> OpaqueModule:
        assert request.prepare_inside is not None
        assert request.standalone is not None
        if not request.standalone.example_inputs:
            raise ConfigError.of("TQ910.standalone_without_example", path=request.path)
        prepared = request.prepare_inside(request)
        wrapped = PreparedStandalone.wrap(prepared, prepared.record, preserved_of(prepared))
        # torchao checks for every module in the outer graph whether it is a standalone module.
        unguard(wrapped)
        return wrapped

    def boundary(
        self, opaque: OpaqueModule, request: registry.ObserveRequest, layout: CallLayout
    ) -> OpaqueBoundary:
        """Return a boundary that quantizes the inputs and outputs listed as quantized; others are floats."""
        assert isinstance(opaque, PreparedStandalone)
        interface, spec = opaque.record.interface, request.specs.activation
        positions = _positions(opaque, layout)
        inputs = tuple(spec if p in interface.inputs else None for p in positions)
        observers = dict(observer_nodes(opaque))
        returned = enumerate(pytree.tree_leaves(opaque.graph.output_node().args[0]))
        outputs = tuple(
            getattr(observers.get(node), "dtype", None) if index in interface.outputs else None
            for index, node in returned
            if isinstance(node, Node)
        )
        return OpaqueBoundary(inputs, outputs, (None,) * len(outputs))

    def convert(self, request: registry.ConvertRequest) -> OpaqueModule:
        """Convert the model inside. An input that both the outer graph and the model inside quantize gets the
        same qparams in both."""
        opaque = request.observed
        assert isinstance(opaque, PreparedStandalone)
        assert request.convert_inside is not None
        placeholders, observers = opaque.graph.find_nodes(op="placeholder"), dict(observer_nodes(opaque))
        positions = _positions(opaque, opaque.opaque_layouts[0])
        for position, observer in zip(positions, request.input_observers, strict=True):
            if observer is not None and position in opaque.record.interface.inputs:
                for user in observers.keys() & placeholders[position].users.keys():
                    GraphModule.set_submodule(opaque, str(user.target), copy.deepcopy(observer))
        converted = request.convert_inside(opaque)
        wrapped = ConvertedStandalone.wrap(converted, converted.record, preserved_of(converted))
        unguard(wrapped)
        wrapped.opaque_layouts = list(opaque.opaque_layouts)
        return wrapped

    def required_of_fx(
        self, opaque: OpaqueModule, state: FxState, prefix: str, required_by_model: registry.RequiredByModel
    ) -> Required:
        assert isinstance(opaque, PreparedStandalone)
        return required_by_model(opaque, state, opaque.record.rules, f"{prefix}.")

    def explain(
        self, opaque: OpaqueModule, path: str, explain_model: registry.ExplainModel
    ) -> Iterator[Decision]:
        assert isinstance(opaque, OpaqueStandalone)
        for decision in explain_model(opaque):
            yield replace(decision, path=f"{path}.{decision.path}")


def _positions(opaque: PreparedStandalone, layout: CallLayout) -> list[int]:
    """Return, for each tensor of a call, its position among the flat inputs of the model inside."""
    markers = [object() for _ in range(layout.inputs.count())]
    args, kwargs = layout.inputs.put_together(markers)
    flat = pytree.tree_leaves(opaque.record.signature.bind(args, kwargs))
    return [flat.index(marker) for marker in markers]


registry.register(StandaloneHandler())
