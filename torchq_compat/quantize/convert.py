"""Convert: turns a calibrated or trained model into its q-dq form."""

import copy
from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from torchq_compat.annotate import observed_graph
from torchq_compat.annotate.annotation import op_record
from torchq_compat.annotate.unmatched import unmatched_at_convert
from torchq_compat.capture import opaque_calls
from torchq_compat.capture.torch_export import copied_inputs
from torchq_compat.capture.training import training_flag
from torchq_compat.capture.trial_runs import kept_buffers, run_prepared, sqnr
from torchq_compat.custom_modules import handler_of
from torchq_compat.errors import ConfigError, ConvertError
from torchq_compat.model import graph_module
from torchq_compat.model.other_tools import unguard
from torchq_compat.model.quantized_boundary import quantize_boundaries
from torchq_compat.model.quantized_interface import expose_integers, return_flat
from torchq_compat.modules.parts import PartOwner
from torchq_compat.modules.registry import ConvertRequest, CustomModuleHandler
from torchq_compat.modules.user_modules import convert_float_calls
from torchq_compat.ops import draws, those, weight_of
from torchq_compat.quantize.float_model import are_never_updated
from torchq_compat.quantize.passes import CONVERT, carries_out, run_passes
from torchq_compat.read import qconfig_mappings
from torchq_compat.read.backend_configs import BackendTable
from torchq_compat.read.custom_configs import ConvertSettings
from torchq_compat.read.qspecs import OpSpecs
from torchq_compat.support import metadata
from torchq_compat.support.argument_checks import listed
from torchq_compat.support.decisions import Action, Decision
from torchq_compat.support.dtypes import plain_dtype
from torchq_compat.support.graph_nodes import give_back_freed, position_of, source_of, tensors_in
from torchq_compat.support.process_state import TURNS, draws_kept, without_code
from torchq_compat.support.sharded import converting_together, is_sharded, make_whole, whole_inside
from torchq_compat.support.torch_ao import QuantType, qconfig_equals
from torchq_compat.support.upstream import USER_PRESERVED_ATTRIBUTES_KEY
from torchq_compat.support.user_warnings import warn_user

# Ops that were calibrated and stay float because ``convert_fx(qconfig_mapping=...)`` switches them off.
#
# FX's rule: an observer is removed if neither the op before it nor any op behind it is still quantized.


#: Label of an op -> the rule that switched it off.
SwitchedOff = dict[str, str]


def decide_switched_off(
    prepared: GraphModule,
    before: qconfig_mappings.QConfigRules | None,
    after: qconfig_mappings.QConfigRules | None,
) -> SwitchedOff:
    """Return the ops of ``prepared`` that had a QConfig under the rules ``before`` and have none under
    ``after``, if that is given.

    Raises:
        ConfigError: ``after`` gives an op another QConfig, or switches a custom module off; or prepare was
            given a Quantizer.
    """
    if after is None:
        return {}
    if before is None:
        raise ConfigError.of("TQ910.quantizer_at_convert")
    qconfig_mappings.check_convert_rules(before, after)
    switched_off: SwitchedOff = {}
    for node in prepared.graph.nodes:
        record = op_record(node)
        if record is None:
            continue
        was, now = record.select(before), record.select(after)
        if now.qconfig is None and was.qconfig is not None:
            if node.op == "call_module":
                raise ConfigError.of("TQ910.custom_module_none", label=record.label, rule=now.rule)
            switched_off[record.label] = now.rule
        elif now.qconfig is not None and not qconfig_equals(was.qconfig, now.qconfig):
            raise ConfigError.of("TQ910.other_qconfig", label=record.label, rule=now.rule)
    return switched_off


def remove_observers(prepared: GraphModule, switched_off: SwitchedOff) -> None:
    """Remove the observers from ``prepared`` that no quantized op needs any more."""

    def is_float(node: Node) -> bool:
        record = op_record(node)
        return node.op in ("placeholder", "output", "get_attr") or (
            record is not None and record.label in switched_off
        )

    removed = set[str]()
    for node, _ in list(observed_graph.observer_nodes(prepared)):
        source = source_of(node)
        # The producer of a weight does not count: in QAT the weight is computed from that of a batch norm.
        is_weight = any(weight_of(user) is node for user in node.users)
        neighbours = [*node.users] if is_weight else [source, *node.users]
        if all(is_float(neighbour) for neighbour in neighbours):
            node.replace_all_uses_with(source)
            prepared.graph.erase_node(node)
            removed.add(str(node.target))
    # torch's delete_all_unused_submodules would delete observers inside of opaque modules, too.
    for path in removed - {str(node.target) for node, _ in observed_graph.observer_nodes(prepared)}:
        prepared.delete_submodule(path)
    prepared.recompile()


