"""The base of the handlers for the package's own kinds: a float, an observed and a converted class."""

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.fx import GraphModule, Node

from torchq_compat.annotate.observed_graph import ObserverFault, observer_faults, observer_nodes
from torchq_compat.capture.call_layouts import CallLayout
from torchq_compat.capture.opaque_calls import OpaqueBoundary, OpaqueModule
from torchq_compat.errors import CustomModuleError
from torchq_compat.fx_state.numbered import Required, RequiredObserver, RequiredTensor
from torchq_compat.model.quantized_interface import quantized_values, result_details
from torchq_compat.modules import parts as part_graphs
from torchq_compat.modules.registry import ConvertRequest, CustomModuleHandler, ExplainModel, ObserveRequest
from torchq_compat.support.decisions import Action, Decision
from torchq_compat.support.dtypes import is_integer
from torchq_compat.support.graph_nodes import attribute_of
from torchq_compat.support.user_warnings import warn_user

#: A part is far worse than others if its dB are below the first, and by the second below the median.
FAR_WORSE, FAR_BELOW = 28.0, 8.0


class PartOwnerHandler(CustomModuleHandler):
    """Base of the handlers of modules that consist of graphs of parts."""

    def observer_faults(self, opaque: OpaqueModule) -> list[tuple[str, ObserverFault]]:
        assert isinstance(opaque, part_graphs.PartOwner)
        return [
            (f"{path}.{name}", fault)
            for path, graph in opaque.graphs()
            for name, fault in observer_faults(graph)
        ]

    def explain(self, opaque: OpaqueModule, path: str, explain_model: ExplainModel) -> Iterator[Decision]:
        assert isinstance(opaque, part_graphs.PartOwner)
        for graph_path, graph in opaque.graphs():
            saturated = dict(part_graphs.saturated_parts(graph))
            measured = dict(part_graphs.measured_parts(graph))
            parts = {node for _, node in part_graphs.part_nodes(graph)}
            for name, node in part_graphs.part_nodes(graph):
                details, reason = _observation(graph, node), "part of the custom module"
                if name in saturated:
                    details["saturated"] = saturated[name]
                if is_far_worse(name, measured):
                    others = statistics.median(measured.values())
                    reason = f"{reason}; {measured[name]:.0f} dB where its parts have {others:.0f}"
                    reason += self.mending_profile(part_graphs.part_of(node))
                where, formula = f"{path}.{graph_path}.{name}", part_graphs.part_of(node).formula
                values = quantized_values(graph, node, where, parts - {node}, parts)
                action = Action.QUANTIZED
                given = opaque.specs.constructors.get(part_graphs.part_of(node).group)
                if given is not None and not is_integer(given.settings.dtype):
                    reason += "; its result stays float, as its observer is of a float dtype"
                    action = Action.QUANTIZED if values else Action.FLOAT
                yield Decision(where, formula, action, reason, details, values=values, is_part=True)

    def mending_profile(self, part: part_graphs.Part) -> str:
        """Return advice, as text, for a ``part`` that needs more than 8 bits; empty if there is none."""
        return ""


def is_far_worse(name: str, measured: Mapping[str, float]) -> bool:
    """Return whether the part ``name`` has far fewer dB than other parts, on calibration values."""
    if name not in measured or len(measured) < 3:
        return False
    return measured[name] < min(FAR_WORSE, statistics.median(measured.values()) - FAR_BELOW)


def has_own_forward(module: nn.Module, float_class: type[nn.Module]) -> bool:
    """Return whether ``module``, an instance of ``float_class``, has another ``forward`` than the class."""
    return "forward" in vars(module) or type(module).forward is not float_class.forward


def map_class(float_class: str, observed: str) -> str:
    """Return a hint on how to map ``float_class``, which no mapping names."""
    setter = "PrepareCustomConfig().set_float_to_observed_mapping"
    return f"map it: {setter}({float_class}, {observed})"


