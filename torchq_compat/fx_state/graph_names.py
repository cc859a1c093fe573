"""FX's names of the parameters and observers of a prepared graph.

FX numbers observers in the order in which it makes them, op by op: those of an op's inputs, then that of its
output. Its convert names each scale after the module whose code computed the observed value, or, behind
inputs and ops without a QConfig, after the first reader of the value; scales of the same name are numbered in
the order of the graph.
"""

import copy
import math
import operator
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from torchq_compat.annotate import batch_norm
from torchq_compat.annotate.annotation import OpRecord, op_record
from torchq_compat.annotate.observed_graph import observer_nodes
from torchq_compat.capture.opaque_calls import OpaqueModule
from torchq_compat.capture.origins import callers_of_leaf
from torchq_compat.fx_state import numbered
from torchq_compat.fx_state.states import SCALE_NAME, FxState
from torchq_compat.model.graph_module import QuantizationGraphModule
from torchq_compat.ops import named_parameters_of, those, weight_of
from torchq_compat.read.observers import WeightObserver
from torchq_compat.read.qconfig_mappings import QConfigRules
from torchq_compat.read.qparams import Qparams, release_qparams
from torchq_compat.read.torch_ao_classes import has_fixed_qparams
from torchq_compat.support.graph_nodes import source_of
from torchq_compat.support.upstream import FIXED_QPARAMS_OP_TO_OBSERVER

ATEN = torch.ops.aten
#: Part of the names of what torch.nn.utils.parametrize computes a tensor of.
PARAMETRIZATIONS = ".parametrizations."


def required_by_graph(
    graph_module: GraphModule, state: FxState, rules: QConfigRules | None, prefix: str = ""
) -> numbered.Required:
    """Return what ``graph_module`` wants, apart from the custom modules it calls.

    Args:
        rules: the QConfigMapping that ``graph_module`` was prepared with.
        prefix: the path of the module the graph belongs to, in FX's names, with a trailing dot.
    """
    reader = _GraphReader(graph_module, rules, prefix)
    observers, more, problems = reader.observers(state)
    return numbered.Required(
        tuple(reader.tensors()), observers, tuple(reader.folded()), unused=more, problems=problems
    )


def in_sequential(name: str) -> str:
    """Return the name of a parameter in the first module of a fused pair: ``conv.weight`` becomes
    ``conv.0.weight``."""
    path, _, last = name.rpartition(".")
    return f"{path}.0.{last}" if path else name


@dataclass(frozen=True)
class _ObserverCall:
    """A call of an observer."""

    node: Node
    observer: nn.Module
    #: The op that is given the observed value, if the value is a weight.
    reader: Node | None
    is_module_weight: bool

    @property
    def path(self) -> str:
        return str(self.node.target)

    @property
    def observed(self) -> Node:
        return source_of(self.node)


