"""Users' own custom modules: any float class with an observed and a quantized class."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.observer import FixedQParamsObserver
from torchao.quantization.pt2e.quantizer import QuantizationSpec

from torchq_compat.capture import call_layouts
from torchq_compat.capture.opaque_calls import OpaqueBoundary, OpaqueModule
from torchq_compat.capture.opaque_stub import FakeCall
from torchq_compat.errors import CustomModuleError, TorchQCompatError
from torchq_compat.modules import registry
from torchq_compat.modules.user_shapes import fake_call_of
from torchq_compat.read.custom_configs import ClassMapping
from torchq_compat.read.observers import translate_constructor
from torchq_compat.read.qdq import DEQUANTIZE
from torchq_compat.read.qparams import PerTensorQParams, QParams, covering
from torchq_compat.read.qspecs import OpSpecs, make_spec
from torchq_compat.support import torch_ao
from torchq_compat.support.dtypes import LEGACY_DTYPES, dtype_name, dtype_range, is_integer
from torchq_compat.support.graph_nodes import called_modules, copied_model
from torchq_compat.support.process_state import alone, draws_kept
from torchq_compat.support.quantized_tensors import as_float, of_integers, quantize
from torchq_compat.support.upstream import detect_fake_mode, pytree
from torchq_compat.support.user_warnings import warn_user

# Reads which inputs and outputs of a user's module are quantized, and in which dtype.
#
# The default is FX's convention: every float input and output is quantized by the module's QConfig. The
# observed class changes this with attributes:
#
#     class ObservedAttention(nn.Module):
#         quantized_inputs = {"mask": None, "state.0": torch.int16}
#         quantized_outputs = {"1": None}
#
# Keys are labels (see ``tensor_labels``); the key of a structure applies to all tensors in it. Values: None
# leaves a tensor float, a dtype observes it in this dtype, an observer constructor with this observer.


def choose_specs(
    observed: nn.Module, setting: str, calls: list[list[str]], specs: OpSpecs, path: str
) -> tuple[QuantizationSpec | None, ...]:
    """Return the spec of every labelled tensor of the first of ``calls``, lists of labels.

    Raises:
        ConfigError: if a value of the attribute ``setting`` is not None, a dtype or a constructor.
        CustomModuleError: if a dtype is not an integer dtype, or the attribute is no dict whose keys are
            labels of some call; names the key and the labels.
    """
    settings: Any = getattr(observed, setting, {})
    if not isinstance(settings, Mapping):
        raise CustomModuleError.of("TQ942.settings_type", setting=setting, path=path, settings=settings)
    by_label = {str(key): value for key, value in settings.items()}
    known = sorted({label for labels in calls for label in labels})
    for name in by_label:
        if not any(label == name or label.startswith(f"{name}.") for label in known):
            shown = ", ".join(map(repr, known)) or "none"
            raise CustomModuleError.of(
                "TQ942.unknown_input", setting=setting, path=path, key=name, known=shown
            )
    chosen = []
    for label in calls[0]:
        key = call_layouts.most_specific(by_label, label)
        named = f"{setting}[{key!r}] of the module at {path!r}"
        chosen.append(specs.activation if key is None else _spec(by_label[key], specs, named))
    return tuple(chosen)


def _spec(value: Any, specs: OpSpecs, named: str) -> QuantizationSpec | None:
    if value is None:
        return None
    if not isinstance(value, torch.dtype):
        return make_spec(translate_constructor(value, named))
    if value == specs.activation_dtype:
        return specs.activation
    if not is_integer(value):
        raise CustomModuleError.of("TQ942.no_integer_dtype", named=named, dtype=dtype_name(value))
    low, high = dtype_range(value)
    if specs.activation_constructor.settings.is_fake_quantize:
        kind: Any = torch_ao.FakeQuantize.with_args(observer=torch_ao.MovingAverageMinMaxObserver)  # type: ignore[no-untyped-call]
    else:
        kind = torch_ao.HistogramObserver
    constructor = kind.with_args(dtype=value, quant_min=low, quant_max=high)
    return make_spec(translate_constructor(constructor, named))


def covering_observer(observers: Sequence[Any]) -> FixedQParamsObserver:
    """Return an observer for a module that is called several times, whose qparams cover those of the
    ``observers`` of all calls, of one dtype."""
    limits = observers[0].quant_min, observers[0].quant_max, observers[0].dtype
    observed = (observer.calculate_qparams() for observer in observers)
    qparams = covering([PerTensorQParams(float(s), int(z), *limits) for s, z in observed])
    return FixedQParamsObserver(**vars(qparams))


# A user's module as an opaque module: the same object, its class replaced by a subclass that the graph can
# call with flat tensors.
#
# The module keeps its path, its state and its ``isinstance`` relations; ``torch.nn.utils.parametrize`` adds
# behaviour to a module in the same way.


class OpaqueUserModule(OpaqueModule):
    """A mixin for the class of a user's module, so that the graph can call the module.

    Attributes:
        opaque_path: the module's path in the model.
        opaque_takes_floats: whether the module gets its quantized inputs as floats; otherwise it gets
            quantized tensors, as in FX.
    """

    opaque_path: str
    opaque_takes_floats: bool
    #: The class the user wrote.
    opaque_users_class: type[nn.Module]

    def opaque_call(self, *args: Any, **kwargs: Any) -> Any:
        return super(OpaqueModule, self).forward(*args, **kwargs)

    def opaque_receive(self, q: Tensor, qparams: QParams) -> Tensor:
        if self.opaque_takes_floats:
            return super().opaque_receive(q, qparams)
        kind, dtype = self.opaque_users_class.__qualname__, dtype_name(qparams.dtype)
        if detect_fake_mode([q]) is not None:
            raise CustomModuleError.of("TQ942.exported_input", kind=kind, path=self.opaque_path)
        if qparams.dtype not in LEGACY_DTYPES:
            raise CustomModuleError.of("TQ942.input_dtype", kind=kind, path=self.opaque_path, dtype=dtype)
        # The torch.ao quantized tensor with the integers ``q``, which classes of legacy scripts accept.
        # Values with several qparams (directions of a recurrent module) are quantized again with qparams that
        # cover all, because hardly any quantized operator accepts per-channel activations.
        if not isinstance(qparams, PerTensorQParams):
            whole = covering([piece for _, piece in qparams.runs])
            q, qparams = whole.quantize(qparams.dequantize(q)), whole
        return of_integers(q, qparams.scale, qparams.zero_point)

    def opaque_hand_out(self, result: Tensor, qparams: QParams | None) -> Tensor:
        return super().opaque_hand_out(as_float(result), qparams)

    def opaque_check_results(self, layout: call_layouts.CallLayout, results: Any) -> None:
        result, _ = call_layouts.Structure.take_apart(results)
        if result != layout.outputs:
            raise _other_results(self, self.opaque_path, _shown(layout.outputs), _shown(result))
        if layout.ranks and not torch.compiler.is_dynamo_compiling():
            call_layouts.check_form(self.opaque_path, results, [layout])


def _other_results(opaque: OpaqueUserModule, path: str, expected: str, result: str) -> CustomModuleError:
    owner = opaque.opaque_users_class.__qualname__
    return CustomModuleError.of(
        "TQ942.other_results", owner=owner, path=path, result=result, expected=expected
    )


class HeldGraphModule(OpaqueUserModule):
    """Holds a GraphModule that a user's class returned: each has its own class, which cannot be extended."""

    def __init__(self, held: GraphModule) -> None:
        nn.Module.__init__(self)
        self.held = held

    def opaque_call(self, *args: Any, **kwargs: Any) -> Any:
        return self.held(*args, **kwargs)


