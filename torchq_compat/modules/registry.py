"""The registry of custom-module kinds, and the interface through which the stages use them."""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule, Node

from torchq_compat.annotate.observed_graph import ObserverFault
from torchq_compat.capture.call_layouts import CallLayout
from torchq_compat.capture.opaque_calls import OpaqueBoundary, OpaqueModule
from torchq_compat.capture.opaque_stub import FakeCall
from torchq_compat.fx_state.numbered import Required, RequiredTensor
from torchq_compat.fx_state.states import FxState
from torchq_compat.model.graph_module import ROOT, QuantizationGraphModule
from torchq_compat.read.backend_configs import BackendTable
from torchq_compat.read.custom_configs import PrepareSettings, StandaloneSettings
from torchq_compat.read.qspecs import OpSpecs
from torchq_compat.support.argument_checks import checked_arguments, instance_of
from torchq_compat.support.decisions import Decision
from torchq_compat.support.torch_ao import QConfig

# A new kind is one file with a handler that calls ``register``; no stage changes.


#: (graph module, opaque call, path, args and kwargs of the call) -> nodes for its flat results, written
#: before the call; None if this call cannot be written.
WriteOps = Callable[[GraphModule, Node, str, tuple[Any, ...], dict[str, Any]], list[Node] | None]
#: (model, state, the model's QConfigMapping, its path in FX's names with a final dot) -> what it needs.
RequiredByModel = Callable[..., Required]
#: Prepared or converted model -> the decisions about it.
ExplainModel = Callable[[nn.Module], Iterable[Decision]]


@dataclass(frozen=True)
class ObserveRequest:
    """A float module to make an observed one from.

    Attributes:
        standalone: the configuration of a standalone module.
        prepare_inside: prepares a standalone module, or the model that the module holds, as its own model.
        example_inputs: the example inputs of the model that the module holds.
        first_inputs: what that model is given first, as the states before a loop.
        longer_inputs: size of the model around it -> what it is given last at longer sizes.
        states: how many of its first inputs are what the step before it returned first.
    """

    module: nn.Module
    path: str
    observed_class: type[nn.Module]
    qconfig: QConfig
    specs: OpSpecs
    standalone: StandaloneSettings | None = None
    prepare_inside: Callable[[ObserveRequest], QuantizationGraphModule] | None = None
    example_inputs: tuple[Any, ...] | None = None
    first_inputs: tuple[Any, ...] = ()
    longer_inputs: Mapping[str, tuple[tuple[Any, ...], ...]] = field(default_factory=dict)
    states: int = 0


@dataclass(frozen=True)
class ConvertRequest:
    """An observed module to make a converted one from.

    Attributes:
        observed: the observed module, a copy that may be used up.
        quantized_class: the class the script maps it to, if any.
        path: the module's path in the model.
        output_observers: for each flat result that is observed in the graph, its observers, one for each
            call.
        input_observers: the observer in the graph of each flat input of the first call, or None.
        convert_inside: converts a prepared model inside the module.
    """

    observed: OpaqueModule
    quantized_class: type[nn.Module] | None
    path: str
    output_observers: tuple[tuple[nn.Module, ...], ...]
    input_observers: tuple[nn.Module | None, ...] = ()
    convert_inside: Callable[[GraphModule], QuantizationGraphModule] | None = None


