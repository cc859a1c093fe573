"""A standalone module as one opaque call of the outer graph: a prepared or converted model at the module's
path."""

from __future__ import annotations

from functools import wraps
from typing import Any, TypeVar

from torch import Tensor
from torch.fx.graph import PythonCode

from torchq_compat.graph.graph_module import ConvertedGraphModule, QuantizationGraphModule
from torchq_compat.graph.quantized_interface import quantize_inputs
from torchq_compat.opaque_calls.layouts import CallLayout
from torchq_compat.opaque_calls.opaque_module import OpaqueModule
from torchq_compat.qspecs.qparams import QParams
from torchq_compat.support import metadata
from torchq_compat.support.upstream import pytree

__all__ = ["ConvertedStandalone", "PreparedStandalone", "standalone"]

T = TypeVar("T")


def standalone(kind: type[T]) -> type[T]:
    """Let ``kind``, a class of captured models that is opaque too, take calls of an outer graph."""
    parent: Any = super(kind, kind)

    def layouts(self: Any) -> list[CallLayout]:
        # In meta, because GraphModule.__deepcopy__ drops other attributes.
        found: list[CallLayout] = self.meta.get(metadata.LAYOUTS.name, [])
        return found

    def set_layouts(self: Any, layouts: list[CallLayout]) -> None:
        self.meta[metadata.LAYOUTS.name] = layouts

    def call(self: Any, *args: Any, opaque_layout: int | None = None, **kwargs: Any) -> Any:
        if opaque_layout is None:
            return parent.__call__(self, *args, **kwargs)
        return self._opaque_call_flat(self.opaque_layouts[opaque_layout], args)

    def recompile(self: Any) -> PythonCode:
        code: PythonCode = parent.recompile(self)
        of_instance = type(self)  # A class with one instance; Dynamo calls its forward and not ``__call__``.
        compiled = of_instance.forward

        @wraps(compiled)
        def forward(self: Any, *args: Any, opaque_layout: int | None = None) -> Any:
            if opaque_layout is None:
                return compiled(self, *args)
            return self._opaque_call_flat(self.opaque_layouts[opaque_layout], args)

        of_instance.forward = forward
        return code

    made: Any = kind
    made.opaque_layouts, made.__call__, made.recompile = property(layouts, set_layouts), call, recompile
    # Quantized results are integers already.
    made.opaque_hand_out = lambda self, result, qparams: result
    return kind


@standalone
class PreparedStandalone(OpaqueModule, QuantizationGraphModule):
    """A prepared standalone module."""

    def opaque_call(self, *args: Any, **kwargs: Any) -> Any:
        return QuantizationGraphModule.__call__(self, *args, **kwargs)


@standalone
class ConvertedStandalone(OpaqueModule, ConvertedGraphModule):
    """A converted standalone module."""

    def opaque_call(self, *args: Any, **kwargs: Any) -> Any:
        bound = self.record.signature.bind(args, kwargs)
        return ConvertedGraphModule.__call__(self, *quantize_inputs(bound, self.input_qparams()))

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
