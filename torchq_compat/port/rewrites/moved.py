"""Rewrite names that only moved, however imported: functions and classes to the modules of this package or of
torchao that have them; ``torch.quantization`` and related namespaces to ``torch.ao``; modules that torch has
removed, such as ``torch.ao.quantization.quantize_pt2e``, to torchao's; PT2E's prepare and convert to
``torchq_compat.pt2e``.

Each is a row of its table; where other names of a legacy module stay, the rows are guests. The old namespaces
still work and have the same objects, so only files that use FX graph mode are rewritten.
"""

from collections.abc import Iterator

import libcst as cst

from torchq_compat.port import names as legacy
from torchq_compat.port.constructs import Edit, ImportRequest, Site
from torchq_compat.port.finders import Finder
from torchq_compat.port.source.fx_calls import uses_fx
from torchq_compat.port.source.imports import MovedNames, moved_modules, why_not_free
from torchq_compat.port.source.parsed import ParsedSource, imported_module
from torchq_compat.port.source.source_tree import installed_lacks

PARTS = tuple(row for row in legacy.MOVED_FUNCTIONS if row.replacement == "torchq_compat.lstm_utils")
FX_ROWS = tuple(row for row in legacy.MOVED_FUNCTIONS if row.replacement == "torchq_compat.quantize_fx")
#: These names never were here, but a docstring of FX says so, and scripts copy it.
FX_PACKAGES = frozenset(row.legacy.rpartition(".")[0] for row in FX_ROWS)
OURS = "torchq_compat.pt2e"
PREPARES = frozenset(
    f"{module}.{name}"
    for module in (f"{legacy.TORCHAO}.quantize_pt2e", OURS)
    for name in ("prepare_pt2e", "prepare_qat_pt2e")
)
MOVED_OBSERVERS = MovedNames("TQ115", (), legacy.PT2E_OBSERVERS)


#: Why observers are left that are in one file with QConfigs.
BESIDE_QCONFIGS = (
    "the file also has QConfigs, which take torch.ao's; the specs of prepare_pt2e take torchao's"
)


def find_functions(source: ParsedSource) -> Iterator[Site]:
    yield from MovedNames("TQ101", FX_ROWS).find(source)
    for _, alias, full in source.names_from():
        package, _, name = full.rpartition(".")
        if package in FX_PACKAGES and name in legacy.FUNCTIONS:
            refusal = f"{package} never had it; import {name} from torchq_compat.quantize_fx"
            yield Site("TQ101", source.start(alias), full, refusal=refusal)


def find_observers(source: ParsedSource) -> Iterator[Site]:
    """Yield observers of torch.ao in a file for PT2E, whose prepare fails on them, or drops them."""
    used = {legacy.new_module(name) or name for name in source.used_names()}
    if not any(f"{name}.".startswith((f"{legacy.TORCHAO}.", f"{OURS}.")) for name in used):
        return
    legacy_configuration = uses_fx(source) or any("qconfig" in name.lower() for name in used)
    if not legacy_configuration:
        yield from MOVED_OBSERVERS.find(source)
    elif PREPARES & used:
        for site in MOVED_OBSERVERS.find(source):
            yield site.settled(BESIDE_QCONFIGS, ())


CLASSES = MovedNames("TQ103", legacy.MOVED_CLASSES[:1], guests=legacy.MOVED_CLASSES[1:])
FX_FUNCTIONS = Finder("TQ101", find_functions)
LSTM_PART_HELPERS = Finder("TQ102", MovedNames("TQ102", PARTS).find)
CUSTOM_CONFIG_CLASSES = Finder("TQ103", CLASSES.find)
QUANTIZE_DYNAMIC = Finder("TQ111", MovedNames("TQ111", (), legacy.EAGER_FUNCTIONS).find)
EAGER_STATIC_MODE = Finder(
    "TQ117", MovedNames("TQ117", (), legacy.EAGER_MODE).find, (*legacy.EAGER_FLOW, *legacy.FUSING)
)
OBSERVERS_IN_PT2E = Finder("TQ115", find_observers)


ONLY_IN_PART = "not everything used of it is under torch.ao"


