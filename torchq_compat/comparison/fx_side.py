"""FX's side of a comparison: the only module of this package that calls the FX engine."""

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.overrides import TorchFunctionMode

from torchq_compat.codes import error_line
from torchq_compat.comparison import sides
from torchq_compat.comparison.cases import Case
from torchq_compat.comparison.our_side import KeyFacts
from torchq_compat.modules.parts import PartKind
from torchq_compat.port.running.redirections import calling_fx
from torchq_compat.read.qparams import PerTensorQParams, QParams
from torchq_compat.support import quantized_tensors, torch_ao
from torchq_compat.support.graph_nodes import module_at
from torchq_compat.support.upstream import pytree

# Find the places of our graphs in FX's graphs, and read the values there. Only reads FX's results.


#: Name of an op in an exported graph -> its name in FX's graph.
SYNONYMS = {
    "iadd": "add",
    "imul": "mul",
    "add_": "add",
    "mul_": "mul",
    "relu_": "relu",
    "hardtanh_": "hardtanh",
    "view": "reshape",
    "truediv": "div",
    "clip": "clamp",
    "concat": "cat",
    "floordiv": "floor_divide",
    "upsample_nearest2d": "interpolate",
    "upsample_bilinear2d": "interpolate",
}
PART_FUNCTIONS = {PartKind.ADD: torch.add, PartKind.MUL: torch.mul, PartKind.TANH: torch.tanh}


def observe_places(
    prepared: GraphModule, reference: GraphModule, places: Mapping[sides.Key, KeyFacts]
) -> tuple[sides.Run, Callable[[Any], tuple[QParams | None, ...]]]:
    """Return a function that runs ``reference``, and a function that returns the qparams of the tensors of a
    result, after the run that gave it.

    Taps are inserted into ``reference``.
    """
    outputs = pytree.tree_leaves(reference.graph.output_node().args[0])
    eager = _LastCalls()
    taps = sides.tap_nodes(dict(_nodes(prepared, reference, places)))
    taps |= _module_taps(reference, places, eager)
    sources = [_source_of_dequantize(node) for node in outputs]
    source_taps = sides.tap_nodes({node: (reference, node) for node in sources if node is not None})
    run_with_taps = sides.runner(reference, taps, lambda key, passes: _reading(passes))
    last_qparams: list[QParams | None] = []

    def run(batch: tuple[Any, ...]) -> tuple[Any, Mapping[sides.Key, sides.Reading]]:
        with eager:
            result, readings = run_with_taps(batch)
        last_qparams[:] = [_last_qparams(source_taps[node]) if node is not None else None for node in sources]
        return pytree.tree_map_only(Tensor, quantized_tensors.as_float, result), readings

    def output_qparams(result: Any) -> tuple[QParams | None, ...]:
        leaves = pytree.tree_leaves(result)
        return tuple(g for g, leaf in zip(last_qparams, leaves, strict=True) if isinstance(leaf, Tensor))

    return run, output_qparams


def _nodes(
    prepared: GraphModule, reference: GraphModule, places: Mapping[sides.Key, KeyFacts]
) -> Iterator[tuple[sides.Key, tuple[GraphModule, Node]]]:
    """Yield every key with the graph and the node that holds its value."""
    for key, node in _op_nodes(prepared, reference).items():
        if key in places:
            yield key, (reference, node)
    for cell_path, parts in _parts_by_cell(places).items():
        cell = module_at(reference, cell_path)
        if isinstance(cell, GraphModule):
            for part, node in _part_nodes(cell, parts):
                yield part, (cell, _value_node(node))


def _op_nodes(prepared: GraphModule, reference: GraphModule) -> dict[sides.Key, Node]:
    scopes = prepared.meta["_observed_graph_module_attrs"].node_name_to_scope
    quantized = {node.name for node in prepared.graph.nodes if _has_quantized_output(node)}
    seen: Counter[tuple[str, str]] = Counter()
    matches: dict[sides.Key, Node] = {}
    for node in reference.graph.nodes:
        name = _function_name(node)
        if name is None:
            continue
        path = str(node.target) if node.op == "call_module" else scopes.get(node.name, ("", None))[0]
        key = sides.OpKey(path, name, seen[path, name])
        seen[path, name] += 1
        matches[key] = _value_node(_end_of_chain(node, quantized)) if node.name in quantized else node
    return matches


