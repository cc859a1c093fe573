"""A standalone module as one opaque call of the outer graph: a prepared or converted model at the module's
path."""

from __future__ import annotations

from functools import wraps
from typing import Any

from torch import Tensor
from torch.fx import GraphModule
from torch.fx.graph import PythonCode

from torchq_compat.graph.graph_module import ConvertedGraphModule, QuantizationGraphModule
from torchq_compat.graph.quantized_interface import quantize_inputs
from torchq_compat.opaque_calls.layouts import CallLayout
from torchq_compat.opaque_calls.opaque_module import OpaqueModule
from torchq_compat.qspecs.qparams import QParams
from torchq_compat.support import metadata
from torchq_compat.support.upstream import pytree

__all__ = ["ConvertedStandalone", "PreparedStandalone"]


def _layouts(module: Any) -> list[CallLayout]:
    # In meta, because GraphModule.__deepcopy__ drops other attributes.
    layouts: list[CallLayout] = module.meta.get(metadata.LAYOUTS.name, [])
    return layouts


def _set_layouts(module: Any, layouts: list[CallLayout]) -> None:
    module.meta[metadata.LAYOUTS.name] = layouts


def _take_calls_of_graphs(kind: type[GraphModule]) -> None:
    """Make ``forward`` of ``kind``, a class with one instance, take calls of the outer graph: Dynamo calls it
    and not ``__call__``."""
    compiled = kind.forward

    @wraps(compiled)
    def forward(self: Any, *args: Any, opaque_layout: int | None = None) -> Any:
        if opaque_layout is None:
            return compiled(self, *args)
        return self._opaque_call_flat(self.opaque_layouts[opaque_layout], args)

    kind.forward = forward


class PreparedStandalone(OpaqueModule, QuantizationGraphModule):
    """A prepared standalone module."""

    opaque_layouts = property(_layouts, _set_layouts)

    def __call__(self, *args: Any, opaque_layout: int | None = None, **kwargs: Any) -> Any:
        if opaque_layout is None:
            return super().__call__(*args, **kwargs)
        return self._opaque_call_flat(self.opaque_layouts[opaque_layout], args)

    def recompile(self) -> PythonCode:
        """See ``torch.fx.GraphModule``."""
        code = super().recompile()
        _take_calls_of_graphs(type(self))
        return code

    def opaque_call(self, *args: Any, **kwargs: Any) -> Any:
        return QuantizationGraphModule.__call__(self, *args, **kwargs)

    def opaque_hand_out(self, result: Tensor, qparams: QParams | None) -> Tensor:
        """Return ``result``: quantized results are already integers."""
        return result


class ConvertedStandalone(OpaqueModule, ConvertedGraphModule):
    """A converted standalone module."""

    opaque_layouts = property(_layouts, _set_layouts)

    def __call__(self, *args: Any, opaque_layout: int | None = None, **kwargs: Any) -> Any:
        if opaque_layout is None:
            return super().__call__(*args, **kwargs)
        return self._opaque_call_flat(self.opaque_layouts[opaque_layout], args)

    def recompile(self) -> PythonCode:
        """See ``torch.fx.GraphModule``."""
        code = super().recompile()
        _take_calls_of_graphs(type(self))
        return code

    def opaque_call(self, *args: Any, **kwargs: Any) -> Any:
        bound = self.record.signature.bind(args, kwargs)
        return ConvertedGraphModule.__call__(self, *quantize_inputs(bound, self.input_qparams()))

    def opaque_hand_out(self, result: Tensor, qparams: QParams | None) -> Tensor:
        """Return ``result``: quantized results are already integers."""
        return result

    def opaque_output_qparams(self, results: list[Tensor]) -> tuple[QParams | None, ...]:
        returned = self.graph.output_node().args[0]
        leaves = pytree.tree_leaves(returned)
        # Constants among the returned values do not count as results of the opaque module.
        return tuple(
            qparams
            for qparams, leaf in zip(self.output_qparams(), leaves, strict=True)
            if hasattr(leaf, "meta")
        )


OpaqueStandalone = PreparedStandalone | ConvertedStandalone
