"""Convert: a calibrated or trained model -> its q-dq form."""

from __future__ import annotations

import copy
from dataclasses import replace

from torch.fx import GraphModule
from torch.fx.graph_module import _USER_PRESERVED_ATTRIBUTES_KEY

from torchq_compat.custom_modules.boundary import quantize_boundaries
from torchq_compat.custom_modules.leaf_module import LeafModule
from torchq_compat.custom_modules.leaf_nodes import leaf_nodes
from torchq_compat.custom_modules.registry import handler_of
from torchq_compat.errors import ConvertError
from torchq_compat.graph_module import QuantizationGraphModule, Stage, record_of
from torchq_compat.legacy.custom_configs import ConvertSettings
from torchq_compat.observed_graph import convert_graph, uncalibrated_observers
from torchq_compat.user_warnings import warn_user

__all__ = ["convert_to_reference"]


def convert_to_reference(prepared: GraphModule, settings: ConvertSettings) -> QuantizationGraphModule:
    """The q-dq form of ``prepared``, which stays usable.

    Raises:
        ConvertError: ``prepared`` did not come from this package's prepare.
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
    _warn_if_uncalibrated(working)
    _convert_leaves(working, settings)
    converted = convert_graph(working)
    quantize_boundaries(converted)
    return QuantizationGraphModule.wrap(converted, replace(record, stage=Stage.CONVERTED), preserved)


def _convert_leaves(working: GraphModule, settings: ConvertSettings) -> None:
    for path in {str(node.target): None for node in leaf_nodes(working)}:
        leaf = working.get_submodule(path)
        handler = handler_of(leaf)
        assert isinstance(leaf, LeafModule)
        assert handler is not None
        quantized_class = handler.quantized_class(leaf, settings.observed_to_quantized)
        working.set_submodule(path, handler.convert(leaf, quantized_class, path))


def _warn_if_uncalibrated(working: GraphModule) -> None:
    unseen = uncalibrated_observers(working)
    for path in {str(node.target): None for node in leaf_nodes(working)}:
        leaf = working.get_submodule(path)
        handler = handler_of(leaf)
        if handler is not None and isinstance(leaf, LeafModule):
            unseen.extend(f"{path}.{name}" for name in handler.uncalibrated(leaf))
    if unseen:
        shown = ", ".join(unseen[:5]) + (f" and {len(unseen) - 5} more" if len(unseen) > 5 else "")
        warn_user(
            f"{len(unseen)} observers have seen no data, so their qparams mean nothing: {shown}. "
            "Run the prepared model on calibration data before converting it."
        )