def as_opaque_module(module: nn.Module, path: str, *, takes_floats: bool) -> OpaqueUserModule:
    """Return ``module`` as an opaque module. Changes its class, unless it is a GraphModule."""
    users_class = type(module)
    opaque: Any = module
    if isinstance(module, GraphModule):
        opaque = HeldGraphModule(module)
    else:
        namespace = {"__module__": users_class.__module__, "__qualname__": users_class.__qualname__}
        opaque.__class__ = type(users_class.__name__, (OpaqueUserModule, users_class), namespace)
    opaque.opaque_users_class = users_class
    opaque.opaque_path = path
    opaque.opaque_takes_floats = takes_floats
    opaque.opaque_layouts = []
    assert isinstance(opaque, OpaqueUserModule)
    return opaque


def as_users_module(opaque: OpaqueUserModule) -> nn.Module:
    """Return the module as the user's class made it."""
    if isinstance(opaque, HeldGraphModule):
        return opaque.held
    users_class = opaque.opaque_users_class
    for name in (*OpaqueModule.__annotations__, *OpaqueUserModule.__annotations__):
        vars(opaque).pop(name, None)
    module: Any = opaque
    module.__class__ = users_class
    assert isinstance(module, nn.Module)
    return module


def _shown(structure: call_layouts.Structure) -> str:
    """Return a structure for messages, without dtypes."""
    return str(structure.put_together(["tensor"] * structure.count()))