# Observers that the script replaced or removed after prepare: which of them count, as FX counts them.
#
# FX has observers of activations in the graph and observes weights at convert, by the QConfig; here those of
# weights are in the graph too. A loop that replaces or removes all observers means those of activations.


UNSIGNED = (torch.uint8, torch.uint16)


def settle_observers(
    working: GraphModule, record: graph_module.ModelRecord
) -> tuple[observed_graph.ObservedPlace, ...]:
    """Make every observer in ``working`` one that convert knows; return the places that lost theirs.

    Observers of weights that the script replaced or removed are put back, except after training, where FX has
    them too.
    """
    adopted = observed_graph.adopt_observers(working)
    if not record.is_qat and record.rules is not None:
        _restore_weight_observers(working, record.rules, record.observed, adopted)
    if record.is_qat and record.rules is not None:
        _warn_of_activations_on_weights(working, record.observed, adopted)
    there = {place.target for place in observed_graph.observed_places(working)}
    removed = tuple(place for place in record.observed if place.target not in there)
    if removed:
        names = [f"{place.target} ({place.op or 'no op'})" for place in removed]
        warn_user("TQ404", count=len(removed), observers=listed(names))
    return removed


def with_removed_observers(
    decisions: tuple[Decision, ...],
    removed: Collection[observed_graph.ObservedPlace],
    observed: Collection[observed_graph.ObservedPlace],
) -> tuple[Decision, ...]:
    """Return ``decisions`` with the ops as float that have no observer left, and the reason for all that lost
    one."""
    lost: dict[str, list[str]] = {}
    for place in removed:
        lost.setdefault(place.op, []).append(place.target)
    left = {place.op for place in observed if place not in removed}
    return tuple(
        replace(
            decision,
            action=decision.action if decision.path in left else Action.FLOAT,
            reason=f"{decision.reason}; {', '.join(lost[decision.path])} removed from the prepared model",
        )
        if decision.path in lost and decision.action is Action.QUANTIZED
        else decision
        for decision in decisions
    )


def _warn_of_activations_on_weights(
    working: GraphModule, observed: Collection[observed_graph.ObservedPlace], adopted: Collection[str]
) -> None:
    """Warn about weights that the script gave an observer of unsigned integers, which are for activations."""
    replaced = [
        f"{place.target} ({place.op})"
        for place in observed
        if place.is_weight
        and place.target in adopted
        and plain_dtype(working.get_submodule(place.target).dtype) in UNSIGNED  # type: ignore[arg-type]
    ]
    if replaced:
        warn_user("TQ330", observers=listed(replaced))


def _restore_weight_observers(
    working: GraphModule,
    rules: qconfig_mappings.QConfigRules,
    observed: Collection[observed_graph.ObservedPlace],
    adopted: Collection[str],
) -> None:
    there = {place.target for place in observed_graph.observed_places(working)} - set(adopted)
    weights = {place.target for place in observed if place.is_weight and place.target not in there}
    restored = []
    for node in working.graph.nodes:
        if node.op != "call_module" or node.target not in weights:
            continue
        records = [result for result in map(op_record, node.users) if result is not None]
        qconfig = records[0].select(rules).qconfig if records else None
        spec = None if qconfig is None else OpSpecs(qconfig).weight
        if spec is not None:
            working.set_submodule(str(node.target), spec.observer_or_fake_quant_ctr())
            restored.append(f"{node.target} ({records[0].label})")
    if restored:
        warn_user("TQ319", observers=listed(restored))


# The decisions about ops that convert with the qparams of their observers, as FX converts trained models.


FROM_OBSERVER = "with its observer's qparams and the dtype's range, as in FX, not those it trained with"
KEEPS_TRAINED = "its parts keep the qparams they trained with"


def _with_observer_qparams(decision: Decision, changed: Collection[str], owners: Collection[str]) -> Decision:
    """Return ``decision`` with the reason why qparams are not, or are, those of the training.

    Args:
        changed: the paths of ops whose qparams or ranges differ from those they trained with.
        owners: the paths of trained custom modules with parts.
    """
    if decision.action not in (Action.QUANTIZED, Action.SHARED):
        return decision
    if decision.path in owners and not decision.node:
        return replace(decision, reason=f"{decision.reason}; {KEEPS_TRAINED}")
    if decision.path in changed:
        return replace(decision, reason=f"{decision.reason}; {FROM_OBSERVER}")
    return decision


