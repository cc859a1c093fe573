"""Convert: a calibrated or trained model -> its q-dq form."""

from __future__ import annotations

import copy
from dataclasses import replace

from torch import nn
from torch.fx import GraphModule
from torch.fx.graph_module import _USER_PRESERVED_ATTRIBUTES_KEY

from torchq_compat.custom_modules.boundary import quantize_boundaries
from torchq_compat.custom_modules.leaf_module import LeafModule
from torchq_compat.custom_modules.leaf_nodes import leaf_nodes
from torchq_compat.custom_modules.registry import ConvertRequest, handler_of
from torchq_compat.errors import ConvertError
from torchq_compat.graph_module import ConvertedGraphModule, Stage, record_of
from torchq_compat.legacy.custom_configs import ConvertSettings
from torchq_compat.observed_graph import ObserverFault, convert_graph, observer_faults, observer_nodes
from torchq_compat.quantized_interface import expose_integers
from torchq_compat.user_warnings import warn_user

__all__ = ["convert_to_reference"]


def convert_to_reference(prepared: GraphModule, settings: ConvertSettings) -> ConvertedGraphModule:
    """The q-dq form of ``prepared``, which stays usable.

    Raises:
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
    working = copy.deepcopy(prepared)
    working.eval()
    _check_observers(working)
    _convert_leaves(working, settings)
    converted = convert_graph(working)
    quantize_boundaries(converted)
    expose_integers(converted, record.interface)
    return ConvertedGraphModule.wrap(converted, replace(record, stage=Stage.CONVERTED), preserved)


def _convert_leaves(working: GraphModule, settings: ConvertSettings) -> None:
    for path in {str(node.target): None for node in leaf_nodes(working)}:
        leaf = working.get_submodule(path)
        handler = handler_of(leaf)
        assert isinstance(leaf, LeafModule)
        assert handler is not None
        mapping = settings.observed_to_quantized.get(leaf.leaf_quant_type, {})
        observers = _output_observers(working, path)
        request = ConvertRequest(leaf, handler.quantized_class(leaf, mapping), path, observers)
        working.set_submodule(path, handler.convert(request))


def _output_observers(working: GraphModule, path: str) -> tuple[nn.Module, ...]:
    """What observes the results of the leaf at ``path``, in flat order."""
    found: dict[int, nn.Module] = {}
    for call in leaf_nodes(working):
        for getitem in call.users if call.target == path else ():
            position = getitem.args[1]
            assert isinstance(position, int)
            for user, observer in observer_nodes(working):
                if user.args[0] is getitem:
                    found.setdefault(position, observer)
    return tuple(found[position] for position in sorted(found))


def _check_observers(working: GraphModule) -> None:
    """Refuse qparams that are not numbers; warn about observers that saw nothing."""
    faults = observer_faults(working)
    for path in {str(node.target): None for node in leaf_nodes(working)}:
        leaf = working.get_submodule(path)
        handler = handler_of(leaf)
        if handler is not None and isinstance(leaf, LeafModule):
            faults.extend((f"{path}.{name}", fault) for name, fault in handler.observer_faults(leaf))
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
