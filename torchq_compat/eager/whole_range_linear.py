"""``torch.ao.nn.quantized.dynamic.Linear`` whose inputs use the whole 8-bit range.

torch.ao's forward requests half of the range; on CPUs without VNNI, its kernel would saturate with all of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchq_compat.custom_modules.recurrent.native.linear_calls import (
    LINEAR_OPERATOR,
    LinearCall,
    LinearWeight,
    linear_call,
)
from torchq_compat.custom_modules.recurrent.native.program import DynamicQParams
from torchq_compat.qspecs.dynamic_qparams import SMALLEST_SCALE
from torchq_compat.support.quantized_tensors import channel_qparams, integers_of, is_per_channel, qparams_of
from torchq_compat.support.torch_ao import quantized

__all__ = ["WholeRangeLinear"]

MADE = "_whole_range_call"
WHOLE_RANGE = DynamicQParams(SMALLEST_SCALE, 255, 0, 255, torch.uint8)


class WholeRangeLinear(quantized.dynamic.Linear):
    """torch.ao's dynamic Linear on this package's own matrix product; the state_dict is the same."""

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` (..., in_features) to (..., out_features), with one scale and zero point for ``x``."""
        if not x.numel():
            return x.new_empty(*x.shape[:-1], self.out_features)
        packed = self._packed_params._packed_params
        made: tuple[Any, LinearCall] | None = vars(self).get(MADE)
        if made is None or made[0] is not packed:
            made = vars(self)[MADE] = (packed, self._call())
        rows = x.reshape(-1, self.in_features).float()
        (result,) = LINEAR_OPERATOR(rows, *made[1].behind_x())
        assert isinstance(result, Tensor)
        return result.reshape(*x.shape[:-1], self.out_features).to(x.dtype)

    def _call(self) -> LinearCall:
        weight, bias = self.weight(), self.bias()  # type: ignore[no-untyped-call]
        values = integers_of(weight)
        bias = None if bias is None else bias.detach()
        if is_per_channel(weight):
            scales, zero_points = (each.clone() for each in channel_qparams(weight))
            linear = LinearWeight(values, scales.float(), zero_points, bias)
        else:
            linear = LinearWeight(values, None, None, bias, qparams_of(weight))
        return linear_call(linear, ((self.in_features, None),), dynamic=WHOLE_RANGE)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles, without the prepared call, which they make anew."""
        return {name: value for name, value in vars(self).items() if name != MADE}

    def _get_name(self) -> str:
        return "DynamicQuantizedLinear"