# Convert: turns a calibrated or trained model into its q-dq form.


def convert_to_reference(
    prepared: GraphModule,
    settings: ConvertSettings,
    rules: qconfig_mappings.QConfigRules | None = None,
    backend: BackendTable | None = None,
    *,
    observer_qparams: bool = False,
    is_inside: bool = False,
) -> graph_module.ConvertedGraphModule:
    """Return the q-dq form of ``prepared``, which stays usable.

    Args:
        rules: a QConfigMapping that gives None to what shall stay float; None means the one of prepare.
        backend: a BackendConfig given to convert, which changes nothing.
        observer_qparams: whether fake-quantizes convert with their observers' qparams and the dtype's
            range, as in FX, instead of those they trained with; parts of custom modules keep those.
        is_inside: whether the model is part of another one, which is given the same settings.

    Raises:
        ConfigError: ``rules`` give what was prepared a QConfig that is neither None nor the one of prepare.
        ConvertError: ``prepared`` did not come from this package's prepare, or has seen NaN or infinity.
        CustomModuleError: a quantized class does not do what the mapping promises.
    """
    _record_of_prepared(prepared)  # Of anything else no weights can be gathered.
    # torchao's convert of a QAT model makes random example inputs of its own.
    with draws_kept(), converting_together(prepared) as parts:
        state = _Converting(prepared, settings, rules, backend, parts, observer_qparams, is_inside)
        run_passes(CONVERT, state, prepared)
    return state.reference


@dataclass
class _Converting:
    """What the passes of convert hand on; see ``CONVERT``."""

    prepared: GraphModule
    settings: ConvertSettings
    rules: qconfig_mappings.QConfigRules | None
    backend: BackendTable | None
    parts: dict[int, Any]
    observer_qparams: bool
    is_inside: bool
    record: graph_module.ModelRecord = field(init=False)
    switched_off: dict[str, str] = field(init=False)
    working: GraphModule = field(init=False)
    removed: tuple[observed_graph.ObservedPlace, ...] = field(init=False)
    owners: tuple[str, ...] = field(init=False)
    converted: GraphModule = field(init=False)
    replaced: dict[str, type[nn.Module]] = field(init=False)
    reference: graph_module.ConvertedGraphModule = field(init=False)


@carries_out(CONVERT, "check what is given")
def _check_given(state: _Converting) -> None:
    state.record = _record_of_prepared(state.prepared)
    if not state.is_inside:
        for warning in unmatched_at_convert(state.prepared, state.settings, state.record.rules, state.rules):
            warn_user("TQ308", what=warning)
    if state.backend is not None and state.backend != state.record.backend:
        warn_user("TQ307", backend=state.backend.name)
    if are_never_updated(state.prepared):
        warn_user("TQ512")
    state.switched_off = decide_switched_off(state.prepared, state.record.rules, state.rules)


@carries_out(CONVERT, "copy the prepared model")
def _copy(state: _Converting) -> None:
    state.working = _working_copy(state.prepared, state.settings, state.parts)
    state.removed = settle_observers(state.working, state.record)
    _check_observers(state.working)
    state.working.eval()
    unguard(state.working)
    return_flat(state.working.graph)
    if state.switched_off:
        remove_observers(state.working, state.switched_off)


@carries_out(CONVERT, "convert custom modules")
def _convert_custom_modules(state: _Converting) -> None:
    if state.observer_qparams and state.record.rules is not None:
        observed_graph.activations_as_observed(state.working)
    state.owners = _convert_opaque_modules(state)
    give_back_freed()


@carries_out(CONVERT, "convert the graph")
def _convert_graph(state: _Converting) -> None:
    state.converted = observed_graph.convert_graph(
        state.working,
        as_fx=state.record.rules is not None,
        is_trained=state.record.is_qat,
        observer_qparams=state.observer_qparams,
    )
    quantize_boundaries(state.converted)
    expose_integers(state.converted, state.record.interface)
    make_whole(state.converted, "")
    state.replaced = convert_float_calls(
        state.converted,
        state.settings.observed_to_quantized,
        lambda path, module: _quant_type(state.record.rules, path, module),
    )


def _quant_type(rules: qconfig_mappings.QConfigRules | None, path: str, module: nn.Module) -> QuantType:
    """Return the kind of the QConfig of a float module; static if it has none."""
    qconfig = None if rules is None else qconfig_mappings.select_for_module(rules, type(module), path).qconfig
    return QuantType.STATIC if qconfig is None else OpSpecs(qconfig).quant_type