class _GraphReader:
    def __init__(self, graph_module: GraphModule, rules: QConfigRules | None, prefix: str) -> None:
        self.graph_module = graph_module
        self.rules = rules
        self.prefix = prefix
        record = graph_module.record if isinstance(graph_module, QuantizationGraphModule) else None
        #: Each further path of a module -> its first path, by which FX names the module.
        self.first_path = {
            other: path for path, facts in (record.modules if record else {}).items() for other in facts.also
        }
        self.observer_of = dict(observer_nodes(graph_module))
        self.sites = list(self._sites())
        self.names = self._names_of_parameters()

    def tensors(self) -> Iterator[numbered.RequiredTensor]:
        modules = self.graph_module.named_modules()
        apart = [path for path, module in modules if path and isinstance(module, (OpaqueModule, GraphModule))]
        outside = tuple(f"{path}." for path in {*apart, *(str(node.target) for node in self.observer_of)})
        observers: dict[str, list[_ObserverCall]] = {}
        for entry in self.sites:
            if entry.reader is not None and (weight := _attribute(entry.node)) is not None:
                observers.setdefault(str(weight.target), []).append(entry)
        weight_beside = self._weights_beside_biases()
        for name in self.graph_module.state_dict():
            if name.startswith(outside):
                continue
            sites = observers.get(name, [])
            yield numbered.RequiredTensor(
                name,
                tuple(f"{self.prefix}{item}" for item in self.names.get(name, (name, in_sequential(name)))),
                tuple(dict.fromkeys(site.path for site in sites)),
                is_functional=bool(sites) and not any(site.is_module_weight for site in sites),
                packed_with=weight_beside.get(name),
                is_optional=name.endswith("num_batches_tracked"),
            )

    def observers(
        self, state: FxState
    ) -> tuple[tuple[numbered.RequiredObserver, ...], tuple[str, ...], tuple[str, ...]]:
        """Return the observers, FX's names that have no observer here, and the problems that keep names from
        being known."""
        in_order = [site for site in self.sites if not site.is_module_weight and site.observer.state_dict()]
        prefix_of: dict[Node, str] = {}
        scale_of: dict[Node, str] = {}
        if state.is_converted:
            scale_of, more, problems = self._scale_names(in_order, state)
        else:
            named = state.named_observers_at(self.prefix)
            theirs = named or state.observers_at(self.prefix)
            for site in in_order:
                if (parameter := _attribute(site.node)) is not None:
                    # FX names it after the parameter; its graph has it where Python read the parameter.
                    name = f"{self.prefix}{_flat(str(parameter.target))}_activation_post_process_0"
                    prefix_of |= {site.node: name} if name in named else {}
            unnamed = [site for site in in_order if site.node not in prefix_of]
            theirs = [name for name in theirs if name not in prefix_of.values()]
            ordered = self._in_graph_order(unnamed) if named else unnamed
            result, more, problems = _aligned(ordered, theirs, state, self.prefix)
            prefix_of |= result
        by_path: dict[str, list[_ObserverCall]] = {}
        for site in self.sites:
            by_path.setdefault(site.path, []).append(site)
        expected = tuple(
            numbered.RequiredObserver(
                path,
                tuple(name for site in sites for name in self._prefixes(site, prefix_of)),
                tuple(name for site in sites for name in self._scales(site, scale_of)),
                is_weight=any(site.reader is not None for site in sites),
                kernel=self._kernel_of_join(sites[0]) or _kernel_qparams(sites[0]),
                handed_on=tuple(self._handed_on(sites[0], scale_of)),
                trained_float=all(_is_transposed(site) for site in sites),
            )
            for path, sites in by_path.items()
        )
        return expected, more, problems

    def folded(self) -> Iterator[numbered.FoldedBatchNorm]:
        for norm in batch_norm.describe(self.graph_module):
            # FX trains no batch norm without affine parameters.
            if norm.op is not None and "weight" in norm.names:
                at = f"{self.prefix}{self._module_path(norm.op)}"
                yield numbered.FoldedBatchNorm(
                    norm.names, norm.eps, (f"{at}.bias", f"{at}.0.bias"), norm.bias
                )

    def _sites(self) -> Iterator[_ObserverCall]:
        """Yield the calls of observers in the order in which FX makes its own."""
        seen: set[Node] = set()
        for node in self.graph_module.graph.nodes:
            if node.op in ("placeholder", "get_attr") or node in self.observer_of:
                continue
            weight = weight_of(node)
            if weight is not None and _attribute(weight) is None:
                weight = None
            for argument in node.all_input_nodes:
                if argument in self.observer_of and argument not in seen:
                    seen.add(argument)
                    yield self._site(argument, node if argument is weight else None)
            annotation = node.meta.get(Q_ANNOTATION_KEY)
            for user in node.users if annotation is not None and annotation.output_qspec is not None else ():
                if user in self.observer_of and user not in seen:
                    seen.add(user)
                    yield self._site(user, None)

    def _weights_beside_biases(self) -> dict[str, str]:
        """Return the name of each function's bias -> the name of its weight."""
        result = {}
        for site in self.sites:
            parameters = dict(_parameters(site.reader)) if site.reader is not None else {}
            if not site.is_module_weight and {"weight", "bias"} <= parameters.keys():
                result[str(parameters["bias"].target)] = str(parameters["weight"].target)
        return result

    def _site(self, node: Node, reader: Node | None) -> _ObserverCall:
        record = op_record(reader) if reader is not None else None
        is_module_weight = record is not None and record.origin.is_module_call
        return _ObserverCall(node, self.observer_of[node], reader, is_module_weight)

    def _prefixes(self, site: _ObserverCall, prefix_of: dict[Node, str]) -> Iterator[str]:
        if site.node in prefix_of:
            yield prefix_of[site.node]
        if site.is_module_weight:
            assert site.reader is not None
            path = self._module_path(site.reader)
            yield f"{self.prefix}{path}.weight_fake_quant"
            yield f"{self.prefix}{path}.0.weight_fake_quant"

    def _scales(self, site: _ObserverCall, scale_of: dict[Node, str]) -> Iterator[str]:
        if site.node in scale_of:
            yield scale_of[site.node]
        record = op_record(site.observed)
        if record is not None and record.origin.is_module_call:
            yield f"{self.prefix}{self._path(record)}.scale"

    def _handed_on(self, site: _ObserverCall, scale_of: dict[Node, str]) -> Iterator[str]:
        """Yield the scales of a dropout's input: FX's lowered dropout returns its input and has no scale."""
        if site.observed.target is ATEN.dropout.default:
            sources = {node.target for node in site.observed.all_input_nodes if node in self.observer_of}
            for item in self.sites:
                if item.path in sources:
                    yield from self._scales(item, scale_of)

    def _scale_names(
        self, sites: list[_ObserverCall], state: FxState
    ) -> tuple[dict[Node, str], tuple[str, ...], tuple[str, ...]]:
        """Return the scale of each site, the scales that need no site, and the problems that keep scales from
        being known.

        A lowered model has the names of the reference model, except for scales that its modules hold.
        """
        theirs = state.scales_at(self.prefix)
        given: dict[str, dict[int, str]] = {}
        for name in theirs:
            match = SCALE_NAME.match(name)
            assert match is not None
            given.setdefault(match["prefix"], {})[int(match["index"])] = name
        groups: dict[str, list[_ObserverCall]] = {}
        ordered = self._in_graph_order(sites)
        new = _first_calls(ordered)
        for site in ordered:
            groups.setdefault(f"{self.prefix}{self._scale_prefix(site, state, given)}", []).append(site)
        repeated = _repeated(theirs, state, [name for name in state.scales() if name not in theirs])
        names: dict[Node, str] = {}
        more: list[str] = []
        problems: list[str] = []
        for prefix, members in groups.items():
            of_group = given.pop(prefix, {})
            place = partial(self._place, given=of_group, state=state, new=new)
            laid = _laid(members, place, of_group, repeated, state, is_whole=state.is_reference)
            if laid is None:
                # Use the names that FX would give: the loader reports which of them are missing.
                names |= {site.node: f"{prefix}_scale_{index}" for index, site in enumerate(members)}
                problems.append(
                    f"it has {len(of_group)} scales {prefix}_scale_<n> for {len(members)} values here"
                )
                continue
            result, extra = laid
            more += [of_group[index] for index in sorted(extra)]
            for site in members:
                named = [of_group[index] for index in sorted(result[site.node])]
                if len({state.fingerprint(name) for name in named}) > 1:
                    problems.append(f"{', '.join(named)} cannot be told apart")
                if named:
                    names[site.node] = named[0]
        if (given or problems) and state.is_reference:
            # In a reference model each site has a scale, so the order of the graph pairs them without names.
            aligned = _aligned(ordered, theirs, state, self.prefix)
            return aligned if not aligned[2] or not problems else (names, tuple(more), tuple(problems))
        return names, tuple(more), tuple(problems)

    def _place(
        self, site: _ObserverCall, as_before: bool, given: dict[int, str], state: FxState, new: set[Node]
    ) -> numbered.QuantizedValue[Node]:
        parameter = _attribute(site.node)
        is_packed = site.reader is not None and state.is_lowered
        if parameter is not None:
            expected = self._expected_qparams(site, str(parameter.target), state)
            return numbered.QuantizedValue(
                site.node,
                is_packed,
                mismatch=lambda index: _difference(expected, state.values_of(given[index])),
            )
        record = op_record(site.observed)
        is_held = (
            record is not None
            and record.origin.is_module_call
            and f"{self.prefix}{self._path(record)}.scale" in state.entries
        )
        is_fixed = has_fixed_qparams(site.observer) or self._kernel_of_join(site) is not None
        may_lack = is_packed or is_held or self._passes_on(site) or is_fixed
        return numbered.QuantizedValue(
            site.node, may_lack and state.is_lowered, None if is_fixed else site.node in new, as_before
        )

    def _kernel_of_join(self, site: _ObserverCall) -> tuple[float, int] | None:
        """Return the fixed qparams of the first of the values that ``site`` joins, which FX's join keeps;
        None if they are not fixed, or nothing is joined."""
        if site.observed.target not in those("joins"):
            return None
        observer = self.observer_of.get(site.observed.all_input_nodes[0])
        if observer is None or not has_fixed_qparams(observer):
            return None
        scale, zero_point = observer.calculate_qparams()  # type: ignore[operator]
        return float(scale), int(zero_point)

    def _passes_on(self, site: _ObserverCall) -> bool:
        """Return whether the op shares the observer of its input."""
        return any(
            argument in self.observer_of and argument.target == site.node.target
            for argument in site.observed.all_input_nodes
        )

    def _expected_qparams(self, site: _ObserverCall, name: str, state: FxState) -> Qparams | None:
        """Return the qparams that the observer computes from the value of the parameter in ``state``; None if
        ``state`` has no finite one."""
        names = (f"{self.prefix}{entry}" for entry in self.names.get(name, (name, in_sequential(name))))
        value = next((state.entries[item].value for item in names if item in state.entries), None)
        if not isinstance(value, Tensor) or not bool(value.isfinite().all()):
            return None
        observer = copy.deepcopy(site.observer)
        release_qparams(observer)
        source: Any = getattr(observer, "activation_post_process", observer)
        look = source.observe if isinstance(source, WeightObserver) else source
        look(value.float())
        scale, zero_point = source.calculate_qparams()
        return scale, zero_point

    def _in_graph_order(self, sites: list[_ObserverCall]) -> list[_ObserverCall]:
        order = {node: index for index, node in enumerate(self.graph_module.graph.nodes)}

        def place(site: _ObserverCall) -> float:
            if _attribute(site.node) is None:
                return order[site.node]
            # FX's graph reads a parameter before its first use.
            return min((order[user] for user in site.node.users), default=order[site.node]) - 0.5

        return sorted(sites, key=place)

    def _scale_prefix(self, site: _ObserverCall, state: FxState, scaled: Collection[str]) -> str:
        record = op_record(site.observed)
        if record is not None and self._is_item_of_call(site, record, state):
            callers = callers_of_leaf(site.observed)
            # A caller that returns the results unchanged takes no value out of them.
            takers = [caller for caller in callers if f"{self.prefix}{_flat(caller.module_path)}" in scaled]
            record = replace(record, origin=(takers or callers)[0])
        is_input = site.observed.op == "placeholder" or (
            record is not None and self.rules is not None and record.select(self.rules).qconfig is None
        )
        if is_input or record is None:
            # FX names an input after the first linear function that reads it, or else the first reader.
            records = [op_record(user) for user in site.node.users]
            linear = (item for item in records if item is not None and F.linear in item.origin.object_types)
            record = next(linear, records[0] if records else None)
        path = "" if record is None else self._path(record)
        return _flat(path) + ("_input" if is_input else "")

    def _is_item_of_call(self, site: _ObserverCall, record: OpRecord, state: FxState) -> bool:
        """Return whether the code around a module takes the value out of its results."""
        if not record.origin.is_module_call or self._passes_on(site):
            return False
        path = self._path(record)
        own = (f"{self.prefix}{path}.scale", f"{self.prefix}{_flat(path)}_scale_0")
        if any(name in state.entries for name in own):
            return False
        # A lowered module of one op may have no scale in its state.
        calls = [op_record(node) for node in self.graph_module.graph.nodes]
        of_call = sum(item is not None and item.origin.call == record.origin.call for item in calls)
        return state.is_reference or site.observed.target is operator.getitem or of_call > 1

    def _path(self, record: OpRecord) -> str:
        path = record.origin.module_path.partition("@")[0]
        return self.first_path.get(path, path)

    def _module_path(self, op: Node) -> str:
        record = op_record(op)
        if record is not None and record.origin.is_module_call:
            return self._path(record)
        weight = next((node for name, node in _parameters(op) if name == "weight"), None)
        return "" if weight is None else str(weight.target).rpartition(".")[0]

    def _names_of_parameters(self) -> dict[str, tuple[str, ...]]:
        """Return FX's possible names of each of our parameters that FX may name differently: torchao's
        folding and FX's fused modules rename parameters."""
        names: dict[str, tuple[str, ...]] = {}
        for node in self.graph_module.graph.nodes:
            record = op_record(node)
            if record is None or not record.origin.is_module_call or node.target is ATEN.batch_norm.default:
                continue
            path = self._path(record)
            for role, parameter in _parameters(node):
                own = str(parameter.target)
                if PARAMETRIZATIONS in own:
                    continue  # The module's weight is computed of it.
                # FX's state has a parameter that several modules share once for each of them.
                of_module = (f"{path}.{role}", f"{path}.0.{role}", own, in_sequential(own))
                names[own] = tuple(dict.fromkeys((*names.get(own, ()), *of_module)))
        for norm in batch_norm.describe(self.graph_module):
            path = "" if norm.op is None else self._module_path(norm.op)
            counter = norm.names["running_mean"].replace("running_mean", "num_batches_tracked")
            for role, own in {**norm.names, "num_batches_tracked": counter}.items():
                names[own] = (own, in_sequential(own), f"{path}.bn.{role}")
        return names


