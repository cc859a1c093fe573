"""FX's kernels as an oracle on a CPU without VNNI, where they saturate."""

from __future__ import annotations

from functools import partial
from typing import TypeVar

import torch
import torch.ao.nn.intrinsic.quantized as nniq
import torch.ao.nn.quantized as nnq
import torch.nn.functional as F
from torch import Tensor, nn

from torchq_compat.support.quantized_tensors import sums_saturate

Model = TypeVar("Model", bound=nn.Module)


def with_exact_sums(model: Model) -> Model:
    """Let linears of FX sum exactly also where they would saturate: the oracle is FX, and not the CPU."""
    for module in model.modules() if sums_saturate() else ():
        if type(module) in (nnq.Linear, nniq.LinearReLU):
            module.forward = partial(_exact_linear, module)
    return model


def _exact_linear(module: nnq.Linear, x: Tensor) -> Tensor:
    weight, bias = module._weight_bias()
    bias = None if bias is None else bias.double()
    result = F.linear(x.dequantize().double(), weight.dequantize().double(), bias).float()
    result = result.relu() if isinstance(module, nniq.LinearReLU) else result
    return torch.quantize_per_tensor(result, module.scale, module.zero_point, torch.quint8)