def _has_quantized_output(node: Node) -> bool:
    constructor = node.meta.get("target_dtype_info", {}).get("output_act_obs_or_fq_ctr")
    return constructor is not None and constructor().dtype is not torch.float32


def _end_of_chain(node: Node, quantized: set[str]) -> Node:
    """Return the last node of a fused chain of functions such as add + relu, inside which nothing is
    quantized."""
    while len(node.users) == 1:
        (user,) = node.users
        if user.name not in quantized or user.target is quantized_tensors.QUANTIZE_FUNCTION:
            break
        node = user
    return node


def _function_name(node: Node) -> str | None:
    """Return the function that an op node calls, empty for a module; None if the node is not an op of the
    model."""
    if node.op == "call_module":
        return ""
    if node.op == "call_method" and node.target != "dequantize":
        return SYNONYMS.get(str(node.target), str(node.target))
    if node.op == "call_function" and node.target not in quantized_tensors.QUANTIZE_FUNCTIONS:
        name = str(getattr(node.target, "__name__", node.target))
        return SYNONYMS.get(name, name)
    return None


def _value_node(node: Node) -> Node:
    """Return the quantize after ``node``; ``node`` itself if there is none."""
    return next((user for user in node.users if user.target is quantized_tensors.QUANTIZE_FUNCTION), node)


def _parts_by_cell(places: Mapping[sides.Key, KeyFacts]) -> dict[str, list[tuple[sides.PartKey, PartKind]]]:
    matches: dict[str, list[tuple[sides.PartKey, PartKind]]] = {}
    for key, place in places.items():
        if isinstance(key, sides.PartKey) and place.part_kind is not None:
            matches.setdefault(key.cell, []).append((key, place.part_kind))
    return matches


def _part_nodes(
    cell: GraphModule, parts: list[tuple[sides.PartKey, PartKind]]
) -> Iterator[tuple[sides.Key, Node]]:
    """Yield the parts of a cell that FX traced: modules by name, functions in the order of computation."""
    modules = {str(node.target): node for node in cell.graph.nodes if node.op == "call_module"}
    functions = {
        kind: iter([node for node in cell.graph.nodes if node.target is function])
        for kind, function in PART_FUNCTIONS.items()
    }
    for key, kind in parts:
        node = modules.get(key.part) or next(functions.get(kind, iter(())), None)
        if node is not None:
            yield key, node