class CustomModuleHandler(ABC):
    """One kind of custom module. A handler may change the float modules it gets: they are copies."""

    #: Whether the handler comes after all others.
    is_fallback = False
    #: Whether this is the handler of standalone modules.
    carries_standalone = False
    #: Whether ``check_call`` tries the calls of the example run, which is recorded for it.
    checks_calls = False
    #: Whether a converted module of this kind is lowered by lowering its graphs.
    lowers_graphs = False

    def takes(self, float_class: type[nn.Module], observed_class: type[nn.Module]) -> bool:
        """Return whether this handler carries out the mapping float_class -> observed_class.

        Args:
            float_class: the key of the mapping, a class of the user's model.
            observed_class: the class the script maps it to.
        """
        return False

    def takes_unmapped(self, module: nn.Module, specs: OpSpecs, backend: BackendTable) -> bool:
        """Return whether this handler quantizes ``module`` without a mapping, as FX's BackendConfigs do."""
        return False

    def holds_model(self, module: nn.Module) -> bool:
        """Return whether a float ``module`` holds a model that is prepared on its own, by the rules of the
        model around it; the rule for ``module`` itself is then ignored."""
        return False

    def give_states(self, module: nn.Module) -> None:
        """Make calls of a float ``module`` that omit the initial states pass them, so that the first step of
        a loop is like the other steps."""
        return

    def is_opaque(self, module: nn.Module) -> bool:
        """Return whether a ``module`` left float must stay one call, because torch.export would unroll it or
        fix its sizes."""
        return False

    def is_users_own(self, module: nn.Module) -> bool:
        """Return whether ``module`` is of a class derived from the handler's, with a ``forward`` of its own:
        user code, which is one float call unless the user maps that class."""
        return False

    def ops_writer(self, module: nn.Module) -> WriteOps | None:
        """Return a function that writes an opaque float ``module`` as ops that a Quantizer can annotate; None
        if there is none."""
        return None

    @abstractmethod
    def fake_call(self, module: nn.Module, path: str) -> FakeCall:
        """Return a function with the arguments of ``module`` that computes the shapes and dtypes of its
        result; ``path`` is for its error messages."""

    @abstractmethod
    def observe(self, request: ObserveRequest) -> OpaqueModule:
        """Make the observed module.

        Args:
            request: the float module, its path, its qconfig and its specs.

        Returns:
            The module that takes the place of the float one in the prepared model.

        Raises:
            CustomModuleError: if the observed class does not do what the mapping requires.
        """

    def boundary(self, opaque: OpaqueModule, request: ObserveRequest, layout: CallLayout) -> OpaqueBoundary:
        """Return the specs around one call of an observed module. Default: floats, nothing is quantized.

        Args:
            opaque: the module that ``observe`` returned.
            request: the request that ``observe`` got.
            layout: the structure of the call's arguments and results.

        Raises:
            CustomModuleError: if settings of the module do not fit the call.
        """
        return OpaqueBoundary.floats(layout.inputs.count(), layout.outputs.count())

    @abstractmethod
    def owns(self, opaque: nn.Module) -> bool:
        """Return whether ``opaque`` is an observed or converted module of this kind."""

    @abstractmethod
    def convert(self, request: ConvertRequest) -> OpaqueModule:
        """Make the converted module.

        Args:
            request: the calibrated module, the observers of its calls, and the class the script maps it to.

        Returns:
            The module that takes the place of the observed one in the converted model.

        Raises:
            CustomModuleError: if the quantized class does not do what the mapping requires.
        """

    def copies_parameters(self, quantized_class: type[nn.Module] | None) -> bool:
        """Return whether ``convert``, with this request's ``quantized_class``, leaves the parameters of the
        observed module as they are and keeps copies only: then nobody has to copy them before."""
        return False

    def mapping_hint(self, module: nn.Module) -> str | None:
        """Return a hint on how to map a ``module`` that has a qconfig and stays float because no mapping
        names its class; None if ``module`` is not of this kind."""
        return None

    def loses_forward(self, module: nn.Module) -> bool:
        """Return whether ``module`` has its own ``forward``, which its observed module does not call."""
        return False

    def quantized_class(
        self, opaque: OpaqueModule, mapping: Mapping[type[nn.Module], type[nn.Module]]
    ) -> type[nn.Module] | None:
        """Return the class to which an observed-to-quantized ``mapping`` maps ``opaque``: its key is the
        class of ``opaque``, a base class, or the class the script mapped the float module to."""
        classes = (type(opaque), opaque.opaque_observed_class or type(opaque))
        return next((to for key, to in mapping.items() if any(issubclass(c, key) for c in classes)), None)

    def check_call(
        self, opaque: OpaqueModule, path: str, layout: int, arguments: list[Any], expected: list[Tensor]
    ) -> None:
        """Try a captured call of a copy of ``opaque`` on ``arguments``; compare the shapes and dtypes of the
        results with those of ``expected``.

        Raises:
            CustomModuleError: if the observed module cannot replace the float one.
        """
        return None

    def lower(self, opaque: OpaqueModule) -> OpaqueModule | str:
        """Return a module that computes the converted ``opaque`` on integer kernels of an x86 CPU, packed for
        ``torch.backends.quantized.engine``; or the reason why there is none.

        The lowered module is called with the layouts of ``opaque``: its inputs and results have the same
        qparams. ``opaque`` keeps the state and must not be changed; when its state changes, it is lowered
        again.
        """
        return "its kind has no integer kernels"

    def observer_faults(self, opaque: OpaqueModule) -> list[tuple[str, ObserverFault]]:
        """Return (path inside ``opaque``, fault) of every observer that cannot be converted."""
        return []

    def required_of_fx(
        self, opaque: OpaqueModule, state: FxState, prefix: str, required_by_model: RequiredByModel
    ) -> Required:
        """Return what the observed ``opaque`` needs from a state dict of FX, in which its path is ``prefix``.

        ``required_by_model`` returns what a model inside ``opaque`` needs. Default: the entries have the same
        names in both state dicts.
        """
        return Required(tuple(RequiredTensor(name, (f"{prefix}.{name}",)) for name in opaque.state_dict()))

    def explain(self, opaque: OpaqueModule, path: str, explain_model: ExplainModel) -> Iterator[Decision]:
        """Yield the decisions inside an observed or converted module; ``explain_model`` returns those about a
        model inside the module."""
        return iter(())


