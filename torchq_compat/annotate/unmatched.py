"""Warnings about settings that match nothing in a model, which FX ignores silently."""

import difflib
import itertools
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from torch import Tensor, nn
from torch.fx import GraphModule

from torchq_compat.annotate.annotation import op_record
from torchq_compat.annotate.patterns import SourcePartition
from torchq_compat.capture.opaque_calls import OpaqueModule
from torchq_compat.capture.origins import computes_like
from torchq_compat.read.custom_configs import ConvertSettings, PrepareSettings
from torchq_compat.read.qconfig_mappings import OrderRule, QConfigRules
from torchq_compat.support.decisions import Action, Decision
from torchq_compat.support.upstream import FIXED_QPARAMS_OP_TO_OBSERVER, USER_PRESERVED_ATTRIBUTES_KEY

# Warnings about names in a configuration that match nothing in the model, which FX ignores silently.


#: The kind of decisions about rules of a QConfigMapping.
RULE = "qconfig rule"
NO_PATH = "no module of the model has such a path"


def decide_unmatched_rules(model: nn.Module, rules: QConfigRules) -> Iterator[Decision]:
    """Yield a decision about each rule of a QConfigMapping that names nothing in ``model``."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for setting, reason in _names_no_module(rules, modules, "module"):
        yield _unmatched(setting, reason)
    for object_type in rules.object_types:
        # FX's default mappings name methods that tensors do not have, like hardsigmoid.
        if isinstance(object_type, str) and not (
            hasattr(Tensor, object_type) or object_type in FIXED_QPARAMS_OP_TO_OBSERVER
        ):
            reason = f"tensors have no such method{near(object_type, dir(Tensor))}"
            yield _unmatched(f"object_type {object_type!r}", reason)
    for rule in rules.orders:
        yield from _unmatched_order(rule, modules)


def _names_no_module(
    rules: QConfigRules, paths: Collection[str], what: str, but: Collection[str] = ()
) -> Iterator[tuple[str, str]]:
    """Yield the names and patterns of paths, ``but`` those, that none of the ``paths`` has, and why."""
    for name in rules.module_names:
        if name not in paths and name not in but:
            yield f"module_name {name!r}", f"no {what} of the model has such a path{near(name, paths)}"
    for pattern, _ in rules.module_name_regexes:
        if pattern.pattern not in but and not any(map(pattern.match, paths)):
            where = " from its beginning on" if any(map(pattern.search, paths)) else ""
            yield f"module_name_regex {pattern.pattern!r}", f"no module path matches it{where}"


def _unmatched_order(rule: OrderRule, modules: dict[str, nn.Module]) -> Iterator[Decision]:
    """Yield a decision if ``rule`` names a module that ``modules`` lacks, or a module class that the module
    lacks. Indices, and functions, are checked in the captured graph."""
    name, kind = rule.module_name, type_name(rule.object_type)
    if name not in modules:
        yield _unmatched(_setting_of(rule), NO_PATH + near(name, modules))
    elif isinstance(rule.object_type, type):
        inside = {type(child) for child in modules[name].children()}
        if rule.object_type not in inside:
            reason = f"the module has no {kind}{near(kind, map(type_name, inside))}"
            yield _unmatched(_setting_of(rule), reason)


def _setting_of(rule: OrderRule) -> str:
    kind = type_name(rule.object_type)
    return f"module_name_object_type_order ({rule.module_name!r}, {kind}, {rule.index})"


def decide_unmatched_settings(model: nn.Module, settings: PrepareSettings) -> Iterator[Decision]:
    """Yield a decision about each entry of a PrepareCustomConfig that names nothing in ``model``."""
    modules = dict(model.named_modules(remove_duplicate=False))
    names = {
        "non_traceable_module_name": settings.kept_float_names,
        "standalone_module_name": settings.standalone_names,
    }
    for setting, paths in names.items():
        for path in paths:
            if path not in modules:
                yield _unmatched(f"{setting} {path!r}", NO_PATH + near(path, modules), "custom config")
    classes = {type(module) for module in modules.values()}
    for setting, expected in _classes_named(settings):
        of_base = setting == "float_to_observed_mapping"
        if not any(result is expected or (of_base and computes_like(result, expected)) for result in classes):
            derived = [match for match in classes if issubclass(match, expected)]
            # Mappings of torch's own classes are written for many models: only ``explain`` reports them.
            is_standing = of_base and expected.__module__.startswith("torch.") and not derived
            decision = _unmatched(
                f"{setting} {expected.__name__}", _no_such_class(expected, classes), "custom config"
            )
            yield replace(decision, warn=not is_standing)
    for name in settings.preserved_attributes:
        if not hasattr(model, name):
            reason = f"the model has no such attribute{near(name, vars(model))}"
            yield _unmatched(f"preserved_attributes {name!r}", reason, "custom config")


def _classes_named(settings: PrepareSettings) -> Iterator[tuple[str, type[nn.Module]]]:
    for kept in settings.kept_float_classes:
        yield "non_traceable_module_class", kept
    for standalone in settings.standalone_classes:
        yield "standalone_module_class", standalone
    for mapping in settings.float_to_observed.values():
        for float_class, observed in mapping.items():
            # The default config maps every class that this package has an observed class for.
            if not observed.__module__.startswith("torchq_compat."):
                yield "float_to_observed_mapping", float_class


def _no_such_class(expected: type[nn.Module], classes: set[type[nn.Module]]) -> str:
    if derived := sorted(result.__name__ for result in classes if issubclass(result, expected)):
        return (
            "no module of the model is of that very class, as FX wants it; "
            f"{', '.join(derived)} derives from it"
        )
    return "no module of the model is of that class" + near(expected.__name__, map(type_name, classes))


def near(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'conv1'?``, or an empty string if no known name is like ``name``."""
    result = difflib.get_close_matches(name, [other for other in known if other], n=3)
    return f"; did you mean {' or '.join(map(repr, result))}?" if result else ""