def find_namespaces(source: ParsedSource) -> Iterator[Site]:
    if not uses_fx(source):
        return
    staying = []

    def now(node: cst.ImportFrom, alias: cst.ImportAlias) -> tuple[str, str] | None:
        module = imported_module(node)
        new = new_namespace(f"{module}.{alias.evaluated_name}")
        if new is None or node.module is None:
            return None
        if any(_is_excluded(use) for use in _attribute_uses(source, node, alias, module)):
            what = f"from {module} import {alias.evaluated_name}"
            staying.append(Site("TQ104", source.start(alias), what, refusal=ONLY_IN_PART))
            return None
        package, _, name = new.rpartition(".")
        return package, name

    yield from moved_modules(source, "TQ104", now, _namespace_import, _namespace_attribute)
    yield from staying


def new_namespace(name: str) -> str | None:
    """Return ``name`` under torch.ao, if it is an old namespace or in one; None otherwise."""
    return None if _is_excluded(name) else legacy.new_module(name, legacy.NAMESPACES)


def _is_excluded(name: str) -> bool:
    is_named = any(f"{name}.".startswith(f"{other}.") for other in legacy.NOT_IN_NAMESPACES)
    return is_named or "._" in f".{name}"


def _namespace_import(source: ParsedSource, node: cst.Import, alias: cst.ImportAlias) -> Iterator[Site]:
    name = alias.evaluated_name
    new = new_namespace(name)
    if new is None:
        return
    site = Site("TQ104", source.start(alias), f"import {name}")
    is_excluded = any(_is_excluded(use) for use in _attribute_uses(source, node, alias, ""))
    edit = source.edit(alias.name, new)
    yield site.settled(ONLY_IN_PART if is_excluded else "", (edit,))


def _attribute_uses(
    source: ParsedSource, node: cst.Import | cst.ImportFrom, alias: cst.ImportAlias, module: str
) -> Iterator[str]:
    """Yield the full names used of an imported namespace."""
    name = alias.evaluated_name
    local = alias.evaluated_alias or name.partition(".")[0]
    for use in source.references(local, node):
        parent = source.parent(use)
        if isinstance(parent, cst.Attribute) and alias.asname is None and not module:
            continue  # import a.b: its uses are dotted, and are sites of their own
        full = f"{module}.{name}" if module else name
        if not isinstance(parent, cst.Attribute):
            yield full
        elif not _is_function_of_fx(f"{full}.{parent.attr.value}", source.parent(parent)):
            yield f"{full}.{parent.attr.value}"


def _is_function_of_fx(module: str, node: cst.CSTNode) -> bool:
    """Return whether ``node`` is a function of ``module`` that another rewrite moves."""
    return isinstance(node, cst.Attribute) and f"{module}.{node.attr.value}" in legacy.LEGACY_NAMES


def _namespace_attribute(source: ParsedSource, node: cst.Attribute) -> Iterator[Site]:
    """Yield the site of a ``torch.quantization`` written out; deeper names keep their ending."""
    code, names = source.code(node), source.names(node)
    if len(names) != 1 or (name := next(iter(names))) not in legacy.NAMESPACES:
        return
    parent = source.parent(node)
    used = f"{name}.{parent.attr.value}" if isinstance(parent, cst.Attribute) else name
    new = new_namespace(used)
    others = (old for old in legacy.NAMESPACES if old != name)
    if new is None or any(used == old or used.startswith(f"{old}.") for old in others):
        return
    site = Site("TQ104", source.start(node), code)
    request = ImportRequest("torch", offset=source.start(node))
    edit = source.edit(node, legacy.NAMESPACES[name])
    yield site.settled(why_not_free(source, request), (edit,), (request,))


NAMESPACE = Finder("TQ104", find_namespaces)


CODE, CODE_OF_PT2E = "TQ112", "TQ120"
OF_PT2E = frozenset(row.legacy for row in legacy.MOVED_PT2E)


def find_removed(source: ParsedSource) -> Iterator[Site]:
    for node in source.nodes(cst.ImportFrom):
        new = legacy.new_module(imported_module(node)) if isinstance(node.names, cst.ImportStar) else None
        if new is not None and node.module is not None:
            edit = source.edit(node.module, new)
            yield Site(CODE, source.start(node), f"from {imported_module(node)}", edits=(edit,))
    yield from moved_modules(source, CODE, _now, _removed_import, _removed_attribute)
    yield from MovedNames(CODE, (), guests=legacy.MOVED_OF_EXPORTED).find(source)


