"""Convert of eager mode: the observed modules of a model replaced, at their paths, by ones that compute q-dq.

Legacy: ``torch.ao.quantization.convert`` and ``swap_module``; also the step of ``prepare_qat`` that replaces
float modules by those that train with fake-quantized weights.
"""

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_weights, fuse_linear_bn_weights
from torch.nn.utils.parametrize import is_parametrized, remove_parametrizations, type_before_parametrizations

from torchq_compat.annotate.observed_graph import ObserverFault, observer_fault
from torchq_compat.capture.opaque_calls import OpaqueModule
from torchq_compat.custom_modules import handler_of
from torchq_compat.eager import observe, qdq_modules
from torchq_compat.eager.grid import keep_custom_results
from torchq_compat.eager.quantize_dynamic import hand_hooks_on
from torchq_compat.errors import ConvertError
from torchq_compat.fx_state.load import WEIGHT_QPARAMS
from torchq_compat.modules.registry import ConvertRequest
from torchq_compat.read.qparams import hold_qparams, is_on_loaded_qparams
from torchq_compat.support.decisions import Action, Decision
from torchq_compat.support.dtypes import plain_dtype
from torchq_compat.support.process_state import draws_kept
from torchq_compat.support.sharded import whole_inside
from torchq_compat.support.torch_ao import FloatFunctional, MinMaxObserver, fused_module
from torchq_compat.support.user_warnings import warn_user

#: The packages of torch.ao's quantized classes: what they compute, classes here do.
LEGACY_QUANTIZED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized", "torch.nn.quantized")
#: Classes of torch.ao whose float module computes the same on a grid.
KEPT_FLOAT = ("Dropout", "ReLU6")


@dataclass
class ConvertSettings:
    """What convert was given.

    Attributes:
        mapping: type of a float or observed module -> class with ``from_float``.
        custom_modules: observed class -> quantized class.
        as_trained: whether the ranges of trained weights are not observed once more.
        without_data: the paths of each FloatFunctional that tells of its observer when it is called.
        decisions: what was done, filled in.
    """

    mapping: Mapping[Any, Any]
    custom_modules: Mapping[Any, Any]
    as_trained: bool = False
    without_data: Collection[str] = ()
    decisions: list[Decision] = field(default_factory=list)


def tell_of_observers(model: nn.Module, settings: ConvertSettings) -> None:
    """Warn about observers that have seen no data, and refuse those without a finite range.

    Of a FloatFunctional's methods those with a scalar observe nothing: if no other observer lacks data, it is
    told when one of its other methods is called.

    Raises:
        ConvertError: an observer has seen NaN or infinity.
    """
    faults: dict[ObserverFault | None, list[str]] = {}
    for path, module in model.named_modules():
        observer, handler = getattr(module, observe.OBSERVER, None), handler_of(module)
        if isinstance(module, OpaqueModule) and handler is not None:
            module.opaque_layouts = getattr(module, "opaque_layouts", [])
            for name, fault in handler.observer_faults(module):
                faults.setdefault(fault, []).append(f"{path}.{name}")
        elif isinstance(observer, observe.OBSERVERS) and getattr(module, "qconfig", None) is not None:
            faults.setdefault(observer_fault(observer), []).append(path)
    if not_finite := faults.get(ObserverFault.NOT_FINITE):
        raise ConvertError.of("TQ905.not_finite", observers=", ".join(not_finite[:5]))
    unseen = faults.get(ObserverFault.UNSEEN, [])
    if all(isinstance(model.get_submodule(path), FloatFunctional) for path in unseen):
        settings.without_data = frozenset(unseen)
    else:
        warn_user("TQ405", count=len(unseen), observers=", ".join(unseen[:5]))


def convert_children(module: nn.Module, settings: ConvertSettings, path: str = "") -> None:
    """Replace the modules inside ``module``; all are made before the first is replaced in its parent.

    Raises:
        ConvertError: a module cannot be converted; names its path.
    """
    replaced: dict[str, nn.Module] = {}
    for name, child in module.named_children():
        where = f"{path}.{name}" if path else name
        if isinstance(child, observe.OBSERVERS):
            replaced[name] = child
            continue
        is_whole = isinstance(child, (fused_module, OpaqueModule)) or observe.mapping_of_whole(child)
        if not is_whole and not _custom_class(child, settings):
            convert_children(child, settings, where)
        with whole_inside(child, where):
            replaced[name] = convert_module(child, settings, where)
    # The same module may stand under several names.
    by_identity = {id(child): replaced[name] for name, child in module.named_children()}
    for name, standing in list(module._modules.items()):
        if standing is not None:
            module._modules[name] = by_identity[id(standing)]