def type_name(object_type: object) -> str:
    """Return the name of an object type of a QConfigMapping."""
    return object_type if isinstance(object_type, str) else getattr(object_type, "__name__", str(object_type))


def _unmatched(setting: str, reason: str, kind: str = RULE) -> Decision:
    return Decision(setting, kind, Action.DROPPED, reason, warn=True)


# Warnings about module_name_object_type_order rules that match no call, which FX ignores silently.


def decide_order_rules(partitions: list[SourcePartition], rules: QConfigRules) -> Iterator[Decision]:
    """Yield a decision about each rule whose module makes no call of the rule's type, or too few.

    Rules about a module class that the module lacks are reported by ``annotate.unmatched``.
    """
    callers = {partition.origin.caller for partition in partitions}
    for rule in rules.orders:
        calls = len({partition.call_index for partition in partitions if _is_about(rule, partition)})
        is_absent = not calls and not isinstance(rule.object_type, type) and rule.module_name in callers
        if is_absent or (calls and not 0 <= rule.index < calls):
            kind = type_name(rule.object_type)
            often = f"calls {kind} {calls} times; the index counts from 0" if calls else f"never calls {kind}"
            yield _unmatched(_setting_of(rule), f"the code of that very module {often}")


def _is_about(rule: OrderRule, partition: SourcePartition) -> bool:
    origin = partition.origin
    return origin.caller == rule.module_name and rule.object_type in origin.object_types


# Warnings about names given to convert that match nothing in the prepared model; FX ignores such names.


def unmatched_at_convert(
    prepared: GraphModule, settings: ConvertSettings, before: QConfigRules | None, after: QConfigRules | None
) -> Iterator[str]:
    """Yield a warning about each unused setting of a ConvertCustomConfig or new rule of a QConfigMapping.

    Args:
        before: the rules of prepare, which has warned about them.
        after: the rules given to convert.
    """
    # A mapping names them, or a base class. A float call is converted by its class: all modules are here.
    mapped = (m.opaque_observed_class for m in prepared.modules() if isinstance(m, OpaqueModule))
    observed = {*map(type, prepared.modules()), *(cls for cls in mapped if cls is not None)}
    for mapping in settings.observed_to_quantized.values():
        for observed_class, quantized in mapping.items():
            # Entries that map to torch's classes and ours are standing ones, written for many models.
            is_standing = quantized.__module__.startswith(("torch.", "torchq_compat."))
            if not is_standing and not any(issubclass(item, observed_class) for item in observed):
                yield (
                    f"observed_to_quantized_mapping {observed_class.__name__} is not used: the prepared "
                    "model has no custom module observed as that class."
                )
    kept = prepared.meta.get(USER_PRESERVED_ATTRIBUTES_KEY, {})
    for name in settings.preserved_attributes:
        if name not in kept and not hasattr(prepared, name):
            yield f"preserved_attributes {name!r} is not used: the prepared model has no such attribute."
    if before is not None and after is not None:
        known = {*before.module_names, *(pattern.pattern for pattern, _ in before.module_name_regexes)}
        for setting, reason in _names_no_module(after, _module_paths(prepared), "op", known):
            yield f"{setting} is not used: {reason}."


def _module_paths(prepared: GraphModule) -> set[str]:
    """Return the paths of the modules that ops belong to, and of the modules around them."""
    paths = {""}
    graphs = (module.graph for module in prepared.modules() if isinstance(module, GraphModule))
    for node in itertools.chain.from_iterable(graph.nodes for graph in graphs):
        record = op_record(node)
        parts = record.origin.module_path.split(".") if record is not None else []
        paths.update(".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return paths
