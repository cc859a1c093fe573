"""Dynamic quantization: qparams chosen from each tensor at run time, as ``torch.quantize_per_tensor_dynamic``
does in FX's reference graphs.

FX reads only the dtype of a dynamic observer. The qparams are affine over the range of the dtype, or over
half of it if the quantized engine could overflow. ``WholeRangeObserver`` requests the whole range on every
engine: this package's own matrix products accumulate in 32 bits.
"""

from __future__ import annotations

from typing import Any, Self

import torch
import torchao.quantization.pt2e.observer as pt2e_observer
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from torchq_compat.qspecs.observers import translate_constructor
from torchq_compat.qspecs.qdq import CONVERT_DTYPE, insert_dynamic_q_dq
from torchq_compat.qspecs.torch_ao_subclasses import recognised_by_torch_ao
from torchq_compat.support.dtypes import KERNEL_DTYPES, dtype_range, plain_dtype
from torchq_compat.support.torch_ao import PlaceholderObserver, QConfig

__all__ = [
    "ENGINES_OF_REDUCED_RANGE",
    "DynamicQuantization",
    "WholeRangeObserver",
    "asks_for_whole_range",
    "with_whole_range",
]

#: Engines whose kernels add two products in 16 bits; FX sets ``reduce_range`` for them.
ENGINES_OF_REDUCED_RANGE = ("fbgemm", "x86")
#: The smallest scale that ATen chooses.
SMALLEST_SCALE = 6.1e-5


class WholeRangeObserver(PlaceholderObserver):
    """A dynamic observer, as torch.ao's, whose tensors use all integers of its dtype on every engine.

    FX and torch.ao ignore the difference: to them it is the dynamic observer of its dtype.

    Args:
        dtype: torch.quint8 or torch.qint8.
        arguments: keyword arguments of torch.ao's ``PlaceholderObserver``.
    """

    whole_range = True

    def __init__(self, dtype: torch.dtype = torch.quint8, **arguments: Any) -> None:
        low, high = dtype_range(dtype)
        super().__init__(
            **{**arguments, "dtype": dtype, "quant_min": low, "quant_max": high, "is_dynamic": True}
        )


def with_whole_range(qconfig: QConfig) -> QConfig | None:
    """Return ``qconfig`` with a ``WholeRangeObserver`` as activation; None if its activations are not dynamic
    8-bit integers.

    Raises:
        ConfigError: its activation makes no observer.
    """
    settings = translate_constructor(qconfig.activation).settings
    if not settings.is_dynamic or settings.dtype not in KERNEL_DTYPES:
        return None
    activation = WholeRangeObserver.with_args(dtype=settings.declared_dtype)
    return QConfig(activation=activation, weight=qconfig.weight)  # type: ignore[no-untyped-call]


def asks_for_whole_range(qconfig: QConfig) -> bool:
    """Return whether the activation of ``qconfig`` is a ``WholeRangeObserver``."""
    constructor = getattr(qconfig.activation, "p", qconfig.activation)
    constructor = getattr(constructor, "func", constructor)
    return isinstance(constructor, type) and issubclass(constructor, WholeRangeObserver)


@recognised_by_torch_ao
class DynamicQuantization(pt2e_observer.ObserverBase):  # type: ignore[misc]
    """Takes the place of a dynamic observer; torchao's convert calls ``convert``."""

    def __init__(self, dtype: torch.dtype, *, whole_range: bool = False) -> None:
        super().__init__(dtype=dtype, is_dynamic=True)
        self.whole_range = whole_range

    @classmethod
    def of(cls, observer: nn.Module) -> Self:
        """Return the replacement of a dynamic ``observer``."""
        dtype = plain_dtype(observer.dtype)  # type: ignore[arg-type]
        return cls(dtype, whole_range=bool(getattr(observer, "whole_range", False)))

    def forward(self, x: Tensor) -> Tensor:
        return x

    def calculate_qparams(self, **_: Any) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("the qparams are chosen from each tensor")

    def convert(self, model: GraphModule, observer_node: Node) -> None:
        """Replace ``observer_node`` by nodes that quantize and dequantize its input."""
        source = observer_node.args[0]
        assert isinstance(source, Node)
        graph = model.graph
        with graph.inserting_before(observer_node):
            insert = _to_half_and_back if self.dtype is torch.float16 else self._insert_quantization
            observer_node.replace_all_uses_with(insert(graph, source))
        graph.erase_node(observer_node)

    def _insert_quantization(self, graph: Graph, source: Node) -> Node:
        low, high = dtype_range(self.dtype)
        if torch.backends.quantized.engine in ENGINES_OF_REDUCED_RANGE and not self.whole_range:
            chosen_low, chosen_high = int(low / 2), int(high / 2)
        else:
            chosen_low, chosen_high = low, high
        chosen = chosen_low, chosen_high
        return insert_dynamic_q_dq(graph, source, chosen, (low, high), eps=SMALLEST_SCALE, dtype=self.dtype)


def _to_half_and_back(graph: Graph, source: Node) -> Node:
    half = graph.call_function(CONVERT_DTYPE, (source, torch.float16))
    return graph.call_function(CONVERT_DTYPE, (half, torch.float32))