@dataclass(frozen=True)
class ModuleFamily:
    """A float class of torch.nn, its observed class and its converted class.

    Attributes:
        observed: the class that replaces it in a prepared model, with ``observe(module, specs)``.
        converted: the class that replaces it in a converted model.
        legacy_observed: the class of torch.ao that scripts map it to, if there is one.
        legacy_converted: the class of torch.ao that it is converted to, if there is one.
    """

    float_class: type[nn.Module]
    observed: Any
    converted: Any
    legacy_observed: type[nn.Module] | None = None
    legacy_converted: type[nn.Module] | None = None

    @property
    def map_to(self) -> str:
        """The name of the class to map the float class to, for messages."""
        package = "torchq_compat" if self.legacy_observed is None else "torch.ao"
        return f"{package}.nn.quantizable.{self.float_class.__name__}"

    def observes(self, cls: type[nn.Module]) -> bool:
        """Return whether ``cls`` is, or derives from, an observed class."""
        return issubclass(cls, tuple(filter(None, (self.observed, self.legacy_observed))))

    def has_standard(self, method: str, cls: type[nn.Module]) -> bool:
        """Return whether ``cls`` inherits ``method``, one that makes modules, unchanged from one of ours."""
        is_observed = method == "from_float"
        ours = self.observed if is_observed else self.converted
        legacy = self.legacy_observed if is_observed else self.legacy_converted
        own = getattr(cls, method).__func__
        return any(getattr(known, method).__func__ is own for known in (ours, legacy) if known is not None)


class FamilyHandler(PartOwnerHandler):
    """Base of the handlers of one family."""

    #: The error about a result of ``from_float`` or ``from_observed`` that is not of the family.
    unusable: ClassVar[str]

    def __init__(self, family: ModuleFamily) -> None:
        self.family = family

    def takes(self, float_class: type[nn.Module], observed_class: type[nn.Module]) -> bool:
        return issubclass(float_class, self.family.float_class) and self.family.observes(observed_class)

    def owns(self, opaque: nn.Module) -> bool:
        return isinstance(opaque, (self.family.observed, self.family.converted))

    def boundary(self, opaque: OpaqueModule, request: ObserveRequest, layout: CallLayout) -> OpaqueBoundary:
        """Return a boundary that quantizes every float input by the QConfig; results have the qparams of the
        parts, or are floats."""
        assert isinstance(opaque, part_graphs.PartOwner)
        count = layout.outputs.count()
        dtypes = tuple(
            dtype if dtype is not None and is_integer(dtype) else None
            for dtype in opaque.result_dtypes(count)
        )
        return OpaqueBoundary(
            input_specs=tuple(
                None if is_index else request.specs.activation for is_index in layout.inputs.holds_indices()
            ),
            output_dtypes=dtypes,
            output_specs=(None,) * count,
            accepted=frozenset(dtype for dtype in dtypes if dtype is not None),
        )

    def loses_forward(self, module: nn.Module) -> bool:
        return has_own_forward(module, self.family.float_class)

    def mapping_hint(self, module: nn.Module) -> str | None:
        if not isinstance(module, self.family.float_class):
            return None
        return map_class(f"torch.nn.{self.family.float_class.__name__}", self.family.map_to)

    def observe(self, request: ObserveRequest) -> OpaqueModule:
        """Observe by the observed class of the mapping: a class that inherits ``from_float`` stands for ours,
        which copies the parameters that it reads."""
        family, observed_class, path = self.family, request.observed_class, request.path
        if has_own_forward(request.module, family.float_class):
            observed = f"nn.{family.float_class.__name__} with its parameters"
            warn_user("TQ408", kind=type(request.module).__name__, path=path, observed=observed)
        if family.has_standard("from_float", observed_class):
            result: Any = family.observed.observe(request.module, part_graphs.PartSpecs(request.specs))
        else:
            request.module.qconfig = request.qconfig  # type: ignore[assignment]  # where FX puts it
            result = observed_class.from_float(request.module)  # type: ignore[attr-defined]
        is_its_own = type(result) is observed_class and not issubclass(observed_class, OpaqueModule)
        if not is_its_own and not self._computes_alike(observed_class):
            # It has a ``forward`` of its own, which ``result`` does not call.
            observed = "the class it inherits from"
            warn_user("TQ408", kind=observed_class.__name__, path=path, observed=observed)
        usable = self.observed_result(result, request)
        usable.module_path = path
        return usable

    def observed_result(self, result: Any, request: ObserveRequest) -> part_graphs.PartOwner:
        """Return the module for ``result`` of an observed class."""
        if isinstance(result, part_graphs.PartOwner) and isinstance(result, self.family.observed):
            return result
        raise self._unusable("from_float", result, request.path)

    def convert(self, request: ConvertRequest) -> OpaqueModule:
        cls: Any = request.quantized_class
        if cls is None or self.family.has_standard("from_observed", cls):
            cls = self.family.converted
        converted: OpaqueModule = cls.from_observed(request.observed)
        if isinstance(converted, self.family.converted):
            return converted  # type: ignore[no-any-return]
        raise self._unusable("from_observed", converted, request.path)

    def _computes_alike(self, observed_class: type[nn.Module]) -> bool:
        return any(
            issubclass(observed_class, standard)
            and all(
                getattr(observed_class, method, None) is getattr(standard, method, None)
                for method in ("forward", "opaque_call")
            )
            for standard in (self.family.observed, self.family.legacy_observed)
            if standard is not None
        )

    def _unusable(self, method: str, result: object, path: str) -> CustomModuleError:
        return CustomModuleError.of(self.unusable, method=method, path=path, value=result, result=result)