def _is_transposed(site: _ObserverCall) -> bool:
    return site.is_module_weight and site.reader is not None and site.reader.target in those("transposed")


def _kernel_qparams(site: _ObserverCall) -> tuple[float, int] | None:
    """Return the fixed qparams of the result of FX's kernel, which do not depend on what its model observed;
    None if the kernel has none."""
    record = op_record(site.observed)
    kinds = record.origin.object_types if record is not None and site.reader is None else ()
    result = (
        FIXED_QPARAMS_OP_TO_OBSERVER.get(kind) for kind in kinds if kind not in (nn.Sigmoid, nn.Softmax)
    )
    observer = next((item for item in result if item is not None), None)
    if observer is None:
        return None
    scale, zero_point = observer().calculate_qparams()
    return float(scale), int(zero_point)


def _first_calls(sites: list[_ObserverCall]) -> set[Node]:
    """Return the node of the first site of each observer."""
    first: dict[str, Node] = {}
    return {site.node for site in sites if first.setdefault(site.path, site.node) is site.node}


def _laid(
    sites: list[_ObserverCall],
    place: Callable[[_ObserverCall, bool], numbered.QuantizedValue[Node]],
    names: dict[int, str],
    repeated: set[str],
    state: FxState,
    *,
    is_whole: bool,
) -> tuple[dict[Node, set[int]], set[int]] | None:
    """Align ``sites`` with FX's numbered ``names``; ``place`` is given whether the site before has the same
    observer."""
    befores = (None, *(site.path for site in sites))
    places = [place(site, site.path == before) for site, before in zip(sites, befores, strict=False)]
    prints = {index: state.fingerprint(name) for index, name in names.items()}
    numbers = {
        index: numbered.Number(name in repeated, prints.get(index - 1) == prints[index])
        for index, name in names.items()
    }
    return numbered.laid_beside(places, numbers, is_whole)