def _now(node: cst.ImportFrom, alias: cst.ImportAlias) -> tuple[str, str] | None:
    """Return the module and the name of an imported name now; None if it did not move."""
    module, name = imported_module(node), alias.evaluated_name
    new, full = legacy.new_module(module), f"{module}.{name}"
    if module in OF_PT2E and name in legacy.PT2E_FUNCTIONS:
        return None  # The other rewrite moves it.
    if full in legacy.REMOVED:
        package, _, last = legacy.REMOVED[full].rpartition(".")
        return package, last
    return None if new is None else _home_of(new, name)


def _home_of(module: str, name: str) -> tuple[str, str]:
    """Return the module and the name of what ``module``, the successor of a removed one, should have."""
    is_elsewhere = name in legacy.NAMES_ELSEWHERE and installed_lacks(module, name)
    return legacy.NAMES_ELSEWHERE[name] if is_elsewhere else (module, name)


def _removed_import(source: ParsedSource, node: cst.Import, alias: cst.ImportAlias) -> Iterator[Site]:
    name = alias.evaluated_name
    new = legacy.new_module(name)
    if new is None:
        return
    site = Site(CODE, source.start(alias), f"import {name}")
    edits = [source.edit(alias.name, new)]
    if alias.asname is not None:
        uses = (source.parent(use) for use in source.references(alias.evaluated_alias or "", node))
        for use in uses:
            if not isinstance(use, cst.Attribute) or use.attr.value in legacy.PT2E_FUNCTIONS:
                continue
            home, now = _home_of(new, use.attr.value)
            if reason := installed_lacks(new, now if home == new else use.attr.value):
                yield site.settled(reason, ())
                return
            if now != use.attr.value:
                edits.append(source.edit(use.attr, now))
    yield site.settled("", edits)


def _removed_attribute(source: ParsedSource, node: cst.Attribute) -> Iterator[Site]:
    """Yield the site of a removed module written out as a dotted name; the rest of the name is kept."""
    code, start = source.code(node), source.start(node)
    is_inside = isinstance(source.parent(node), cst.Attribute)
    if is_inside or legacy.new_module(code) is None or source.written_names(node) != {code}:
        return
    names = code.split(".")
    prefixes = [".".join(names[:count]) for count in range(1, len(names) + 1)]
    site = Site(CODE, start, next(prefix for prefix in prefixes if legacy.new_module(prefix)))
    # A submodule may have moved to a module of its own.
    old = [prefix for prefix in prefixes if prefix in legacy.REMOVED][-1]
    new, behind = legacy.REMOVED[old], names[old.count(".") + 1 :]
    while behind and not installed_lacks(f"{new}.{behind[0]}"):
        old, new, behind = f"{old}.{behind[0]}", f"{new}.{behind[0]}", behind[1:]  # A module further down.
    text = new
    if behind and behind[0] not in legacy.PT2E_FUNCTIONS:
        new, now = _home_of(new, behind[0])
        if reason := installed_lacks(new, now):
            yield site.settled(reason, ())
            return
        old, text = f"{old}.{behind[0]}", f"{new}.{now}"
    request, edit = ImportRequest(new, offset=start), Edit(start, start + len(old.encode()), text)
    yield site.settled(why_not_free(source, request), (edit,), (request,))


def find_pt2e(source: ParsedSource) -> Iterator[Site]:
    old = next(filter(None, (_of_qconfigs(source, call) for call in source.nodes(cst.Call))), "")
    for site in MovedNames(CODE_OF_PT2E, legacy.MOVED_PT2E).find(source):
        yield site.settled(old, site.edits, site.imports)


def _of_qconfigs(source: ParsedSource, call: cst.Call) -> str:
    """Return why ``call`` cannot stay: the first ``prepare_pt2e`` took a QConfigMapping."""
    names = {
        name.rpartition(".")[2] for name in source.names(call.func) if name.rpartition(".")[0] in OF_PT2E
    }
    if len(call.args) > 2 and names and all(name.startswith("prepare") for name in names):
        return "it takes a QConfigMapping: write prepare_pt2e(m, torchq_compat.quantizer_from(mapping))"
    return ""


REMOVED_MODULES = Finder(CODE, find_removed, ("_pt2e", *legacy.NAMES_ELSEWHERE))
PT2E_FLOW = Finder(CODE_OF_PT2E, find_pt2e, ("_quantize_pt2e", *legacy.PT2E_FUNCTIONS))
