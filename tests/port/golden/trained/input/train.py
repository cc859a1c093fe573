"""Quantization-aware training: FX converts with the qparams of the observers."""

import torch
from torch.ao.quantization import get_default_qat_qconfig_mapping, quantize_fx
from torch.ao.quantization.quantize_fx import (
    convert_fx,
    convert_to_reference_fx,
    prepare_qat_fx,
)


def train(model, x, config, options):
    prepared = prepare_qat_fx(model, get_default_qat_qconfig_mapping("x86"), (x,))
    prepared(x).sum().backward()
    quantized = convert_fx(prepared.eval())
    again = quantize_fx.convert_fx(
        prepared,
        config,  # of the custom modules
    )
    hanging = convert_fx(
        graph_module=prepared
    )
    closed = convert_fx(
        prepared,
        config,)
    reference = convert_to_reference_fx(prepared, config,)
    flagged = convert_fx(prepared, is_reference=True)
    starred = convert_fx(*options["args"], **options["kwargs"])
    asked = convert_fx(prepared, observer_qparams=False)
    return quantized, again, hanging, closed, reference, flagged, starred, asked