@carries_out(CONVERT, "wrap")
def _wrap(state: _Converting) -> None:
    record, prepared = state.record, state.prepared
    decisions = tuple(_told_at_convert(decision, state) for decision in record.decisions)
    decisions = with_removed_observers(decisions, state.removed, record.observed)
    otherwise = metadata.FX_CONVERTS_OTHERWISE.of(state.converted) or ()
    if otherwise and not state.observer_qparams:
        warn_user("TQ511", observers=listed(list(otherwise)))
    if state.observer_qparams:
        owners = state.owners if record.is_qat else ()
        decisions = tuple(_with_observer_qparams(item, otherwise, owners) for item in decisions)
    record = replace(
        record,
        stage=graph_module.Stage.CONVERTED,
        decisions=decisions,
        fx_converts_otherwise=otherwise,
        observer_qparams=state.observer_qparams,
        trial_inputs=None,
    )
    preserved = {
        name: getattr(prepared, name)
        for name in (*prepared.meta[USER_PRESERVED_ATTRIBUTES_KEY], *state.settings.preserved_attributes)
        if hasattr(prepared, name)
    }
    state.reference = graph_module.ConvertedGraphModule.wrap(state.converted, record, preserved)


def _record_of_prepared(model: GraphModule) -> graph_module.ModelRecord:
    record = graph_module.record_of(model)
    if record is None:
        raise ConvertError.of("TQ950.not_prepared_here", model=model)
    if record.stage is not graph_module.Stage.PREPARED:
        raise ConvertError.of("TQ950.stage", stage=record.stage.value)
    return record


def _told_at_convert(decision: Decision, state: _Converting) -> Decision:
    """Return ``decision`` as the settings given to convert change it."""
    rule, cls = state.switched_off.get(decision.path), state.replaced.get(decision.path)
    if decision.node and rule is not None:
        reason = f"its qconfig is None in the mapping given to convert ({rule})"
        return replace(decision, action=Action.FLOAT, reason=reason)
    if not decision.node and cls is not None:
        reason = f"observed_to_quantized_mapping makes it {cls.__name__}"
        return replace(decision, action=Action.QUANTIZED, reason=reason)
    return decision


def _working_copy(prepared: GraphModule, settings: ConvertSettings, parts: dict[int, Any]) -> GraphModule:
    """Return a copy to use up; ``parts`` of sharded parameters, and the parameters of opaque modules whose
    handlers copy them, are not copied."""
    sharing = {
        path: opaque
        for path, opaque in opaque_calls.opaque_modules(prepared).items()
        if (handler := handler_of(opaque)) is not None
        and handler.copies_parameters(_quantized_class(handler, opaque, settings))
    }
    tied = {
        id(parameter)
        for name, parameter in prepared.named_parameters(remove_duplicate=False)
        if not name.startswith(tuple(f"{path}." for path in sharing))
    }
    parameters = [item for opaque in sharing.values() for item in opaque.parameters() if id(item) not in tied]
    with TURNS, without_code(prepared._graph):
        return copy.deepcopy(prepared, {id(parameter): parameter for parameter in parameters} | parts)


def _quantized_class(
    handler: CustomModuleHandler, opaque: opaque_calls.OpaqueModule, settings: ConvertSettings
) -> type[nn.Module] | None:
    mapping = settings.observed_to_quantized.get(opaque.opaque_quant_type, {})
    return handler.quantized_class(opaque, mapping)


def _convert_opaque_modules(state: _Converting) -> tuple[str, ...]:
    """Replace the opaque modules by their converted forms; return the paths of those with parts."""
    owners = []
    working, settings = state.working, state.settings
    steps = {working.get_submodule(path) for path in state.record.steps}

    def convert_inside(inner: GraphModule) -> graph_module.ConvertedGraphModule:
        return convert_to_reference(
            inner,
            settings,
            state.rules if inner in steps else None,  # A standalone module has its own.
            observer_qparams=state.observer_qparams,
            is_inside=True,
        )

    for path, opaque in opaque_calls.opaque_modules(working).items():
        handler = handler_of(opaque)
        assert handler is not None
        observers = _output_observers(working, path)
        request = ConvertRequest(
            opaque,
            _quantized_class(handler, opaque, settings),
            path,
            observers,
            input_observers=_input_observers(working, path),
            convert_inside=convert_inside,
        )
        with nullcontext() if handler.carries_standalone else whole_inside(opaque, path):
            working.set_submodule(path, handler.convert(request))
        if isinstance(opaque, PartOwner):
            owners.append(path)
    return tuple(owners)