def _repeated(names: list[str], state: FxState, beside: Collection[str] = ()) -> set[str]:
    """Return those of ``names`` whose content equals that of an earlier one or of one of ``beside``."""
    seen = {state.fingerprint(name) for name in beside}
    result = set()
    for name in names:
        content = state.fingerprint(name)
        if content in seen:
            result.add(name)
        seen.add(content)
    return result


def _difference(expected: Qparams | None, qparams: Qparams | None) -> float:
    """Return a distance between two qparams, at most 10; infinity if their numbers of channels differ, 0 if
    either is None."""
    if expected is None or qparams is None:
        return 0.0
    (scale, zero_point), (other, other_zero_point) = expected, qparams
    if scale.numel() != other.numel():
        return math.inf
    far = (scale.reshape(-1).double() / other.reshape(-1).double()).log().abs().mean()
    far += (zero_point.reshape(-1).double() - other_zero_point.reshape(-1).double()).abs().mean() / 256
    return min(float(far.nan_to_num(10.0)), 10.0)


def _aligned(
    sites: list[_ObserverCall], theirs: list[str], state: FxState, prefix: str
) -> tuple[dict[Node, str], tuple[str, ...], tuple[str, ...]]:
    """Return FX's name for the node of each site, the names without a site, and the problems.

    FX observes some ops that torch.export drops, such as ``contiguous()`` of a contiguous tensor; their
    observer is the one of their input.
    """
    if state.is_converted and not state.is_reference:
        return {}, (), ()
    if len(theirs) == len(sites):
        return {site.node: name for site, name in zip(sites, theirs, strict=True)}, (), ()
    where = prefix.removesuffix(".") or "the model itself"
    problem = f"it has {len(theirs)} observers in {where} where this model has {len(sites)}"
    prints = [state.fingerprint(name) for name in theirs]
    new, repeated = _first_calls(sites), _repeated(theirs, state)

    def place(site: _ObserverCall, as_before: bool) -> numbered.QuantizedValue[Node]:
        return numbered.QuantizedValue(site.node, is_new=site.node in new, as_before=as_before)

    laid = _laid(sites, place, dict(enumerate(theirs)), repeated, state, is_whole=True)
    if laid is None:
        return {}, (), () if state.is_converted and not theirs else (problem,)
    result, extra = laid
    if any(len({prints[index] for index in of_place}) > 1 for of_place in result.values()):
        return {}, (), (problem,)
    return {node: theirs[min(of)] for node, of in result.items()}, tuple(theirs[i] for i in sorted(extra)), ()


def _flat(path: str) -> str:
    """Return the path of a module as FX has it in the name of a scale."""
    return path.replace(".", "_")


def _attribute(node: Node) -> Node | None:
    """Return the parameter that the observer called by ``node`` observes, perhaps scaled for a batch norm;
    None if there is none, or if ``node`` calls no observer."""
    source = node.args[0] if node.op == "call_module" else None
    if isinstance(source, Node) and source.target is ATEN.mul.Tensor:
        scale = source.args[1]
        source = source.args[0] if isinstance(scale, Node) and scale.target is ATEN.reshape.default else None
    return source if isinstance(source, Node) and source.op == "get_attr" else None


def _parameters(op: Node) -> Iterator[tuple[str, Node]]:
    """Yield the (role, get_attr node) pairs of the parameters that ``op`` is given."""
    for role, node in named_parameters_of(op).items():
        source = node
        while (
            source.op not in ("get_attr", "placeholder") and source.args and isinstance(source.args[0], Node)
        ):
            source = source.args[0]
        if source.op == "get_attr":
            yield role, source