def convert_module(module: nn.Module, settings: ConvertSettings, path: str) -> nn.Module:
    """Return what replaces ``module``, or ``module`` itself.

    Raises:
        ConvertError: the module cannot be converted.
    """
    kind = type_before_parametrizations(module)
    if getattr(module, "qconfig", None) is None:
        if not list(module.children()):
            settings.decisions.append(Decision(path, kind.__name__, Action.FLOAT, "its qconfig is None"))
        return module
    custom_class = _custom_class(module, settings)
    if custom_class is not None or isinstance(module, OpaqueModule):
        result = _converted_custom(module, custom_class, settings, path)
    elif kind in settings.mapping:
        result = _converted_by(settings.mapping[kind], module, settings, path)
    else:
        result = module
    if result is not module:
        hand_hooks_on(module, result, observe.HOOKS)  # They are called with values on a grid.
        devices = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
        if len(devices) == 1:
            result.to(next(iter(devices)))
        result.training = module.training
    if result is module and (mapping := observe.mapping_of_whole(module)):
        settings.decisions.append(Decision(path, kind.__name__, Action.FLOAT, observe.UNMAPPED + mapping))
    elif result is not module or not list(module.children()):
        settings.decisions.append(_decision(result, kind, path))
    return result


def _decision(module: nn.Module, kind: type[nn.Module], path: str) -> Decision:
    if isinstance(module, qdq_modules.OnGrid) and not module.has_seen_data:
        return Decision(path, kind.__name__, Action.SHARED, "only scalars: computes on the grid of its input")
    if isinstance(module, qdq_modules.OnGrid):
        details = {name: getattr(module.output, name) for name in ("dtype", "scale", "zero_point")}
        return Decision(path, kind.__name__, Action.QUANTIZED, "by its qconfig", details)
    if isinstance(module, qdq_modules.DeQuantize):
        return Decision(path, kind.__name__, Action.SHARED, "hands floats out")
    is_kept = type(module) is kind and not isinstance(module, OpaqueModule)
    reason = "computes on the grid of its input" if is_kept else "by its qconfig"
    return Decision(path, kind.__name__, Action.SHARED if is_kept else Action.QUANTIZED, reason)


def _custom_class(module: nn.Module, settings: ConvertSettings) -> Any:
    classes = [type_before_parametrizations(module), getattr(module, "opaque_observed_class", None)]
    return next((settings.custom_modules[item] for item in classes if item in settings.custom_modules), None)


def _converted_custom(
    module: nn.Module, quantized_class: Any, settings: ConvertSettings, path: str
) -> nn.Module:
    handler = handler_of(module)
    if handler is None or not isinstance(module, OpaqueModule):
        if str(quantized_class.__module__).startswith(LEGACY_QUANTIZED):
            # The user's model has torch.ao's quantizable module itself. Its class's from_observed calls
            # torch.ao's convert, whose modules compute only on quantized tensors.
            convert_children(module, settings, path)
            for name in ("in_proj_weight", "in_proj_bias"):
                module._parameters.pop(name, None)
            module.__class__ = quantized_class
            return module
        result: nn.Module = quantized_class.from_observed(module)
        return result
    # torchao's convert makes random example inputs of its own.
    with draws_kept():
        converted = handler.convert(ConvertRequest(module, quantized_class, path, ()))
    keep_custom_results(converted)
    return converted