def _input_observers(working: GraphModule, path: str) -> tuple[nn.Module | None, ...]:
    """Return the observers of the flat inputs of the first call of the opaque module at ``path``."""
    call = next(node for node in opaque_calls.opaque_call_nodes(working) if node.target == path)
    opaque = working.get_submodule(path)
    assert isinstance(opaque, opaque_calls.OpaqueModule)
    observers = dict(observed_graph.observer_nodes(working))
    return tuple(observers.get(argument) for argument in opaque_calls.tensor_arguments(call, opaque))


def _output_observers(working: GraphModule, path: str) -> tuple[tuple[nn.Module, ...], ...]:
    """Return the observers of each result of the opaque module at ``path``, in flat order: one observer for
    each call."""
    observers = {user.args[0]: observer for user, observer in observed_graph.observer_nodes(working)}
    matches: dict[int, list[nn.Module]] = {}
    for call in opaque_calls.opaque_call_nodes(working):
        for getitem in call.users if call.target == path else ():
            position = position_of(getitem)
            if getitem in observers:
                matches.setdefault(position, []).append(observers[getitem])
    return tuple(tuple(matches[position]) for position in sorted(matches))


def _check_observers(prepared: GraphModule) -> None:
    """Raise for observers that have no finite qparams; warn about observers that saw no data."""
    faults = observed_graph.observer_faults(prepared)
    for path, opaque in opaque_calls.opaque_modules(prepared).items():
        if (handler := handler_of(opaque)) is not None:
            faults.extend((f"{path}.{name}", fault) for name, fault in handler.observer_faults(opaque))
    places = {
        kind: [where for where, fault in faults if fault is kind] for kind in observed_graph.ObserverFault
    }
    if without_qparams := places[observed_graph.ObserverFault.NO_QPARAMS]:
        raise ConvertError.of("TQ950.no_qparams", observers=listed(without_qparams))
    if not_finite := places[observed_graph.ObserverFault.NOT_FINITE]:
        raise ConvertError.of("TQ950.not_finite", observers=listed(not_finite))
    if left_out := observed_graph.observers_without_infinity(prepared):
        warn_user("TQ406", observers=listed(left_out))
    if accidents := places[observed_graph.ObserverFault.ACCIDENT]:
        warn_user("TQ419", observers=listed(accidents))
    if unseen := places[observed_graph.ObserverFault.UNSEEN]:
        warn_user("TQ405", count=len(unseen), observers=listed(unseen))


# Tell, at convert, what a converted model loses on the last calibration batch.
#
# A prepared model may be as good as the float one and the converted model compute nothing of use: a range
# that grew over time, a state that starts at an extreme, an outlier. A prepared model in evaluation holds
# the arguments and the result of its last call; convert runs the converted model on them, once.


#: In dB, against the prepared model: below it, the noise is more than half as strong as the result.
LOST = 3.0
#: Values of a batch that is tried; larger ones take too long.
MOST = 1 << 24


def warn_of_loss(prepared: nn.Module, converted: graph_module.ConvertedModel) -> None:
    """Warn if ``converted`` computes something else than ``prepared`` on its last calibration batch.

    The prepared model is called again, with its observers off, only where the results differ: the tensors of
    the batch may have got other values since.
    """
    last: graph_module.LastCall | None = vars(prepared).get(graph_module.LAST_CALL)
    is_integer = converted.record.interface.inputs or converted.record.interface.outputs
    # Ranks that have other batches would not all call a sharded model.
    is_other = is_integer or any(map(is_sharded, prepared.parameters()))
    if last is None or is_other or prepared.training or _decides(converted.reference):
        return
    tensors = tensors_in(last.args)
    if sum(tensor.numel() for tensor in tensors) > MOST:
        return
    try:
        with (
            torch.no_grad(),
            draws_kept(),
            kept_buffers(converted, but=torch.int8),
            converted.saving_memory(),
        ):
            actual = converted(*copied_inputs(last.args))
        if sqnr(last.result, actual) >= LOST:
            return
        decibels = sqnr(run_prepared(prepared, last.args), actual)
    except Exception:
        return  # What the converted model cannot take it refuses when it is called.
    finally:
        give_back_freed()
    if decibels < LOST:
        warn_user("TQ441", decibels=decibels)


def _decides(model: nn.Module) -> bool:
    """Return whether ``model`` draws, or chooses by position as a greedy decoder does: a step leads it
    elsewhere."""
    graphs = (module.graph for module in model.modules() if isinstance(module, GraphModule))
    return any(
        node.target in those("positions") or (draws(node) and training_flag(node) is not False)
        for graph in graphs
        for node in graph.nodes
    )
