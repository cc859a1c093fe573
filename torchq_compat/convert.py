"""Convert: a calibrated or trained model -> its q-dq form."""

from __future__ import annotations

import copy
from dataclasses import replace

from torch import nn
from torch.fx import GraphModule
from torch.fx.graph_module import _USER_PRESERVED_ATTRIBUTES_KEY

from torchq_compat.custom_modules.boundary import quantize_boundaries
from torchq_compat.custom_modules.leaf_module import LeafModule
from torchq_compat.custom_modules.leaf_nodes import leaf_nodes, tensor_arguments
from torchq_compat.custom_modules.registry import ConvertRequest, handler_of
from torchq_compat.errors import ConfigError, ConvertError
from torchq_compat.graph_module import ConvertedGraphModule, Stage, record_of
from torchq_compat.legacy.custom_configs import ConvertSettings
from torchq_compat.legacy.qconfig_mappings import QConfigRules, check_convert_rules
from torchq_compat.observed_graph import ObserverFault, convert_graph, observer_faults, observer_nodes
from torchq_compat.quantized_interface import expose_integers
from torchq_compat.switch_off import decide_switched_off, remove_observers, with_switched_off
from torchq_compat.user_warnings import warn_user

__all__ = ["convert_to_reference"]


def convert_to_reference(
    prepared: GraphModule, settings: ConvertSettings, rules: QConfigRules | None = None
) -> ConvertedGraphModule:
    """The q-dq form of ``prepared``, which stays usable.

    Args:
        rules: a QConfigMapping with None for what shall stay float; None: the one of prepare.

    Raises:
        ConfigError: ``rules`` say more than None to what was prepared.
        ConvertError: ``prepared`` did not come from this package's prepare, or has seen NaN or infinity.
        CustomModuleError: a quantized class that does not do what the mapping promises.
    """
    record = record_of(prepared)
    if record is None or record.stage is not Stage.PREPARED:
        raise ConvertError.not_prepared(prepared)
    preserved = {
        name: getattr(prepared, name)
        for name in (*prepared.meta[_USER_PRESERVED_ATTRIBUTES_KEY], *settings.preserved_attributes)
        if hasattr(prepared, name)
    }
    switched_off: dict[str, str] = {}
    if rules is not None:
        if record.rules is None:
            raise ConfigError.mapping_after_quantizer()
        check_convert_rules(record.rules, rules)
        switched_off = decide_switched_off(prepared, record.rules, rules)
    _check_observers(prepared)
    working = copy.deepcopy(prepared)
    working.eval()
    if switched_off:
        remove_observers(working, switched_off)
    _convert_leaves(working, settings)
    converted = convert_graph(working, as_fx=record.rules is not None, is_trained=record.is_qat)
    quantize_boundaries(converted)
    expose_integers(converted, record.interface)
    decisions = with_switched_off(record.decisions, switched_off)
    record = replace(record, stage=Stage.CONVERTED, decisions=decisions)
    return ConvertedGraphModule.wrap(converted, record, preserved)


def _convert_leaves(working: GraphModule, settings: ConvertSettings) -> None:
    for path in {str(node.target): None for node in leaf_nodes(working)}:
        leaf = working.get_submodule(path)
        handler = handler_of(leaf)
        assert isinstance(leaf, LeafModule)
        assert handler is not None
        mapping = settings.observed_to_quantized.get(leaf.leaf_quant_type, {})
        observers = _output_observers(working, path)
        request = ConvertRequest(
            leaf,
            handler.quantized_class(leaf, mapping),
            path,
            observers,
            input_observers=_input_observers(working, path),
            convert_inside=lambda inner: convert_to_reference(inner, settings),
        )
        working.set_submodule(path, handler.convert(request))


def _input_observers(working: GraphModule, path: str) -> tuple[nn.Module | None, ...]:
    """What observes the flat inputs of the first call of the leaf at ``path``."""
    call = next(node for node in leaf_nodes(working) if node.target == path)
    leaf = working.get_submodule(path)
    assert isinstance(leaf, LeafModule)
    observers = dict(observer_nodes(working))
    return tuple(observers.get(argument) for argument in tensor_arguments(call, leaf))


def _output_observers(working: GraphModule, path: str) -> tuple[tuple[nn.Module, ...], ...]:
    """What observes the results of the leaf at ``path``, in flat order, one observer for each call."""
    observers = {user.args[0]: observer for user, observer in observer_nodes(working)}
    found: dict[int, list[nn.Module]] = {}
    for call in leaf_nodes(working):
        for getitem in call.users if call.target == path else ():
            position = getitem.args[1]
            assert isinstance(position, int)
            if getitem in observers:
                found.setdefault(position, []).append(observers[getitem])
    return tuple(tuple(found[position]) for position in sorted(found))


def _check_observers(prepared: GraphModule) -> None:
    """Refuse qparams that are not numbers; warn about observers that saw nothing."""
    faults = observer_faults(prepared)
    for path in {str(node.target): None for node in leaf_nodes(prepared)}:
        leaf = prepared.get_submodule(path)
        handler = handler_of(leaf)
        if handler is not None and isinstance(leaf, LeafModule):
            faults.extend((f"{path}.{name}", fault) for name, fault in handler.observer_faults(leaf))
    without_qparams = [where for where, fault in faults if fault is ObserverFault.NO_QPARAMS]
    if without_qparams:
        raise ConvertError.no_qparams(_shorten(without_qparams))
    not_finite = [where for where, fault in faults if fault is ObserverFault.NOT_FINITE]
    if not_finite:
        raise ConvertError.not_finite(_shorten(not_finite))
    if faults:
        warn_user(
            f"{len(faults)} observers have seen no data, so their qparams mean nothing: "
            f"{_shorten([where for where, _ in faults])}. "
            "Run the prepared model on calibration data, through every branch, before converting it."
        )


def _shorten(places: list[str]) -> str:
    return ", ".join(places[:5]) + (f" and {len(places) - 5} more" if len(places) > 5 else "")
