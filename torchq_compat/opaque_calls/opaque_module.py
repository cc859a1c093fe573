"""The module behind an opaque call of the outer graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchq_compat.opaque_calls.layouts import CallLayout, Structure
from torchq_compat.qspecs.qparams import QParams
from torchq_compat.support.torch_ao import QuantType

__all__ = ["OpaqueModule"]


class OpaqueModule(nn.Module):
    """A custom module that can be called in two ways.

    A user calls it with the arguments and results of the float module that it replaces (``opaque_call``). The
    graph calls it with flat tensors and the index of a ``CallLayout``; at a quantized boundary the tensors
    are integers. Names begin with ``opaque`` or ``leaf``: the class is also mixed into classes of users.
    """

    opaque_layouts: list[CallLayout]
    opaque_quant_type = QuantType.STATIC
    #: The class the script mapped the float module to.
    opaque_observed_class: type[nn.Module] | None = None
    #: Whether the results of ``opaque_call`` are already rounded to ``opaque_output_qparams``, and an
    #: exported program shows the per-tensor qparams that they are computed with.
    opaque_shows_result_qparams = False
    #: Whether it accepts and returns floats rounded to the qparams of its layouts, in place of integers.
    opaque_in_floats = False
    #: Whether it rounds float inputs to the qparams of its layouts, and accepts integers too; a call's
    #: ``leaf_quantized`` then gives the results to return as integers.
    leaf_quantizes = False

    def opaque_call(self, *args: Any, **kwargs: Any) -> Any:
        """Compute with floats, with the arguments and results of the float module."""
        raise NotImplementedError

    def opaque_output_qparams(self, results: list[Tensor]) -> tuple[QParams | None, ...]:
        """Return the qparams of each of the flat ``results`` (of any device, also ``meta``); None: floats."""
        return (None,) * len(results)

    def forward(self, *args: Any, opaque_layout: int | None = None, **kwargs: Any) -> Any:
        if opaque_layout is None:
            return self.opaque_call(*args, **kwargs)
        return self._opaque_call_flat(self.opaque_layouts[opaque_layout], args)

    def opaque_call_from_graph(
        self, layout: CallLayout, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return the result of ``opaque_call`` for a call of the graph, whose qparams are in ``layout``."""
        return self.opaque_call(*args, **kwargs)

    def opaque_receive(self, q: Tensor, qparams: QParams) -> Tensor:
        """Return the argument of ``opaque_call`` for the integers ``q`` with ``qparams``."""
        return qparams.dequantize(q, self.opaque_float_dtype())

    def opaque_hand_out(self, result: Tensor, qparams: QParams | None) -> Tensor:
        """Return the value that the graph receives for a ``result`` of ``opaque_call``."""
        return result if qparams is None else qparams.quantize(result)

    def opaque_set_qparams(
        self, index: int, inputs: tuple[QParams | None, ...], outputs: tuple[QParams | None, ...]
    ) -> None:
        """Set the qparams of the integers of call ``index``."""
        layouts = list(self.opaque_layouts)
        layouts[index] = layouts[index].with_qparams(inputs, outputs)
        self.opaque_layouts = layouts

    def opaque_check_results(self, layout: CallLayout, results: Any) -> None:
        """Raise if ``results`` have another structure than in capture; does nothing unless overridden."""

    def _opaque_call_flat(self, layout: CallLayout, flat: tuple[Any, ...]) -> tuple[Tensor, ...]:
        count = layout.inputs.count()
        tensors, sizes = flat[:count], flat[count:]
        if layout.input_qparams:
            tensors = tuple(map(self._as_floats, tensors, layout.input_qparams))
        args, kwargs = layout.inputs.put_together(tensors, sizes)
        nested = self.opaque_call_from_graph(layout, args, kwargs)
        self.opaque_check_results(layout, nested)
        _, results = Structure.take_apart(nested)
        if self.opaque_in_floats:
            return tuple(results)
        output_qparams = layout.output_qparams or (None,) * len(results)
        return tuple(self.opaque_hand_out(*pair) for pair in zip(results, output_qparams, strict=True))

    def _as_floats(self, tensor: Tensor, qparams: QParams | None) -> Tensor:
        if qparams is None or (self.opaque_in_floats and tensor.is_floating_point()):
            return tensor
        return self.opaque_receive(tensor, qparams)

    def opaque_float_dtype(self) -> torch.dtype:
        """Return the float dtype that the module computes in."""
        return torch.float32
