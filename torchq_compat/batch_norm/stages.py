"""torchao's prepare and convert, with batch norms as FX treats them."""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch.fx import GraphModule
from torchao.quantization.pt2e.quantizer import Quantizer

from torchq_compat.batch_norm.cumulative import average_cumulatively, fix_averaging_factors
from torchq_compat.batch_norm.fold import fold_batch_norms
from torchq_compat.batch_norm.fuse import fuse_batch_norms
from torchq_compat.batch_norm.hide import (
    HidingBatchNorms,
    ShowingBatchNorms,
    hide_batch_norms,
    hide_unfoldable_batch_norms,
    show_batch_norms,
)
from torchq_compat.capture.training_modes import drop_batch_counters
from torchq_compat.support.torchao_flow import convert_pt2e, prepare_pt2e, prepare_qat_pt2e

__all__ = ["convert", "prepare"]


def prepare(
    graph_module: GraphModule, quantizer: Quantizer, *, is_qat: bool, cumulative: Collection[str] = ()
) -> GraphModule:
    """Insert observers or fake-quantizes into ``graph_module`` where ``quantizer`` annotates.

    Args:
        cumulative: the paths of running means that ``before_capture`` returned.
    """
    if is_qat:
        prepared = prepare_qat_pt2e(graph_module, HidingBatchNorms(quantizer))
        show_batch_norms(prepared)
        fuse_batch_norms(prepared)
    else:
        hide_unfoldable_batch_norms(graph_module)
        prepared = prepare_pt2e(graph_module, ShowingBatchNorms(quantizer))
    if cumulative:
        average_cumulatively(prepared, cumulative)
    return prepared


def convert(prepared: GraphModule, fix_observers: Callable[[GraphModule], None]) -> GraphModule:
    """Return ``prepared``, which is changed, with its observers replaced by q-dq.

    Args:
        fix_observers: called after the batch norms are folded, before torchao reads the observers.
    """
    drop_batch_counters(prepared)
    fix_averaging_factors(prepared)
    fold_batch_norms(prepared)
    fix_observers(prepared)
    hide_batch_norms(prepared)
    converted = convert_pt2e(prepared)
    show_batch_norms(converted)
    return converted