def _converted_by(target: Any, module: nn.Module, settings: ConvertSettings, path: str) -> nn.Module:
    """Return the module that ``target``, a class of the mapping, stands for."""
    if not str(getattr(target, "__module__", "")).startswith(LEGACY_QUANTIZED):
        if not hasattr(target, "from_float"):
            raise ConvertError.of("TQ905.no_from_float", target=target, path=path)
        result: nn.Module = target.from_float(module)
        return result
    name = target.__name__
    if name in KEPT_FLOAT:
        observe.forget_observers(module)
        return module
    cls = qdq_modules.CLASSES.get(name)
    if cls is None or ".dynamic" in target.__module__:
        raise ConvertError.of("TQ905.no_counterpart", module=target.__module__, name=name, path=path)
    if issubclass(cls, qdq_modules.DeQuantize):
        return cls()
    if issubclass(cls, (qdq_modules.Embedding, qdq_modules.EmbeddingBag)):
        return _table(cls, module, settings, path)
    observer = getattr(module, observe.OBSERVER, None)
    if observer is None:
        raise ConvertError.of("TQ905.no_observer", path=path)
    output = qdq_modules.observed_qparams(observer, path)
    if issubclass(cls, qdq_modules.Weighted):
        result = _weighted(cls, module, settings, path)
    elif issubclass(cls, (qdq_modules.Quantize, qdq_modules.QFunctional)):
        result = cls()
    else:
        result = _function(cls, module)
    vars(result).update(output=output, place=path, has_seen_data=path not in settings.without_data)
    return result


def _weighted(
    cls: type[qdq_modules.Weighted], module: nn.Module, settings: ConvertSettings, path: str
) -> qdq_modules.Weighted:
    """Return a module with the weight of ``module`` on the qparams of its qconfig, or of its training."""
    source: Any = module
    if is_parametrized(source):
        for name in list(source.parametrizations):
            remove_parametrizations(source, name)
    trained = getattr(source, "weight_fake_quant", None)
    after: Any = None
    if trained is None and isinstance(source, nn.Sequential):
        after = source[1] if len(source) > 1 else None
        source = source[0]
    weight, bias = source.weight, source.bias
    if trained is not None and hasattr(source, "bn"):
        norm = source.bn
        fuse: Any = fuse_linear_bn_weights if issubclass(cls, qdq_modules.Linear) else fuse_conv_bn_weights
        statistics = norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias
        weight, bias = fuse(weight, bias, *statistics)
    observer = source.qconfig.weight() if trained is None else trained
    if (loaded := vars(module).get(WEIGHT_QPARAMS)) is not None:
        hold_qparams(observer, *loaded)
    is_observed_before = settings.as_trained and trained is not None
    if not is_observed_before and not is_on_loaded_qparams(observer, weight):
        with torch.no_grad():
            observer.to(weight.device)(weight)
    if plain_dtype(observer.dtype) is not torch.int8:
        raise ConvertError.of("TQ905.weight_dtype", path=path, dtype=observer.dtype)
    result = cls()
    result.take(source, weight, observer)
    result.register_buffer("float_bias", None if bias is None else bias.detach().clone(), persistent=False)
    if cls.__name__ == "LinearLeakyReLU":
        result.after = functools.partial(F.leaky_relu, negative_slope=after.negative_slope)
    return result


def _function(cls: type[nn.Module], module: nn.Module) -> nn.Module:
    """Return ``module`` as an instance of ``cls``, with its parameters, buffers and settings."""
    observe.forget_observers(module)
    source: Any = module[0] if isinstance(module, nn.Sequential) else module
    result = cls.__new__(cls)
    vars(result).update(vars(source))
    for name in ("_modules", "_parameters", "_buffers"):
        vars(result)[name] = dict(vars(source)[name])
    hooks = {name: value for name, value in vars(nn.Module()).items() if name.endswith("_hooks")}
    vars(result).update(hooks)
    if cls.__name__ == "PReLU":
        observer = source.qconfig.weight()
        if "channel" in str(observer.qscheme):  # torch.ao's PReLU has one scale, and fails.
            observer = MinMaxObserver()
        observer(source.weight)
        scale, zero_point = observer.calculate_qparams()
        values = torch.round(source.weight.detach() / scale) + zero_point
        values = (values.clamp(0, 255) - zero_point) * scale
        result._parameters["weight"] = nn.Parameter(values, requires_grad=False)
    return result.eval()


def _table(cls: Any, module: Any, settings: ConvertSettings, path: str) -> nn.Module:
    trained = getattr(module, "weight_fake_quant", None)
    observer = module.qconfig.weight() if trained is None else trained
    if observer.qscheme is not torch.per_channel_affine_float_qparams:
        raise ConvertError.of("TQ905.embedding_scheme", path=path, qscheme=observer.qscheme)
    if not settings.as_trained or trained is None:
        with torch.no_grad():
            observer(module.weight)
    result = cls()
    result.take(module, module.weight, observer)
    result.place = path
    return result  # type: ignore[no-any-return]
