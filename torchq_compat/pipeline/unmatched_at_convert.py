"""Warnings about names given to convert that match nothing in the prepared model; FX ignores such names."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.fx import GraphModule

from torchq_compat.annotate.op_records import op_record
from torchq_compat.capture.unmatched_rules import near
from torchq_compat.config.custom_configs import ConvertSettings
from torchq_compat.config.qconfig_mappings import QConfigRules
from torchq_compat.opaque_calls.opaque_module import OpaqueModule
from torchq_compat.support.upstream import USER_PRESERVED_ATTRIBUTES_KEY

__all__ = ["unmatched_at_convert"]


def unmatched_at_convert(
    prepared: GraphModule, settings: ConvertSettings, before: QConfigRules | None, after: QConfigRules | None
) -> Iterator[str]:
    """Yield a warning about each unused setting of a ConvertCustomConfig or new rule of a QConfigMapping.

    Args:
        before: the rules of prepare, which has warned about them.
        after: the rules given to convert.
    """
    observed = _observed_classes(prepared)
    for mapping in settings.observed_to_quantized.values():
        for observed_class, quantized in mapping.items():
            # Entries that map to torch's classes and ours are standing ones, written for many models.
            is_standing = quantized.__module__.startswith(("torch.", "torchq_compat."))
            if not is_standing and not any(issubclass(each, observed_class) for each in observed):
                yield (
                    f"observed_to_quantized_mapping {observed_class.__name__} is not used: the prepared "
                    "model has no custom module observed as that class."
                )
    kept = prepared.meta.get(USER_PRESERVED_ATTRIBUTES_KEY, {})
    for name in settings.preserved_attributes:
        if name not in kept and not hasattr(prepared, name):
            yield f"preserved_attributes {name!r} is not used: the prepared model has no such attribute."
    if before is not None and after is not None:
        yield from _new_rules(_module_paths(prepared), before, after)


def _observed_classes(prepared: GraphModule) -> set[type[nn.Module]]:
    """Return the classes that a mapping may name, directly or by a base class; see
    ``CustomModuleHandler.quantized_class``.

    All modules are included, because a float call is converted by its class; see ``convert_float_calls``.
    """
    observed: set[type[nn.Module]] = {type(module) for module in prepared.modules()}
    mapped = (m.opaque_observed_class for m in prepared.modules() if isinstance(m, OpaqueModule))
    return observed | {cls for cls in mapped if cls is not None}


def _new_rules(paths: set[str], before: QConfigRules, after: QConfigRules) -> Iterator[str]:
    for name in after.module_names.keys() - before.module_names.keys() - paths:
        yield f"module_name {name!r} is not used: no op of the model has such a path{near(name, paths)}."
    known = {pattern.pattern for pattern, _ in before.module_name_regexes}
    for pattern, _ in after.module_name_regexes:
        if pattern.pattern not in known and not any(pattern.match(path) for path in paths):
            yield f"module_name_regex {pattern.pattern!r} is not used: no module path matches it."


def _module_paths(prepared: GraphModule) -> set[str]:
    """Return the paths of the modules that ops belong to, and of the modules around them."""
    paths = {""}
    for node in prepared.graph.nodes:
        record = op_record(node)
        parts = record.origin.module_path.split(".") if record is not None else []
        paths.update(".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return paths