# The handler of all other modules: any float class with an observed and a quantized class.
#
# Legacy: ``PrepareCustomConfig.set_float_to_observed_mapping`` and ``ConvertCustomConfig``. FX quantized
# the first positional input and the one output of such a module; this package quantizes all inputs and
# outputs, see ``boundary_settings``. As in FX the quantized module computes with torch.ao's quantized
# tensors. If its class has ``takes_floats = True``, it gets floats rounded to the qparams of its inputs,
# and its results are quantized after the call.


class UserModuleHandler(registry.CustomModuleHandler):
    """Calls ``from_float`` and ``from_observed`` of the user's classes. A registered subclass can override
    more for a class, such as ``fake_call`` and ``boundary``."""

    is_fallback = True
    checks_calls = True

    def takes(self, float_class: type[nn.Module], observed_class: type[nn.Module]) -> bool:
        return True

    def fake_call(self, module: nn.Module, path: str) -> FakeCall:
        knowing = next((handler for handler in registry.handlers() if handler.is_opaque(module)), None)
        return fake_call_of(module, path) if knowing is None else knowing.fake_call(module, path)

    def observe(self, request: registry.ObserveRequest) -> OpaqueModule:
        for module in request.module.modules():
            # FX sets it there. Submodules have it too, for from_float of custom modules inside.
            module.qconfig = request.qconfig  # type: ignore[assignment]
        observed = call_class_method(request.observed_class, "from_float", request.module, request.path)
        if isinstance(observed, OpaqueModule) and registry.handler_of(observed) is not None:
            return observed
        if getattr(observed, "qconfig", None) is None:
            observed.qconfig = request.qconfig  # type: ignore[assignment]
        return as_opaque_module(observed, request.path, takes_floats=True)

    def owns(self, opaque: nn.Module) -> bool:
        return isinstance(opaque, OpaqueUserModule)

    def boundary(
        self, opaque: OpaqueModule, request: registry.ObserveRequest, layout: call_layouts.CallLayout
    ) -> OpaqueBoundary:
        """Return the boundary that ``quantized_inputs`` and ``quantized_outputs`` of the class describe."""
        assert isinstance(opaque, OpaqueUserModule)
        if not request.specs.is_static:
            return OpaqueBoundary.floats(layout.inputs.count(), layout.outputs.count())
        users_class, path = opaque.opaque_users_class, request.path
        inputs = [
            call_layouts.input_labels(users_class, call.inputs) for call in (layout, *opaque.opaque_layouts)
        ]
        outputs = [call_layouts.output_labels(call.outputs) for call in (layout, *opaque.opaque_layouts)]
        return OpaqueBoundary(
            input_specs=choose_specs(opaque, "quantized_inputs", inputs, request.specs, path),
            output_dtypes=(None,) * layout.outputs.count(),
            output_specs=choose_specs(opaque, "quantized_outputs", outputs, request.specs, path),
        )

    def check_call(
        self, opaque: OpaqueModule, path: str, layout: int, arguments: list[Any], expected: list[Tensor]
    ) -> None:
        assert isinstance(opaque, OpaqueUserModule)
        try:
            with alone(), draws_kept(), torch.no_grad():
                results = copied_model(opaque)(*arguments, opaque_layout=layout)
        except TorchQCompatError:
            raise
        except Exception as cause:
            owner = opaque.opaque_users_class.__qualname__
            raise CustomModuleError.of("TQ942.call_raised", owner=owner, path=path, cause=cause) from cause
        for required, result in zip(map(_shown_setting, expected), map(_shown_setting, results), strict=True):
            if required != result:
                raise _other_results(opaque, path, required, result)

    def convert(self, request: registry.ConvertRequest) -> OpaqueModule:
        opaque, path = request.observed, request.path
        assert isinstance(opaque, OpaqueUserModule)
        if request.quantized_class is None:
            name, stays = opaque.opaque_users_class.__name__, "stays observed and computes in floats"
            warn_user("TQ407", kind=name, path=path, stays=stays, lack="no entry for its class")
            return opaque
        layouts = opaque.opaque_layouts
        observed = as_users_module(opaque)
        if request.output_observers:
            # FX sets it there; legacy classes read their output qparams from it.
            of_calls = request.output_observers
            first, *more = (one[0] if len(one) == 1 else covering_observer(one) for one in of_calls)
            observed.activation_post_process = nn.ModuleList([first, *more]) if more else first
        quantized = call_class_method(request.quantized_class, "from_observed", observed, path)
        if isinstance(quantized, OpaqueModule) and registry.handler_of(quantized) is not None:
            converted: OpaqueModule = quantized
        else:
            converted = as_opaque_module(
                quantized, path, takes_floats=getattr(quantized, "takes_floats", False)
            )
        converted.opaque_layouts = list(layouts)
        return converted


