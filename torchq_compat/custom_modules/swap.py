"""Swap custom modules: decide which modules become leaf calls, then put the leaf calls in.

Deciding and changing are two functions; the model that is changed is the package's own copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from torchq_compat.custom_modules.leaf_op import CaptureSession
from torchq_compat.custom_modules.registry import CustomModuleHandler, ObserveRequest, handlers
from torchq_compat.decisions import Action, Decision
from torchq_compat.legacy.backend_configs import BackendTable
from torchq_compat.legacy.custom_configs import PrepareSettings
from torchq_compat.legacy.qconfig_mappings import QConfigRules
from torchq_compat.specs.quantization_specs import OpSpecs
from torchq_compat.specs.selectors import select_for_module

__all__ = ["Swap", "apply_swaps", "decide_swaps"]


@dataclass(frozen=True)
class Swap:
    """One module that becomes a leaf call.

    Attributes:
        paths: where the module stands; the first is its path in the graph, the others are aliases.
        request: how to observe it, or None to leave it float behind an opaque call.
    """

    module: nn.Module
    paths: tuple[str, ...]
    handler: CustomModuleHandler
    request: ObserveRequest | None


def decide_swaps(
    model: nn.Module, rules: QConfigRules, settings: PrepareSettings, backend: BackendTable
) -> tuple[list[Swap], list[Decision]]:
    """Which modules of ``model`` become leaf calls, and the decisions about those that stay float."""
    swaps: list[Swap] = []
    decisions: list[Decision] = []
    for module, paths in _modules_with_paths(model):
        path = paths[0]
        if _inside(paths, swaps):
            continue
        handler, request, reason = _find(module, path, rules, settings, backend)
        if handler is not None:
            swaps.append(Swap(module, paths, handler, request))
            decisions.append(Decision(path, type(module).__name__, Action.QUANTIZED, reason))
            continue
        remedy = next((r for h in handlers() if (r := h.remedy(module)) is not None), None)
        if remedy is not None:
            decisions.append(_left_float(module, path, rules, reason, remedy))
        opaque = next((h for h in handlers() if h.is_opaque(module)), None)
        if opaque is not None:
            swaps.append(Swap(module, paths, opaque, None))
    return swaps, decisions


def apply_swaps(model: nn.Module, swaps: list[Swap], session: CaptureSession) -> None:
    """Put a leaf caller in the place of every swapped module of ``model``."""
    for swap in swaps:
        fake_call = swap.handler.fake_call(swap.module, swap.paths[0])
        caller = session.add(swap.paths[0], swap.module, fake_call)
        for path in swap.paths:
            model.set_submodule(path, caller)


def _modules_with_paths(model: nn.Module) -> Iterator[tuple[nn.Module, tuple[str, ...]]]:
    paths: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if path:
            paths.setdefault(module, []).append(path)
    for module, found in paths.items():
        yield module, tuple(found)


def _inside(paths: tuple[str, ...], swaps: list[Swap]) -> bool:
    """Whether a module is reached only through custom modules: what is in them is theirs."""
    outer = tuple(f"{path}." for swap in swaps for path in swap.paths)
    return all(path.startswith(outer) for path in paths)


def _find(
    module: nn.Module, path: str, rules: QConfigRules, settings: PrepareSettings, backend: BackendTable
) -> tuple[CustomModuleHandler | None, ObserveRequest | None, str]:
    """The handler that quantizes ``module``, what it is asked for, and why; or why there is none."""
    selection = select_for_module(rules, type(module), path)
    if selection.qconfig is None:
        return None, None, f"its qconfig is None ({selection.rule})"
    specs = OpSpecs(selection.qconfig)
    mapped = settings.float_to_observed.get(specs.quant_type, {}).get(type(module))
    request = ObserveRequest(module, path, mapped or type(module), selection.qconfig, specs)
    if mapped is not None:
        handler = next(h for h in handlers() if h.takes(type(module), mapped))
        return handler, request, f"custom module {mapped.__name__}, qconfig from {selection.rule}"
    unmapped = next((h for h in handlers() if h.takes_unmapped(module, specs, backend)), None)
    if unmapped is not None:
        return unmapped, request, f"the backend quantizes it dynamically, qconfig from {selection.rule}"
    kind = specs.quant_type.name.lower()
    return None, None, f"no custom-module mapping for its class and a {kind} qconfig"


def _left_float(module: nn.Module, path: str, rules: QConfigRules, reason: str, remedy: str) -> Decision:
    wanted = select_for_module(rules, type(module), path).qconfig is not None
    return Decision(
        path,
        type(module).__name__,
        Action.FLOAT,
        f"{reason}; {remedy}" if wanted else reason,
        warn=wanted,
    )
