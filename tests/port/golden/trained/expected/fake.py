"""Calibration with fake-quantizes, by names of the old namespace."""

import torch.ao.quantization as tq
from torchq_compat import quantize_fx


def quantize(model, x):
    qconfig = tq.QConfig(tq.FakeQuantize, tq.default_weight_fake_quant)
    prepared = quantize_fx.prepare_fx(model, tq.QConfigMapping().set_global(qconfig), (x,))
    prepared(x)
    return quantize_fx.convert_fx(prepared)