def call_class_method(owner: type[nn.Module], method: str, module: nn.Module, path: str) -> nn.Module:
    """Call ``from_float`` or ``from_observed`` of the user's ``owner`` on ``module``.

    Raises:
        CustomModuleError: if the method raises, or does not return a module.
    """
    name = owner.__qualname__
    try:
        result = getattr(owner, method)(module)
    except TorchQCompatError:
        raise
    except Exception as cause:
        raise CustomModuleError.of(
            "TQ942.method_raised", owner=name, method=method, path=path, cause=cause
        ) from cause
    if not isinstance(result, nn.Module):
        raise CustomModuleError.of("TQ942.result_type", owner=name, method=method, path=path, result=result)
    return result


def _shown_setting(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} of {dtype_name(tensor.dtype)}"


registry.register(UserModuleHandler())


# Converts non-traceable modules whose class the script maps.
#
# Legacy: ``ConvertCustomConfig.set_observed_to_quantized_mapping`` with a class that prepare only named
# non-traceable. FX calls ``from_observed`` of the mapped class, passes the new module the quantized tensor
# of a quantized producer, and dequantizes the results.


class QuantizedCall(nn.Module):
    """A quantized module that is called with floats and returns floats.

    Args:
        quantized: the user's module.
        qparams: (scale, zero point, torch.ao dtype) of the first argument, if its producer is quantized.
    """

    def __init__(self, quantized: nn.Module, qparams: tuple[float, int, torch.dtype] | None) -> None:
        super().__init__()
        self.quantized = quantized
        self.qparams = qparams

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.qparams is not None:
            args = (quantize(args[0], *self.qparams), *args[1:])
        return pytree.tree_map_only(Tensor, as_float, self.quantized(*args, **kwargs))


def convert_float_calls(
    converted: GraphModule,
    mappings: ClassMapping,
    quant_type_of: Callable[[str, nn.Module], torch_ao.QuantType],
) -> dict[str, type[nn.Module]]:
    """Replace every module that the graph calls with floats and whose class is mapped for its QConfig; return
    path -> new class.

    Args:
        mappings: what a ConvertCustomConfig maps.
        quant_type_of: returns the kind of the QConfig of the module at a path.

    Raises:
        CustomModuleError: if ``from_observed`` of a quantized class fails.
    """
    replaced: dict[str, type[nn.Module]] = {}
    for node, module in called_modules(converted):
        path = str(node.target)
        kinds = [kind for kind, mapping in mappings.items() if type(module) in mapping]
        if path in replaced or isinstance(module, OpaqueModule) or not kinds:
            continue
        kind = quant_type_of(path, module)
        if kind not in kinds:
            names = kinds[0].name.lower(), kind.name.lower()
            lack = "its class for {} qconfigs, and its qconfig is {}".format(*names)
            warn_user("TQ407", kind=type(module).__name__, path=path, stays="stays float", lack=lack)
            continue
        quantized_class = mappings[kind][type(module)]
        quantized = call_class_method(quantized_class, "from_observed", module, path)
        # As in FX, a module with a dynamic or weight-only QConfig is called with floats.
        takes_floats = kind is not torch_ao.QuantType.STATIC or getattr(quantized, "takes_floats", False)
        converted.set_submodule(path, QuantizedCall(quantized, None if takes_floats else _qparams(node)))
        replaced[path] = quantized_class
    return replaced


def _qparams(call: Node) -> tuple[float, int, torch.dtype] | None:
    qparams = PerTensorQParams.of_call(call.args[0] if call.args else None, DEQUANTIZE)
    legacy = None if qparams is None else LEGACY_DTYPES.get(qparams.dtype)
    return None if qparams is None or legacy is None else (qparams.scale, qparams.zero_point, legacy)
