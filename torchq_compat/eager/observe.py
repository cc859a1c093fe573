"""Prepare of eager mode: observers as submodules of the user's own modules, by their qconfigs.

Legacy: ``torch.ao.quantization.prepare`` and ``prepare_qat``. The names of the observers, and so the
keys of the state_dict, are theirs: ``conv.activation_post_process.min_val``.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from torchq_compat.capture.opaque_calls import OpaqueModule
from torchq_compat.custom_modules import handler_of
from torchq_compat.eager.quantize_dynamic import ModuleSpec, propagated_qconfigs
from torchq_compat.eager.users_model import note_call
from torchq_compat.errors import ConfigError
from torchq_compat.modules.registry import ObserveRequest, handlers
from torchq_compat.modules.swap import NO_MAPPING
from torchq_compat.read.qspecs import OpSpecs
from torchq_compat.support import torch_ao
from torchq_compat.support.decisions import Action, Decision
from torchq_compat.support.user_warnings import warn_user

OBSERVER = "activation_post_process"
UNMAPPED = f"{NO_MAPPING}; float_to_observed_custom_module_class takes "
#: The hooks of a prepared model. Those that observe are torch.ao's own, whose convert leaves them out.
HOOKS = (torch_ao.observe_result, torch_ao.observe_input, note_call)
#: The classes of observers; torchao's are registered as torch.ao's.
OBSERVERS = (torch_ao.ObserverBase, torch_ao.FakeQuantizeBase)
ClassMapping = Mapping[type[nn.Module], Any]


@dataclass(frozen=True)
class ObserveSettings:
    """What prepare was given.

    Attributes:
        observed_types: the types of modules without submodules that are observed.
        observed_whole: the types of modules that are observed though they have submodules.
        custom_modules: float class -> observed class.
    """

    observed_types: Collection[Any]
    observed_whole: Collection[Any]
    custom_modules: ClassMapping


def set_qconfigs(model: nn.Module, spec: ModuleSpec, left_out: Collection[Any] = ()) -> None:
    """Set ``qconfig`` of every module: its own, or else that of its type, its path or its parent in ``spec``.

    Args:
        left_out: the names and types of modules whose insides are left as they are.

    Raises:
        ConfigError: a qconfig is no QConfig.
    """
    qconfigs = dict(propagated_qconfigs(model, spec))
    for path, qconfig in qconfigs.items():
        if qconfig is not None and not isinstance(qconfig, torch_ao.QConfig):
            raise ConfigError.of("TQ905.qconfig_type", path=path or "the model", qconfig=qconfig)
    inside: tuple[str, ...] = ()
    for path, module in model.named_modules():
        if path and (path.rpartition(".")[2] in left_out or type(module) in left_out):
            inside = (*inside, f"{path}.")
        if not f"{path}.".startswith(inside):
            module.qconfig = qconfigs[path]


def tell_if_unasked(model: nn.Module, function: str, done: str) -> bool:
    """Warn that ``function`` changes nothing if no module of ``model`` has a qconfig; return whether so.
    ``done`` says what nothing is: observed, or quantized."""
    is_unasked = not any(getattr(module, "qconfig", None) for module in model.modules())
    if is_unasked:
        warn_user("TQ424", function=function, done=done)
    return is_unasked


def observe(model: nn.Module, settings: ObserveSettings) -> list[Decision]:
    """Add observers to the modules of ``model``, and replace its custom modules by observed ones; return a
    decision about each module without submodules.

    Raises:
        ConfigError: an observer cannot be made.
        CustomModuleError: an observed class does not do what the mapping requires of it.
    """
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())} - {torch.device("meta")}
    device = next(iter(devices)) if len(devices) == 1 else None
    tell_if_unasked(model, "prepare", "observed")
    _observe(model, "", settings, device)
    model.register_forward_pre_hook(note_call, with_kwargs=True)
    return list(_decisions(model))


def _decisions(model: nn.Module) -> Iterator[Decision]:
    above: str | None = None
    for path, module in model.named_modules():
        if above is not None and path.startswith(above):
            continue
        observer = getattr(module, OBSERVER, None)
        is_observed = isinstance(observer, OBSERVERS) or isinstance(module, OpaqueModule)
        mapping = mapping_of_whole(module)
        is_shown = is_observed or mapping or not list(module.children())
        if not path or isinstance(module, OBSERVERS) or not is_shown:
            continue
        above = f"{path}."
        kind = type_before_parametrizations(module).__name__
        if mapping and getattr(module, "qconfig", None) is not None:
            yield Decision(path, kind, Action.FLOAT, UNMAPPED + mapping, warn=True)
        elif is_observed:
            details = {"observer": type(observer).__name__, "dtype": observer.dtype} if observer else {}
            yield Decision(path, kind, Action.QUANTIZED, "by its qconfig", details)
        elif getattr(module, "qconfig", None) is None:
            yield Decision(path, kind, Action.FLOAT, "its qconfig is None")
        else:
            hands_out = isinstance(module, torch_ao.DeQuantStub)
            reason = "hands floats out" if hands_out else "computes on the grid of its input"
            yield Decision(path, kind, Action.SHARED, reason)


def _observe(module: nn.Module, path: str, settings: ObserveSettings, device: torch.device | None) -> None:
    for name, child in list(module.named_children()):
        kind: Any = type_before_parametrizations(child)
        where = f"{path}.{name}" if path else name
        qconfig = getattr(child, "qconfig", None)
        if kind is nn.Dropout:
            continue
        if issubclass(kind, (torch_ao.FloatFunctional, torch_ao.QFunctional)):
            if qconfig is not None:
                setattr(child, OBSERVER, qconfig.activation().to(device=device))
        elif isinstance(child, torch_ao.fused_module) or kind in settings.observed_whole:
            _insert(child, device)
        elif child.training and kind in torch_ao.DEFAULT_MODULE_TO_ACT_POST_PROCESS:
            _insert(child, device, torch_ao.DEFAULT_MODULE_TO_ACT_POST_PROCESS[kind])
        elif qconfig is not None and kind in settings.custom_modules:
            setattr(module, name, _observed_custom(child, where, settings.custom_modules[kind], device))
        elif not mapping_of_whole(child):
            _observe(child, where, settings, device)
    is_leaf = not any(name != "parametrizations" for name, _ in module.named_children())
    # torch.ao's AdaRound has weight_fake_quant beside the weight.
    if is_leaf or hasattr(module, "weight_fake_quant"):
        kind = type_before_parametrizations(module)
        is_one = not isinstance(module, nn.Sequential) and not mapping_of_whole(module)
        if kind in settings.observed_types and is_one:
            _insert(module, device)


def mapping_of_whole(module: nn.Module) -> str:
    """Return what would map ``module``, if it stays float as a whole unless it is mapped: its results are
    nested, or it reads the weights of a module inside and does not call it. Empty for all others."""
    reads_weights = isinstance(
        getattr(module, "out_proj", None), nn.modules.linear.NonDynamicallyQuantizableLinear
    )
    if isinstance(module, OpaqueModule) or not (
        reads_weights or type(module).forward.__module__.startswith("torch.nn.")
    ):
        return ""
    hints = (handler.mapping_hint(module) for handler in handlers())
    return next(filter(None, hints), "").rpartition("(")[2].rstrip(")").replace(", ", ": ")


def _insert(module: nn.Module, device: torch.device | None, constructor: Any = None) -> None:
    qconfig = getattr(module, "qconfig", None)
    if qconfig is None or isinstance(module, torch_ao.DeQuantStub):
        return
    forget_observers(module)
    observer = (constructor or qconfig.activation)().to(device=device)
    module.add_module(OBSERVER, observer)
    inner = getattr(observer, OBSERVER, observer)
    # Qparams that follow each input are those of the input, not of the result.
    if getattr(inner, "is_dynamic", False) or getattr(inner, "averaging_constant", None) == 1:
        module.register_forward_pre_hook(torch_ao.observe_input, prepend=True)
    else:
        module.register_forward_hook(torch_ao.observe_result, prepend=True)


def _observed_custom(
    module: nn.Module, path: str, observed_class: type[nn.Module], device: torch.device | None
) -> nn.Module:
    """Return the observed module of a custom one: of a known kind by its handler, else by its own class."""
    qconfig: Any = module.qconfig
    kind = type_before_parametrizations(module)
    for handler in handlers():
        if not handler.is_fallback and handler.takes(kind, observed_class):
            request = ObserveRequest(module, path, observed_class, qconfig, OpSpecs(qconfig))
            observed = handler.observe(request)
            observed.opaque_observed_class = observed_class
            observed.qconfig = qconfig
            return observed
    result = observed_class.from_float(module)  # type: ignore[attr-defined]
    if not isinstance(result, nn.Module):
        raise ConfigError.of(
            "TQ905.observed_class", observed_class=observed_class.__name__, result=result, path=path
        )
    if handler_of(result) is None:
        _insert(result, device)
    return result


def forget_observers(module: nn.Module) -> None:
    """Remove the observer of the results of ``module``, and the hooks that call it."""
    if isinstance(getattr(module, OBSERVER, None), OBSERVERS):
        delattr(module, OBSERVER)
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        for key in [key for key, hook in hooks.items() if hook in HOOKS]:
            del hooks[key]