def _observation(graph: GraphModule, node: Node) -> dict[str, Any]:
    """Return the observer and dtype of ``node``; in a converted graph, its dtype, scale and zero point."""
    for user in node.users:
        if user.op == "call_module":
            observer = graph.get_submodule(str(user.target))
            return {"observer": type(observer).__name__, "dtype": observer.dtype}
    return result_details(node)


# The names that torch.ao gives the parameters and observers of parts: an observer has the name of its part.


def required_by_parts(graph: GraphModule, at: str) -> Required:
    """Return what a graph of parts needs from a state dict of torch.ao, in which its module is at ``at``."""
    observers = [
        RequiredObserver(observer, (f"{at}.{part}.activation_post_process",), (f"{at}.{part}.scale",))
        for part, observer in part_observers(graph)
    ]
    return Required(observers=tuple(observers)) + required_weights(graph, at)


def part_observers(graph: GraphModule) -> Iterator[tuple[str, str]]:
    """Yield (part, path of its observer)."""
    calls = {node for node, _ in observer_nodes(graph)}
    for part, node in part_graphs.part_nodes(graph):
        for user in node.users:
            if user in calls:
                yield part, str(user.target)
                break


def weights_of_parts(graph: GraphModule) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield (path of a parameter, path of its observer if it has one)."""
    observer_of = {node.args[0]: (str(node.target),) for node, _ in observer_nodes(graph)}
    for node in graph.graph.find_nodes(op="get_attr"):
        if isinstance(attribute_of(graph, node), Tensor):
            yield str(node.target), observer_of.get(node, ())


def required_weights(graph: GraphModule, at: str) -> Required:
    """Return what the weights of a graph of parts, and their observers, need; see ``required_by_parts``."""
    required = Required()
    for name, observers in weights_of_parts(graph):
        theirs = (f"{at}.{name.rpartition('.')[0]}.weight_fake_quant",)
        of_weight = tuple(RequiredObserver(observer, theirs, is_weight=True) for observer in observers)
        required += Required((RequiredTensor(name, (f"{at}.{name}",), observers),), of_weight)
    return required
