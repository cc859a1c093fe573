"""Swaps custom modules: decides which modules become opaque calls, then inserts the opaque calls.

One function decides, another changes the model, which is the package's own copy.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchq_compat.capture.opaque_stub import StubRegistry
from torchq_compat.capture.origins import computes_like, is_fx_leaf
from torchq_compat.codes import said
from torchq_compat.model.graph_module import record_of
from torchq_compat.modules.registry import CustomModuleHandler, ObserveRequest, handlers
from torchq_compat.modules.user_shapes import is_users_own
from torchq_compat.read.backend_configs import BackendTable
from torchq_compat.read.custom_configs import PrepareSettings
from torchq_compat.read.qconfig_mappings import QConfigRules, select_for_module
from torchq_compat.read.qspecs import OpSpecs
from torchq_compat.support.decisions import Action, Decision
from torchq_compat.support.torch_ao import NoopObserver, QConfig

CONVERTED = "converted already: it runs as it is, in one call, with floats at its ends"
SCRIPTED = said("TQ402")
NO_MAPPING = "no custom-module mapping for its class"
NO_QUANTIZATION: Any = QConfig(activation=NoopObserver, weight=NoopObserver)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Swap:
    """One module that becomes an opaque call.

    Attributes:
        paths: the module's paths; the first is its path in the graph, the others are aliases.
        request: how to observe the module; None to leave it float in an opaque call.
    """

    module: nn.Module
    paths: tuple[str, ...]
    handler: CustomModuleHandler
    request: ObserveRequest | None


def decide_swaps(
    model: nn.Module,
    rules: QConfigRules,
    settings: PrepareSettings,
    backend: BackendTable,
    untraced_because: str = "",
) -> tuple[list[Swap], list[Decision]]:
    """Return which modules of ``model`` become opaque calls, and the decisions about those that stay float.

    Args:
        untraced_because: why modules of torch.nn that FX does not trace are not traced here; empty if they
            are.
    """
    swaps: list[Swap] = []
    decisions: list[Decision] = []
    paths_of: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths_of.setdefault(module, []).append(path)
    del paths_of[model]
    for module, names in paths_of.items():
        paths, outer = tuple(names), tuple(f"{path}." for swap in swaps for path in swap.paths)
        if all(path.startswith(outer) for path in paths):
            continue  # It is reached only through custom modules, whose handlers decide about it.
        swap, decision = _decide(module, paths, rules, settings, backend)
        if swap is None and untraced_because and is_untraced_in_fx(module, backend):
            mapped = {kind for mapping in settings.float_to_observed.values() for kind in mapping}
            ignored = sorted({type(item).__name__ for item in module.modules() if type(item) in mapped})
            reason, code = untraced_because, ""
            if ignored:
                reason = f"{reason.rstrip('.')}; mapped, and float all the same: {', '.join(ignored)}"
                code = "TQ401"
            swap, decision = _left_whole(module, paths, reason, code)
        swaps.extend(filter(None, [swap]))
        decisions.extend(filter(None, [decision]))
    return swaps, decisions


def _decide(
    module: nn.Module,
    paths: tuple[str, ...],
    rules: QConfigRules,
    settings: PrepareSettings,
    backend: BackendTable,
) -> tuple[Swap | None, Decision | None]:
    """Return the swap of ``module``, if it becomes an opaque call, and the decision to show about it, if
    any."""
    path, kind = paths[0], type(module).__name__
    named = {*settings.kept_float_classes, *settings.kept_float_names}
    if not named.isdisjoint((type(module), *paths)) and not is_fx_leaf(module):
        # FX never traces modules of torch.nn anyway.
        reason = "non_traceable: never quantized inside" if record_of(module) is None else CONVERTED
        return _left_whole(module, paths, reason)
    if isinstance(module, torch.jit.ScriptModule):
        return _left_whole(module, paths, SCRIPTED, "TQ402")
    handler, request, reason = _find(module, path, rules, settings, backend)
    if handler is not None:
        return Swap(module, paths, handler, request), Decision(path, kind, Action.QUANTIZED, reason)
    expected = select_for_module(rules, type(module), path).qconfig is not None
    is_mapped = any(type(module) in classes for classes in settings.float_to_observed.values())
    if is_mapped and not is_fx_leaf(module):  # FX traces no class that is mapped, whatever its qconfig.
        decision = Decision(path, kind, Action.FLOAT, reason, warn=expected)
        return Swap(module, paths, _fallback(), None), decision
    opaque = next((h for h in handlers() if h.is_opaque(module)), None)
    if is_users_own(module):
        opaque = _fallback()
    swap_of_opaque = None if opaque is None else Swap(module, paths, opaque, None)
    hint = next((r for h in handlers() if (r := h.mapping_hint(module)) is not None), None)
    if hint is None:
        return swap_of_opaque, None
    if expected and hint and reason == NO_MAPPING:
        reason = f"{reason}; {hint}"
    return swap_of_opaque, Decision(path, kind, Action.FLOAT, reason, warn=expected)


def is_untraced_in_fx(module: nn.Module, backend: BackendTable) -> bool:
    """Return whether ``module`` is a composite one of torch.nn, such as a TransformerEncoder, which FX leaves
    float in one call."""
    is_composite = next(module.children(), None) is not None
    return is_composite and is_fx_leaf(module) and backend.find((type(module),)) is None


def _left_whole(
    module: nn.Module, paths: tuple[str, ...], reason: str, code: str = ""
) -> tuple[Swap, Decision]:
    """Leave ``module`` float as one call; with a ``code``, that is warned about."""
    decision = Decision(paths[0], type(module).__name__, Action.FLOAT, reason, warn=bool(code), code=code)
    return Swap(module, paths, _fallback(), None), decision


def apply_swaps(model: nn.Module, swaps: list[Swap], stubs: StubRegistry) -> None:
    """Replace every swapped module of ``model`` by a capture stub."""
    for swap in swaps:
        fake_call = swap.handler.fake_call(swap.module, swap.paths[0])
        caller = stubs.add(swap.paths[0], swap.module, fake_call)
        for path in swap.paths:
            model.set_submodule(path, caller)


def _fallback() -> CustomModuleHandler:
    return next(handler for handler in handlers() if handler.is_fallback)


def _find(
    module: nn.Module, path: str, rules: QConfigRules, settings: PrepareSettings, backend: BackendTable
) -> tuple[CustomModuleHandler | None, ObserveRequest | None, str]:
    """Return the handler that quantizes ``module``, its request and the reason; or None, None and the reason
    why there is none."""
    holder = next((h for h in handlers() if h.holds_model(module)), None)
    if holder is not None:
        request = ObserveRequest(module, path, type(module), NO_QUANTIZATION, OpSpecs(NO_QUANTIZATION))
        return holder, request, "its step is prepared as a model of its own, by the same rules"
    selection = select_for_module(rules, type(module), path)
    standalone = settings.standalone_names.get(path) or settings.standalone_classes.get(type(module))
    if standalone is not None:
        # If no qconfig is selected for the module, one that quantizes nothing: its own mapping decides.
        qconfig = selection.qconfig or NO_QUANTIZATION
        request = ObserveRequest(module, path, type(module), qconfig, OpSpecs(qconfig), standalone)
        own = "of its own" if standalone.rules is not None else f"from {selection.rule}"
        handler = next(h for h in handlers() if h.carries_standalone)
        return handler, request, f"standalone module, qconfig {own}"
    if selection.qconfig is None:
        return None, None, f"its qconfig is None ({selection.rule})"
    specs = OpSpecs(selection.qconfig)
    mapping = settings.float_to_observed.get(specs.quant_type, {})
    mapped = mapping.get(type(module)) or _mapping_of_base(module, mapping)
    request = ObserveRequest(module, path, mapped or type(module), selection.qconfig, specs)
    if mapped is not None:
        handler = next(h for h in handlers() if h.takes(type(module), mapped))
        return handler, request, f"custom module {mapped.__name__}, qconfig from {selection.rule}"
    unmapped = next((h for h in handlers() if h.takes_unmapped(module, specs, backend)), None)
    if unmapped is not None:
        why = "the backend quantizes it dynamically" if specs.is_dynamic else "the model was built with it"
        return unmapped, request, f"{why}, qconfig from {selection.rule}"
    for kind, classes in settings.float_to_observed.items():
        if type(module) in classes:
            is_of, is_for = specs.quant_type.name.lower(), kind.name.lower()
            return None, None, f"its qconfig is {is_of} and its class is mapped for {is_for} qconfigs"
    return None, None, NO_MAPPING


def _mapping_of_base(
    module: nn.Module, mapping: Mapping[type[nn.Module], type[nn.Module]]
) -> type[nn.Module] | None:
    """Return the observed class mapped for a base class of torch.nn that ``module`` computes like: a user's
    subclass or a parametrized module, without its own ``forward``."""
    for base in type(module).__mro__[1:]:
        if base in mapping and computes_like(type(module), base) and "forward" not in vars(module):
            known = next(h for h in handlers() if h.takes(base, mapping[base]))
            return None if known.is_fallback else mapping[base]
    return None