_HANDLERS: list[CustomModuleHandler] = []


@checked_arguments(handler=instance_of(CustomModuleHandler))
def register(handler: CustomModuleHandler) -> CustomModuleHandler:
    """Add a kind of custom module. Handlers added later come first: a user's handler takes precedence.

    Args:
        handler: the handler that decides about modules of its kind and makes them.

    Returns:
        ``handler``.

    Raises:
        ArgumentError: ``handler`` is no CustomModuleHandler.

    Example:
        >>> import torch
        >>> from torchq_compat.custom_modules import UserModuleHandler, register
        >>> class TableHandler(UserModuleHandler):
        ...     def takes(self, float_class, observed_class):
        ...         return float_class.__name__ == "Table"
        >>> handler = register(TableHandler())
    """
    _HANDLERS.insert(0, handler)
    return handler


def handlers() -> tuple[CustomModuleHandler, ...]:
    """Return the handlers of all kinds, in order of precedence."""
    return tuple(sorted(_HANDLERS, key=lambda handler: handler.is_fallback))


def handler_of(opaque: Any) -> CustomModuleHandler | None:
    """Return the handler of an observed or converted module; None if there is none."""
    return next((handler for handler in handlers() if handler.owns(opaque)), None)


# A parent for a model that is itself a custom module, so that the graph has a submodule to call.
#
# In the prepared and converted model the path of the custom module is ``module``; its submodules are also
# reachable without that name, for example at ``layers.0.layer_fw.cell``.


class Parent(nn.Module):
    """Has the attributes of the model inside, too."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.add_module(ROOT, model)
        self.training = model.training

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):
                raise  # The parent must not be copied with the __deepcopy__ of a parametrized model.
            return getattr(super().__getattr__(ROOT), name)


def with_parent(model: nn.Module, settings: PrepareSettings) -> nn.Module:
    """Return ``model``; if it is a custom module, a parent of it with the same class name and signature."""
    is_mapped = any(type(model) in classes for classes in settings.float_to_observed.values())
    if not is_mapped and not any(h.is_opaque(model) or h.mapping_hint(model) is not None for h in handlers()):
        return model

    @functools.wraps(type(model).forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.get_submodule(ROOT)(*args, **kwargs)

    forward.__signature__ = inspect.signature(type(model).forward)  # type: ignore[attr-defined]
    parent: nn.Module = type(type(model).__name__, (Parent,), {"forward": forward})(model)
    return parent