class _LastCalls(TorchFunctionMode):
    """The parts that eager cells compute by calling a function, not a module: the last call in a pass."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[Any, Any] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in PART_FUNCTIONS.values():
            self._last[func] = result
        return result

    def tap(self, cell: nn.Module, function: Any) -> sides.Tap:
        """Return a tap for the call of ``function``; it is filled each time ``cell`` has run."""
        tap = sides.Tap()

        def keep(*_: Any) -> None:
            tap(self._last.pop(function, None))

        cell.register_forward_hook(keep)
        return tap


def _module_taps(
    reference: GraphModule, places: Mapping[sides.Key, KeyFacts], calls: _LastCalls
) -> dict[sides.Key, sides.Tap]:
    """Return the taps of cells that FX left as eager modules, and of the results of custom modules."""
    taps: dict[sides.Key, sides.Tap] = {}
    for key, place in places.items():
        if isinstance(key, sides.ResultKey) and (module := module_at(reference, key.path)) is not None:
            taps[key] = sides.tap_module(module, key.position)
        elif isinstance(key, sides.PartKey):
            cell, part = module_at(reference, key.cell), module_at(reference, f"{key.cell}.{key.part}")
            if cell is None or isinstance(cell, GraphModule):
                continue
            if part is not None:
                # A QFunctional is never called, but its result goes through its activation_post_process.
                taps[key] = sides.tap_module(getattr(part, "activation_post_process", part))
            elif place.part_kind in PART_FUNCTIONS:
                taps[key] = calls.tap(cell, PART_FUNCTIONS[place.part_kind])
    return taps


def _source_of_dequantize(node: Any) -> Node | None:
    """Return the node that the dequantize ``node`` reads; None if ``node`` is not a dequantize."""
    if isinstance(node, Node) and node.op == "call_method" and node.target == "dequantize":
        source = node.args[0]
        return source if isinstance(source, Node) else None
    return None


def _last_qparams(tap: sides.Tap) -> QParams | None:
    passes = tap.take()
    return _reading(passes[-1:]).qparams if passes else None


def _reading(passes: list[Tensor]) -> sides.Reading:
    values = [quantized_tensors.as_float(value) for value in passes]
    return sides.Reading(
        values[0] if len(values) == 1 else torch.stack(values), PerTensorQParams.of_tensor(passes[0])
    )


# FX's side: the only module of this package that calls the FX engine.
#
# The library never calls it. ``compare`` shows the result of FX for a model, so it has to run FX; it imports
# this module for that, and goes on without it if FX cannot run the model.


OURS = "torchq_compat."


def quantize_by_fx(case: Case, places: Mapping[sides.Key, KeyFacts]) -> sides.QuantizedModel:
    """Prepare, calibrate and convert a copy of ``case.model`` with FX, to be measured at ``places``.

    Classes of this package in a float-to-observed mapping become torch.ao's own; torch.ao's mapping to
    quantized classes is added if the script gives none.

    Raises:
        ImportError: this torch has no FX engine.
        Exception: any exception that FX raises.
    """
    fx = torch_ao.fx_engine()
    observed, quantized = _custom_configs(case)
    with calling_fx(), warnings.catch_warnings(action="ignore"):
        prepare = fx.prepare_qat_fx if case.is_qat else fx.prepare_fx
        model = case.as_trained() if case.is_qat else copy.deepcopy(case.model).eval()
        settings = copy.deepcopy(case.qconfig_mapping), case.example_inputs, observed
        prepared = prepare(model, *settings, backend_config=case.backend_config).eval()
        if case.fx_state is not None:
            prepared.load_state_dict(case.fx_state)
        case.calibrate(prepared)
        # Quantized custom modules run kernels in the reference, too: what they lose by saturating is no
        # decision of FX. qnnpack's sum exactly.
        inexact = quantized is not None and quantized_tensors.sums_saturate()
        can_be_exact = "qnnpack" in torch.backends.quantized.supported_engines
        with quantized_tensors.using_engine("qnnpack") if inexact and can_be_exact else nullcontext():
            reference = fx.convert_to_reference_fx(
                copy.deepcopy(prepared), quantized, backend_config=case.backend_config
            )
        deployed, error = None, ""
        try:  # The lowered model, as the script would ship it.
            lowered = fx.convert_fx(copy.deepcopy(prepared), quantized)
            with torch.no_grad():
                lowered(*case.example_inputs)
            deployed = lowered
        except Exception as cause:
            error = error_line(cause)
        run, output_qparams = observe_places(prepared, reference, places)
    return sides.QuantizedModel(run, output_qparams, deployed, error)


def _custom_configs(
    case: Case,
) -> tuple[torch_ao.PrepareCustomConfig | None, torch_ao.ConvertCustomConfig | None]:
    """Return the configurations with torch.ao's own mapping for classes that they map to classes of this
    package, and for observed classes that they do not map."""
    prepare, convert = case.prepare_custom_config, case.convert_custom_config
    if isinstance(prepare, dict):
        prepare = torch_ao.PrepareCustomConfig.from_dict(prepare)
    if isinstance(convert, dict):
        convert = torch_ao.ConvertCustomConfig.from_dict(convert)
    if prepare is None:
        return None, convert
    known: Any = torch_ao.get_default_custom_config_dict()  # type: ignore[no-untyped-call]
    prepare, mapped = copy.deepcopy(prepare), False
    for classes in prepare.float_to_observed_mapping.values():
        mapped = mapped or bool(classes)
        for float_class, observed in classes.items():
            if observed.__module__.startswith(OURS):
                own = known["float_to_observed_custom_module_class"].get(float_class, observed)
                classes[float_class] = own
    if convert is None and not mapped:
        return prepare, None
    convert = copy.deepcopy(convert) or torch_ao.ConvertCustomConfig()
    given = {key: to for item in convert.observed_to_quantized_mapping.values() for key, to in item.items()}
    for observed, quantized in known["observed_to_quantized_custom_module_class"].items():
        if observed not in given or given[observed].__module__.startswith(OURS):
            convert.set_observed_to_quantized_mapping(observed, quantized)
    return prepare, convert
